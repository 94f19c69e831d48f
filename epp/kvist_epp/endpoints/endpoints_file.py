"""The fleet from a file's text, read strictly. Pure; ``watch`` does the I/O.

A picker that takes half a file for the fleet sends everybody to half the engines, so a file is used whole or
not at all: unknown keys, duplicates and wrong types are errors that name the entry and the field, and the old
fleet stays.
"""

import difflib
import json
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Final, NoReturn

import yaml

from kvist_epp.endpoints.endpoint import Endpoint, Fleet, canonical_ip, default_sources
from kvist_epp.errors import EndpointsFileError

MAX_FILE_BYTES: Final = 16 * 1024 * 1024
MAX_RANKS: Final = 1024
NONE: Final = "none"
"""``kvEvents: none``: the engine publishes no events; it is matched from the routing history."""

FIELDS: Final = (
    "name",
    "namespace",
    "address",
    "port",
    "labels",
    "kvEvents",
    "kvReplay",
    "dataParallelRanks",
)
SHOWN_PROBLEMS: Final = 5

_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9])?")
_SOURCE = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?):([0-9]{1,5})")


def parse(text: bytes) -> Fleet:
    """Endpoints file (YAML or JSON) → Fleet.

    ``endpoints: [{name, address, port, namespace, labels, kvEvents, kvReplay, dataParallelRanks}]``; the
    first three are required, namespace is ``default`` without one. kvEvents absent or null:
    ``tcp://<address>:5557``, kvReplay: ``tcp://<address>:5657``; ``none``: the engine has none. Rank r adds r
    to both ports.

    Raises ``EndpointsFileError`` naming entries and fields, the first five problems at once.
    """
    document = _document(text)
    if document is None:
        raise EndpointsFileError("the endpoints file is empty: write `endpoints: []` for no endpoints")
    if not isinstance(document, Mapping):
        raise EndpointsFileError(
            f"the endpoints file must be a mapping with `endpoints`, not {_kind(document)}"
        )
    problems = [
        f"unknown key {_quoted(key)}{_near(key, ('endpoints',))}" for key in document if key != "endpoints"
    ]
    entries = document.get("endpoints", ())
    if "endpoints" not in document:
        problems.append("`endpoints` is missing")
    elif not isinstance(entries, list):
        problems.append(f"`endpoints` must be a list, not {_kind(entries)}")
        entries = ()
    endpoints = [e for number, raw in enumerate(entries) if (e := _entry(number, raw, problems)) is not None]
    problems += _duplicates(endpoints)
    if problems:
        _refuse(problems)
    return Fleet(tuple(endpoints))


def _refuse(problems: list[str]) -> NoReturn:
    more = len(problems) - SHOWN_PROBLEMS
    shown = problems[:SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
    raise EndpointsFileError("; ".join(shown))


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice (YAML would let the last one win, silently) and merge keys
    (nested, a kilobyte of them fills any memory)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or key.value in seen:
                what = (
                    f"key {_quoted(key.value)} is written twice"
                    if key.value in seen
                    else "merge keys are not read"
                )
                raise yaml.MarkedYAMLError(problem=what, problem_mark=key.start_mark)
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"key {_quoted(twice)} is written twice")
    return dict(pairs)


