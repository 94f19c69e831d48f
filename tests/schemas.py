"""Whether a document has the shape that a schema says: the parts of OpenAPI that CRDs use, fields that are
not in it refused (as ``fieldValidation=Strict`` does). Rules in CEL are for a real API server."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

Schema = Mapping[str, Any]

_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
_ANY: Final = "x-kubernetes-preserve-unknown-fields"
_EITHER: Final = "x-kubernetes-int-or-string"


def complaints(value: Any, schema: Schema, path: str = "") -> Iterator[str]:
    """Return the errors of a document, each with its place."""
    kind = schema.get("type", "")
    if schema.get(_EITHER):
        if not isinstance(value, int | str) or isinstance(value, bool):
            yield f"{path}: {value!r} is neither a number nor a string"
    elif kind and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{path}: {value!r} is no {kind}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{path}: {value!r} is none of {schema['enum']}"
    yield from _bounds(value, schema, path)
    if isinstance(value, dict):
        yield from _fields(value, schema, path)
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from complaints(item, schema.get("items", {}), f"{path}[{number}]")


def _bounds(value: Any, schema: Schema, path: str) -> Iterator[str]:
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{path}: {value!r} does not match {schema['pattern']}"
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            yield f"{path}: {value!r} is too short or too long"
    elif isinstance(value, int | float):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            yield f"{path}: {value} is out of bounds"
    elif isinstance(value, list) and not (
        schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    ):
        yield f"{path}: {len(value)} items"


def _fields(value: Mapping[str, Any], schema: Schema, path: str) -> Iterator[str]:
    known, more = schema.get("properties", {}), schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: is missing"
    for name, below in value.items():
        if name in known:
            yield from complaints(below, known[name], f"{path}.{name}")
        elif isinstance(more, Mapping):
            yield from complaints(below, more, f"{path}.{name}")
        elif not schema.get(_ANY):
            yield f"{path}.{name}: is not known"
