"""Reads endpoints from a file, and watches the file for changes.

A picker that used half a file would send all requests to half the engines. A file is therefore used as a
whole or not at all: unknown keys, duplicates and wrong types are errors that name the entry and the field,
and the old endpoints stay.
"""

import asyncio
import difflib
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet, canonical_ip, default_sources
from kvist_epp.errors import EndpointsFileError

logger = logging.getLogger(__name__)

MAX_FILE_BYTES: Final = 16 * 1024 * 1024
MAX_RANKS: Final = 1024
NONE: Final = "none"
"""Value of ``kvEvents`` for an engine that publishes no events: prompts are matched with its routing
history."""

SHOWN_PROBLEMS: Final = 5

_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9])?")
Signature = tuple[int, int, int]
"""Inode, size and modification time (nanoseconds)."""
_SOURCE = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?):([0-9]{1,5})")


def parse_endpoints(text: bytes) -> EndpointSet:
    """Return the endpoints of a file's text (YAML or JSON).

    ``endpoints: [{name, address, port, namespace, labels, kvEvents, kvReplay, dataParallelRanks}]``; the
    first three are required. Defaults: namespace ``default``, kvEvents ``tcp://<address>:5557``, kvReplay
    ``tcp://<address>:5657``; ``none`` means that the engine has none. Rank r adds r to both ports.

    Raises ``EndpointsFileError`` that names entry and field of the first five problems.
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
        more = len(problems) - SHOWN_PROBLEMS
        shown = problems[:SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        raise EndpointsFileError("; ".join(shown))
    return EndpointSet(tuple(endpoints))


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, of which YAML silently takes the last, and merge keys, of which
    a nested kilobyte fills any memory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or key.value in seen:
                what = (
                    f"key {_quoted(key.value)} is written twice"
                    if key.value in seen
                    else "merge keys are not supported"
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
    """Return the parsed file. PyYAML lets several builtin exceptions out of scalars that do not fit their
    tag."""
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
    """Return the endpoint of one entry; None, with its errors added to ``problems``, when it has any."""
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
        except _FieldError as error:
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


class _FieldError(ValueError):
    """Problem with one field."""


def _name(raw: object) -> str:
    if raw is None:
        raise _FieldError("is required")
    text = _text(raw)
    if not _NAME.fullmatch(text):
        raise _FieldError(f"{_quoted(text)} is not a name (letters, digits, '-', '_', '.')")
    return text


def _address(raw: object) -> str:
    if raw is None:
        raise _FieldError("is required")
    text = _text(raw)
    try:
        return canonical_ip(text)
    except ValueError:
        raise _FieldError(
            f"{_quoted(text)} is not an IPv4 or IPv6 address (proxies connect by address)"
        ) from None


def _port(raw: object) -> int:
    if raw is None:
        raise _FieldError("is required")
    digits = isinstance(raw, str) and raw.isascii() and raw.isdigit() and len(raw) < 6
    return _within(_integer(int(str(raw)) if digits else raw), 1, 65535)  # llm-d's files have strings


def _ranks(raw: object) -> int:
    return 1 if raw is None else _within(_integer(raw), 1, MAX_RANKS)


def _within(value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise _FieldError(f"must be {low} to {high}, not {str(value)[:20]}")
    return value


def _labels(raw: object) -> dict[str, str]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise _FieldError(f"must be a mapping of strings, not {_kind(raw)}")
    for key, value in raw.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise _FieldError(f"{_quoted(key)} must be a string with a string as value: write it in quotes")
    return dict(raw)


def _source(raw: object) -> str | None:
    if raw is None:
        return None
    text = _text(raw)
    if text == NONE:
        return text
    match = _SOURCE.fullmatch(text)
    if match is None or not 1 <= int(match[3]) <= 65535 - MAX_RANKS:
        raise _FieldError(
            f"{_quoted(text)} is not tcp://host:port (with a port of 1 to {65535 - MAX_RANKS}) or none"
        )
    return text


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise _FieldError(f"must be a string, not {_kind(raw)}")
    return raw


def _integer(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool):
        raise _FieldError(f"must be a whole number, not {_kind(raw)}")
    return raw


_READERS: Final[Mapping[str, Callable[[object], object]]] = {
    "name": _name,
    "namespace": lambda raw: "default" if raw is None else _name(raw),
    "address": _address,
    "port": _port,
    "labels": _labels,
    "kvEvents": _source,
    "kvReplay": _source,
    "dataParallelRanks": _ranks,
}
FIELDS: Final = tuple(_READERS)


def _duplicates(endpoints: list[Endpoint]) -> list[str]:
    problems, names, addresses = [], set[str](), dict[str, str]()
    for endpoint in endpoints:
        if endpoint.key in names:
            problems.append(f"{endpoint.key}: name: is used twice")
        names.add(endpoint.key)
        first = addresses.setdefault(endpoint.hostport, endpoint.key)
        if first != endpoint.key:
            problems.append(f"{endpoint.key}: address: {endpoint.hostport} is already the address of {first}")
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
    kinds = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    if isinstance(value, dict):
        return "a mapping"
    return kinds.get(type(value), f"a {type(value).__name__}")


class EndpointsFileWatcher:
    """A ``Discovery`` that reads the endpoints file again when it changes.

    Polling ``stat`` works where inotify does not: ConfigMap symlink swaps, atomic renames, network file
    systems. A file that cannot be used, or has gone, leaves the endpoints as they are.
    """

    SETTLE_SECONDS: Final = 0.05
    """A changed file is used once two readings this far apart are equal, so that no half-written file is."""
    RACY_NS: Final = 2_000_000_000
    """A file modified this recently is read again although its ``stat`` is the same: file systems have coarse
    clocks."""

    def __init__(
        self,
        path: Path,
        on_endpoints: Callable[[EndpointSet], None],
        on_bad_file: Callable[[str], None] = lambda _problem: None,
        *,
        interval: float = 0.5,
    ) -> None:
        self.path = path
        self.endpoints: EndpointSet | None = None
        """None until the file could be read once: the picker is not ready before."""
        self.problem = ""
        """Why the present file is not used; empty when it is."""
        self.bad_files = 0
        """Number of times a file was refused."""
        self._on_endpoints = on_endpoints
        self._on_bad_file = on_bad_file
        self._interval = interval
        self._seen: tuple[Signature, bytes] | None = None

    def describe(self) -> dict[str, Any]:
        """Return the state that ``/debug/fleet`` shows."""
        path = str(self.path)
        return {"kind": "file", "path": path, "problem": self.problem, "refused": self.bad_files}

    def watches(self) -> tuple[()]:
        """Return no watches: nothing is followed in Kubernetes."""
        return ()

    async def run(self) -> None:
        """Poll the file until cancelled, at once for the first time."""
        while True:
            await self.poll()
            await asyncio.sleep(self._interval)

    async def poll(self) -> None:
        """Check the file once; call ``on_endpoints`` or ``on_bad_file`` if it has changed."""
        try:
            text = await self._changed_text()
            endpoints = None if text is None else await asyncio.to_thread(parse_endpoints, text)
        except OSError as error:
            self._seen = None
            self._refuse(f"{self.path}: {error.strerror or type(error).__name__}")
        except EndpointsFileError as error:
            self._refuse(f"{self.path}: {error}")
        else:
            if endpoints is not None:
                self._accept(endpoints)

    async def _changed_text(self) -> bytes | None:
        """Return the file's content once it no longer changes; None when it is the one last read."""
        before = self._signature()
        if self._seen and before == self._seen[0] and abs(time.time_ns() - before[2]) >= self.RACY_NS:
            return None
        text = await asyncio.to_thread(_read, self.path)
        if self._same(before, text):
            return None
        while True:
            await asyncio.sleep(self.SETTLE_SECONDS)
            before, again = self._signature(), await asyncio.to_thread(_read, self.path)
            if again == text:
                break
            text = again
        if self._same(before, text):
            return None
        self._seen = (before, hashlib.sha256(text).digest())
        return text

    def _same(self, signature: Signature, text: bytes) -> bool:
        digest = hashlib.sha256(text).digest()
        if self._seen is None or self._seen[1] != digest:
            return False
        self._seen = (signature, digest)
        return True

    def _signature(self) -> Signature:
        stat = self.path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def _accept(self, endpoints: EndpointSet) -> None:
        self.problem = ""
        if endpoints == self.endpoints:
            return
        self.endpoints = endpoints
        logger.info("the endpoints file %s was read (endpoints: %d)", self.path, len(endpoints))
        self._on_endpoints(endpoints)

    def _refuse(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        self.bad_files += 1
        old = self.endpoints
        kept = "no endpoint is known yet" if old is None else f"the {len(old)} known endpoints are kept"
        logger.warning("the endpoints file is invalid and %s: %s", kept, problem)
        self._on_bad_file(problem)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)
