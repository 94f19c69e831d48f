"""Declarations of tools as gpt-oss reads them: types of TypeScript, made of JSON schemas.

Engines write them with the library oss-harmony; its text is the rule, also where it is no valid TypeScript
(a description of several lines, quotes within quotes). The tests compare them (``test_harmony``).

Worked example: the tool ``{"name": "look_up", "description": "Find a word.", "parameters": {"type": "object",
"properties": {"word": {"type": "string", "description": "The word"}, "times": {"type": "integer", "default":
1}}, "required": ["word"]}}`` becomes::

    // Find a word.
    type look_up = (_: {
    // The word
    word: string,
    times?: number, // default: 1
    }) => any;
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from kvist_epp.prompt.chat import UnrenderableError

MAX_DEPTH: Final = 100
"""Levels of a schema; each is indented further, so that the text of deep ones grows with their square."""

_PROPERTY_INDENT: Final = "    "
_VARIANT_INDENT: Final = "   "
_NAMES: Final = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def declare_tools(tools: list[dict[str, Any]]) -> str:
    """Return the section of a developer message that declares these functions.

    Raises:
        UnrenderableError: a tool or schema that the engine refuses, or of too many levels.
    """
    lines = ["# Tools", "", "## functions", "", "namespace functions {", ""]
    for tool in tools:
        lines += _declaration(tool["function"])
    return "\n".join((*lines, "} // namespace functions"))


def _declaration(function: dict[str, Any]) -> Iterator[str]:
    name, description, schema = function["name"], function["description"], function["parameters"]
    if type(name) is not str or type(description) not in (str, type(None)):
        raise UnrenderableError("tool")
    for line in (description or "").splitlines():
        yield f"// {line}"
    if schema is None:
        yield f"type {name} = () => any;"
    elif type(schema) is dict:
        yield f"type {name} = (_: {_type(schema, '', MAX_DEPTH)}) => any;"
    else:
        raise UnrenderableError("tool")
    yield ""


def _type(schema: Any, indent: str, depth: int) -> str:
    """Return the type of a schema; all its lines but the first begin with ``indent``."""
    if not depth:
        raise UnrenderableError("tools")
    if type(schema) is not dict:
        return "any"
    variants = schema.get("oneOf")
    if type(variants) is list:
        return _variants(variants, indent, depth)
    kind = schema.get("type")
    if type(kind) is list:
        return " | ".join(_NAMES.get(one, one) for one in kind if type(one) is str) or "any"
    if kind == "object":
        return _object(schema, indent, depth)
    if kind == "array":
        return f"{_type(schema['items'], indent, depth - 1)}[]" if "items" in schema else "Array<any>"
    if kind == "string":
        return _strings(schema.get("enum")) or "string"
    return _NAMES.get(kind, "any") if type(kind) is str else "any"


def _type_or_null(schema: dict[str, Any], indent: str, depth: int) -> str:
    """Return the type of a property or variant, which may be nullable."""
    text = _type(schema, indent, depth)
    return f"{text} | null" if schema.get("nullable") is True and "null" not in text else text


def _object(schema: dict[str, Any], indent: str, depth: int) -> str:
    description, properties, required = map(schema.get, ("description", "properties", "required"))
    lines = [f"{indent}// {description}"] if type(description) is str else []
    lines.append("{")
    names = {name for name in required if type(name) is str} if type(required) is list else set[str]()
    if type(properties) is dict:
        for name, inner in properties.items():
            lines += _property(name if name in names else f"{name}?", inner, indent, depth)
    lines.append(f"{indent}}}")
    return "\n".join(lines)


def _property(name: str, schema: Any, indent: str, depth: int) -> Iterator[str]:
    """Yield the lines of one property: comments, and its name with its type."""
    fields = schema if type(schema) is dict else {}
    title, description = fields.get("title"), fields.get("description")
    described = [f"{indent}// {description}"] if type(description) is str else []
    if type(title) is str:
        yield from (f"{indent}// {title}", f"{indent}//")
    default = _default(fields) if "default" in fields else ""
    variants = fields.get("oneOf")
    if type(variants) is list:
        yield from _examples(fields, indent)
        if all(type(one) is not dict or one.get("description") != description for one in variants[:1]):
            yield from described
        if default:
            yield f"{indent}// {default}"
        yield f"{indent}{name}:{_variants(variants, indent, depth - 1, of=fields)}"
        yield f"{indent},"
        return
    yield from described
    yield from _examples(fields, indent)
    comment = f" // {default}" if default else ""
    yield f"{indent}{name}: {_type_or_null(fields, indent + _PROPERTY_INDENT, depth - 1)},{comment}"


def _variants(variants: list[Any], indent: str, depth: int, *, of: Mapping[str, Any] | None = None) -> str:
    """Return the alternatives of ``oneOf``, each with its description and default behind it. In a
    property with a description, the first one shows none, and others none that is equal."""
    outer = None if of is None else of.get("description")
    lines = []
    for at, schema in enumerate(variants):
        fields = schema if type(schema) is dict else {}
        text = _type_or_null(fields, indent + _VARIANT_INDENT, depth - 1)
        comments = [_default(fields, quoted=of is None)] if "default" in fields else []
        description = fields.get("description")
        hidden = type(outer) is str and (at == 0 or description == outer)
        if type(description) is str and not hidden:
            comments.insert(0, description)
        lines.append(f"\n{indent} | {text} // {' '.join(comments)}" if comments else f"\n{indent} | {text}")
    return "".join(lines)


def _examples(fields: dict[str, Any], indent: str) -> Iterator[str]:
    examples = fields.get("examples")
    if type(examples) is list and examples:
        yield f"{indent}// Examples:"
        yield from (f'{indent}// - "{one}"' for one in examples if type(one) is str)


def _default(fields: dict[str, Any], *, quoted: bool = False) -> str:
    """Return the comment of a default; ``quoted``: one of an enumeration is, too, and as JSON."""
    value = fields["default"]
    if type(value) is not str:
        return f"default: {_json(value)}"
    if fields.get("enum"):
        return f"default: {_json(value) if quoted else value}"
    return f'default: "{value}"'


def _json(value: Any) -> str:
    if type(value) is float:
        return msgspec.json.encode(value).decode().replace("e", "e+").replace("e+-", "e-")
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _strings(values: Any) -> str:
    """Return the texts among the values of an enumeration as alternatives."""
    return " | ".join(f'"{one}"' for one in values if type(one) is str) if type(values) is list else ""
