"""Read a pool's YAML file from an untrusted source: limits on its size and depth, no duplicate keys."""

import sys
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from kvist_operator.errors import SpecError

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


def read_resource(file: str) -> Mapping[str, Any]:
    """Return the first InferencePool of the file, or its first document without one. Raises SpecError."""
    where = f"--filename {file}"
    try:
        documents = [d for d in yaml.load_all(_read_text(file, where), _Loader) if isinstance(d, dict)]
    except (OSError, yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise SpecError(where, f"cannot be read: {error}") from error
    except RecursionError:
        raise SpecError(where, f"is nested deeper than {DEEPEST} levels, the limit for a pool") from None
    if not documents:
        raise SpecError(where, "has no YAML object: write apiVersion, kind, metadata and spec of a pool")
    pools = [d for d in documents if str(d.get("apiVersion", "")).startswith("kvist.dev/")]
    found: dict[str, Any] = (pools or documents)[0]
    _count_values(found, where, {}, 0)
    return found


def _read_text(file: str, where: str) -> str:
    if file == "-":
        content = sys.stdin.read(MOST_BYTES + 1)
    else:
        with Path(file).open("rb") as opened:
            content = opened.read(MOST_BYTES + 1).decode("utf-8")
    if len(content) > MOST_BYTES:
        raise SpecError(where, "is larger than 4 MiB, the limit for a pool")
    return content


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