def _document(text: bytes) -> object:
    """The parsed file. PyYAML lets several builtin exceptions out of scalars that lie about their tag."""
    if len(text) > MAX_FILE_BYTES:
        raise EndpointsFileError(f"the endpoints file is larger than {MAX_FILE_BYTES} bytes")
    try:
        decoded = text.decode("utf-8-sig")
        if decoded.lstrip().startswith("{"):
            try:
                return json.loads(decoded, object_pairs_hook=_once)
            except json.JSONDecodeError:
                pass  # YAML's flow style begins like JSON
        return yaml.load(decoded, _StrictLoader)
    except UnicodeDecodeError as error:
        raise EndpointsFileError(f"the endpoints file is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise EndpointsFileError("the endpoints file is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise EndpointsFileError(f"the endpoints file is not YAML{where}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise EndpointsFileError(f"the endpoints file is not YAML: {str(error)[:200]}") from None


def _entry(number: int, raw: object, problems: list[str]) -> Endpoint | None:
    """One entry, or None and what is wrong with it added to ``problems``."""
    if not isinstance(raw, Mapping):
        problems.append(f"endpoints[{number}]: must be a mapping, not {_kind(raw)}")
        return None
    label = raw.get("name") if isinstance(raw.get("name"), str) else None
    where = f"endpoints[{number}]" + (f" ({label[:80]})" if label else "")
    wrong: list[str] = [
        f"{where}: unknown key {_quoted(k)}{_near(k, FIELDS)}" for k in raw if k not in FIELDS
    ]
    values: dict[str, object] = {}
    for name, read in _READERS.items():
        try:
            values[name] = read(raw.get(name))
        except _Wrong as error:
            wrong.append(f"{where}: {name}: {error}")
    problems += wrong
    return None if wrong else _endpoint(values)


def _endpoint(values: Mapping[str, object]) -> Endpoint:
    address, events, replay = str(values["address"]), values["kvEvents"], values["kvReplay"]
    default_events, default_replay = default_sources(address)
    return Endpoint(
        name=str(values["name"]),
        namespace=str(values["namespace"]),
        address=address,
        port=_integer(values["port"]),
        labels=_labels(values["labels"]),
        kv_events=None if events == NONE else str(events or default_events),
        kv_replay=None if NONE in (events, replay) else str(replay or default_replay),
        ranks=_integer(values["dataParallelRanks"]),
    )


class _Wrong(ValueError):
    """What is wrong with one field."""


def _name(raw: object) -> str:
    if raw is None:
        raise _Wrong("is required")
    text = _text(raw)
    if not _NAME.fullmatch(text):
        raise _Wrong(f"{_quoted(text)} is not a name (letters, digits, '-', '_', '.')")
    return text


def _namespace(raw: object) -> str:
    return "default" if raw is None else _name(raw)


def _address(raw: object) -> str:
    if raw is None:
        raise _Wrong("is required")
    text = _text(raw)
    try:
        return canonical_ip(text)
    except ValueError:
        raise _Wrong(
            f"{_quoted(text)} is not an IPv4 or IPv6 address (a proxy is sent there by address)"
        ) from None


def _port(raw: object) -> int:
    if raw is None:
        raise _Wrong("is required")
    digits = isinstance(raw, str) and raw.isascii() and raw.isdigit() and len(raw) < 6
    return _within(_integer(int(str(raw)) if digits else raw), 1, 65535)  # llm-d's files have texts


def _ranks(raw: object) -> int:
    return 1 if raw is None else _within(_integer(raw), 1, MAX_RANKS)


def _within(value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise _Wrong(f"must be {low} to {high}, not {str(value)[:20]}")
    return value


def _labels(raw: object) -> dict[str, str]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise _Wrong(f"must be a mapping of strings, not {_kind(raw)}")
    for key, value in raw.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise _Wrong(f"{_quoted(key)} must be a string with a string as value: write it in quotes")
    return dict(raw)


def _source(raw: object) -> str | None:
    if raw is None:
        return None
    text = _text(raw)
    if text == NONE:
        return text
    match = _SOURCE.fullmatch(text)
    if match is None or not 1 <= int(match[3]) <= 65535 - MAX_RANKS:
        raise _Wrong(
            f"{_quoted(text)} is not tcp://host:port (with a port of 1 to {65535 - MAX_RANKS}) or none"
        )
    return text


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise _Wrong(f"must be a string, not {_kind(raw)}")
    return raw


def _integer(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool):
        raise _Wrong(f"must be a whole number, not {_kind(raw)}")
    return raw


_READERS: Final[Mapping[str, Callable[[object], object]]] = {
    "name": _name,
    "namespace": _namespace,
    "address": _address,
    "port": _port,
    "labels": _labels,
    "kvEvents": _source,
    "kvReplay": _source,
    "dataParallelRanks": _ranks,
}


def _duplicates(endpoints: list[Endpoint]) -> list[str]:
    problems, names, addresses = [], set[str](), dict[str, str]()
    for endpoint in endpoints:
        if endpoint.key in names:
            problems.append(f"{endpoint.key}: name: is there twice")
        names.add(endpoint.key)
        first = addresses.setdefault(endpoint.hostport, endpoint.key)
        if first != endpoint.key:
            problems.append(f"{endpoint.key}: address: {endpoint.hostport} is {first}'s already")
    return problems


def _near(key: object, known: tuple[str, ...]) -> str:
    squeezed = {name.lower(): name for name in known}
    wanted = str(key)[:80].replace("_", "").replace("-", "").lower()
    matches = difflib.get_close_matches(wanted, squeezed, n=1)
    return f" (did you mean {squeezed[matches[0]]!r}?)" if matches else f" (known: {', '.join(known)})"


def _quoted(value: object) -> str:
    return repr(str(value)[:80])


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "a mapping",
    }
    return kinds.get(type(value), f"a {type(value).__name__}")
