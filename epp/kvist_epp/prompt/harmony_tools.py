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
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from kvist_epp.prompt.chat import UnrenderableError

MAX_DEPTH: Final = 100
"""Levels of a schema; each is indented further."""

_PROPERTY_INDENT: Final = "    "
_VARIANT_INDENT: Final = "   "
_NAMES: Final = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def declare_tools(tools: list[dict[str, Any]], room: int) -> str:
    """Return the section of a developer message that declares these functions.

    ``room``: most characters of the text, since a schema of many levels is indented by the square of them.

    Raises:
        UnrenderableError: a tool or schema that the engine refuses, or of too many levels or characters.
    """
    writer = _Writer(room)
    writer.write("# Tools\n\n## functions\n\nnamespace functions {\n\n")
    for tool in tools:
        writer.declare(tool["function"])
    writer.write("} // namespace functions")
    return "".join(writer.parts)


class _Writer:
    """Writes types, piece by piece."""

    def __init__(self, room: int) -> None:
        self.parts: list[str] = []
        self._room = room
        self._nulls = 0
        """Pieces that contain ``null``."""

    def write(self, text: str) -> None:
        self._room -= len(text)
        if self._room < 0:
            raise UnrenderableError("work")
        self._nulls += "null" in text
        self.parts.append(text)

    def declare(self, function: dict[str, Any]) -> None:
        name, description, schema = function["name"], function["description"], function["parameters"]
        if type(name) is not str or type(description) not in (str, type(None)):
            raise UnrenderableError("tool")
        if description:
            lines = description.replace("\r\n", "\n").removesuffix("\n").split("\n")
            self.write("".join(f"// {line}\n" for line in lines))
        self.write(f"type {name} = (")
        if type(schema) is dict:
            self.write("_: ")
            self._type(schema, "", MAX_DEPTH)
        elif schema is not None:
            raise UnrenderableError("tool")
        self.write(") => any;\n\n")

    def _type(self, schema: Any, indent: str, depth: int) -> None:
        """Write the type of a schema; all its lines but the first begin with ``indent``."""
        if not depth:
            raise UnrenderableError("tools")
        fields = schema if type(schema) is dict else _NO_FIELDS
        variants, kind = fields.get("oneOf"), fields.get("type")
        if type(variants) is list:
            self._variants(variants, indent, depth)
        elif type(kind) is list:
            self.write(" | ".join(_NAMES.get(one, one) for one in kind if type(one) is str) or "any")
        elif kind == "object":
            self._object(fields, indent, depth)
        elif kind == "array" and "items" in fields:
            self._type(fields["items"], indent, depth - 1)
            self.write("[]")
        elif kind == "array":
            self.write("Array<any>")
        elif kind == "string":
            self.write(_strings(fields.get("enum")) or "string")
        else:
            self.write(_NAMES.get(kind, "any") if type(kind) is str else "any")

    def _type_or_null(self, fields: Mapping[str, Any], indent: str, depth: int) -> None:
        """Write the type of a property or variant, which may be nullable."""
        nulls = self._nulls
        self._type(fields, indent, depth)
        if fields.get("nullable") is True and self._nulls == nulls:
            self.write(" | null")

    def _object(self, schema: Mapping[str, Any], indent: str, depth: int) -> None:
        description, properties, required = map(schema.get, ("description", "properties", "required"))
        if type(description) is str:
            self.write(f"{indent}// {description}\n")
        self.write("{\n")
        names = {name for name in required if type(name) is str} if type(required) is list else set[str]()
        if type(properties) is dict:
            for name, inner in properties.items():
                self._property(name if name in names else f"{name}?", inner, indent, depth)
        self.write(f"{indent}}}")

    def _property(self, name: str, schema: Any, indent: str, depth: int) -> None:
        """Write one property: comments, and its name with its type."""
        fields = schema if type(schema) is dict else _NO_FIELDS
        title, description, variants = map(fields.get, ("title", "description", "oneOf"))
        described = f"{indent}// {description}\n" if type(description) is str else ""
        if type(title) is str:
            self.write(f"{indent}// {title}\n{indent}//\n")
        default = _default(fields) if "default" in fields else ""
        if type(variants) is list:
            self._examples(fields, indent)
            if all(type(one) is not dict or one.get("description") != description for one in variants[:1]):
                self.write(described)
            if default:
                self.write(f"{indent}// {default}\n")
            self.write(f"{indent}{name}:")
            self._variants(variants, indent, depth - 1, of=fields)
            self.write(f"\n{indent},\n")
            return
        self.write(described)
        self._examples(fields, indent)
        self.write(f"{indent}{name}: ")
        self._type_or_null(fields, indent + _PROPERTY_INDENT, depth - 1)
        self.write(f", // {default}\n" if default else ",\n")

    def _examples(self, fields: Mapping[str, Any], indent: str) -> None:
        examples = fields.get("examples")
        if type(examples) is list and examples:
            self.write(f"{indent}// Examples:\n")
            for one in examples:
                if type(one) is str:
                    self.write(f'{indent}// - "{one}"\n')

    def _variants(
        self, variants: list[Any], indent: str, depth: int, *, of: Mapping[str, Any] | None = None
    ) -> None:
        """Write the alternatives of ``oneOf``, each with its description and default behind it. In a property
        with a description, the first one shows none, and others none that is equal."""
        outer = None if of is None else of.get("description")
        for at, schema in enumerate(variants):
            fields = schema if type(schema) is dict else _NO_FIELDS
            self.write(f"\n{indent} | ")
            self._type_or_null(fields, indent + _VARIANT_INDENT, depth - 1)
            comments = [_default(fields, quoted=of is None)] if "default" in fields else []
            description = fields.get("description")
            hidden = type(outer) is str and (at == 0 or description == outer)
            if type(description) is str and not hidden:
                comments.insert(0, description)
            if comments:
                self.write(f" // {' '.join(comments)}")


def _default(fields: Mapping[str, Any], *, quoted: bool = False) -> str:
    """Return the comment of a default; ``quoted``: one of an enumeration is, too, and as JSON."""
    value = fields["default"]
    if type(value) is not str:
        return f"default: {_json(value)}"
    if fields.get("enum"):
        return f"default: {_json(value) if quoted else value}"
    return f'default: "{value}"'


def _json(value: Any) -> str:
    if type(value) is int and not _LEAST <= value <= _MOST:
        value = float(value)
    if type(value) is float:
        return msgspec.json.encode(value).decode().replace("e", "e+").replace("e+-", "e-")
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _strings(values: Any) -> str:
    """Return the texts among the values of an enumeration as alternatives."""
    return " | ".join(f'"{one}"' for one in values if type(one) is str) if type(values) is list else ""


_NO_FIELDS: Final[Mapping[str, Any]] = MappingProxyType({})
_LEAST: Final = -(2**63)
_MOST: Final = 2**64 - 1
"""Integers beyond become floating point numbers."""
