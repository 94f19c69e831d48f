"""Reads the pools of a YAML file from an untrusted source: limits on size and depth, no duplicate keys."""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from kvist_operator.errors import SpecError
from kvist_operator.spec.preset import PRESET_KIND, preset_name

from .input_files import content_of

MOST_BYTES: Final = 4 << 20
"""More than any API server accepts."""
MOST_NODES: Final = 200_000
"""Maximum number of values; an alias counts each time it is used."""
DEEPEST: Final = 100
"""Most levels of nesting."""


class _Loader(yaml.SafeLoader):
    """Loader that refuses duplicate keys, as ``kubectl`` does, because the first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{name!r} occurs twice", problem_mark=key.start_mark
                )
            seen.add(name or object())
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, slots=True)
class Document:
    """One pool of a file."""

    number: int
    """Position among the documents of the file, from 1."""
    resource: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Position and name, for messages."""
        return f"document {self.number} ({_name(self.resource)})"


@dataclass(frozen=True, slots=True)
class PoolFile:
    """The pools of a file, and a sentence for each other document."""

    pools: tuple[Document, ...]
    others: tuple[str, ...]
    presets: tuple[Mapping[str, Any], ...] = ()

    def preset_of(self, resource: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the preset that a pool refers to: of its namespace, else of any; None without one."""
        name = preset_name(resource)
        found = [each for each in self.presets if name and _meta(each).get("name") == name]
        same = [each for each in found if _meta(each).get("namespace") == _meta(resource).get("namespace")]
        return next(iter([*same, *found]), None)


def read_pools(file: str, presets: Sequence[str] = ()) -> PoolFile:
    """Return the InferencePools of the file; without one its first object, of which the reader says what it
    is. The items of a list, as ``kubectl get`` writes it, count as documents. Presets are those of the file
    and of the files ``presets``.

    Raises:
        SpecError: the file cannot be read, is too large or deep, or has a document that is no object.
    """
    numbered = _numbered(file, f"--filename {file}")
    found = [d.resource for d in numbered if _is_preset(d)]
    for other in presets:
        listed = [d.resource for d in _numbered(other, f"--preset {other}") if _is_preset(d)]
        if not listed:
            raise SpecError(f"--preset {other}", f"has no {PRESET_KIND}: write apiVersion, kind and spec")
        found += listed
    pools = [d for d in numbered if _is_ours(d) and not _is_preset(d)]
    if not pools:
        return PoolFile((numbered[0],), ())
    others = (
        f"{d.label} is no InferencePool of kvist.dev and is left out" for d in numbered if not _is_ours(d)
    )
    return PoolFile(tuple(pools), tuple(others), tuple(found))


def _numbered(file: str, where: str) -> list[Document]:
    """Return the objects of a file. Raises SpecError."""
    documents = _documents(file, where)
    for number, each in enumerate(documents, 1):
        if not isinstance(each, dict):
            kind = "a list" if isinstance(each, list) else "no object"
            raise SpecError(where, f"document {number} is {kind}: write apiVersion, kind, metadata and spec")
        _count_values(each, where, {}, 0)
    if not documents:
        raise SpecError(where, "has no YAML object: write apiVersion, kind, metadata and spec of a pool")
    return [Document(number, each) for number, each in enumerate(documents, 1)]


def _is_ours(document: Document) -> bool:
    return str(document.resource.get("apiVersion", "")).startswith("kvist.dev/")


def _is_preset(document: Document) -> bool:
    return _is_ours(document) and document.resource.get("kind") == PRESET_KIND


def _name(resource: Mapping[str, Any]) -> str:
    return f"{resource.get('kind', 'no kind')} {_meta(resource).get('name') or 'without a name'}"


def _meta(resource: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = resource.get("metadata")
    return meta if isinstance(meta, Mapping) else {}


def _documents(file: str, where: str) -> list[Any]:
    try:
        documents = [d for d in _loaded(_read_text(file, where)) if d is not None]
    except (OSError, yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise SpecError(where, f"cannot be read: {error}") from error
    except RecursionError:
        raise SpecError(where, f"is nested deeper than {DEEPEST} levels, the limit for a pool") from None
    return [item for document in documents for item in _items(document)]


def _loaded(text: str) -> list[Any]:
    """Return the documents of a text. Raises yaml.YAMLError or ValueError."""
    try:
        return list(yaml.load_all(text, _Loader))
    except yaml.scanner.ScannerError as error:
        if "'\\t'" not in str(error.problem):
            raise
        try:  # JSON may be indented by tabs, which YAML refuses
            return [json.loads(text.lstrip("\ufeff"), object_pairs_hook=_without_duplicates)]
        except json.JSONDecodeError:
            raise error from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} occurs twice")
        found[name] = value
    return found


def _items(document: Any) -> list[Any]:
    """Return the items of a list of objects, and anything else as it is."""
    if isinstance(document, dict) and str(document.get("kind", "")).endswith("List"):
        items = document.get("items")
        return items if isinstance(items, list) else [document]
    return [document]


def _read_text(file: str, where: str) -> str:
    content = content_of(file, MOST_BYTES)
    if len(content) > MOST_BYTES:
        raise SpecError(where, "is larger than 4 MiB, the limit for a pool")
    return content.decode("utf-8")


def _count_values(value: Any, where: str, known: dict[int, int], depth: int) -> int:
    """Return the number of values, aliases expanded. Raises SpecError if there are too many or too deep."""
    if not isinstance(value, dict | list):
        return 1
    if depth > DEEPEST:
        raise SpecError(where, f"is nested deeper than {DEEPEST}, or refers to itself")
    if id(value) not in known:
        below = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count_values(each, where, known, depth + 1) for each in below)
    if known[id(value)] > MOST_NODES:
        raise SpecError(where, f"has more than {MOST_NODES} values, the limit for a pool")
    return known[id(value)]
