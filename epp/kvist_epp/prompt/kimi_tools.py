"""Declarations of tools as Kimi K2.5 and later models read them: types of TypeScript, made of JSON schemas.

The code beside the model's tokenizer (``tool_declaration_ts.py``) writes them; where it fails, the template
writes JSON. Its text is the rule; the tests compare both (``tests/engine/test_kimi.py``).

Worked example: the tool ``{"name": "look_up", "description": "Find a word.", "parameters": {"type": "object",
"properties": {"word": {"type": "string", "description": "The word"}, "times": {"type": "integer", "default":
1}}, "required": ["word"]}}`` becomes::

    // Find a word.
    type look_up = (_: {
      // The word
      word: string,
      // Default: 1
      times?: number
    }) => any;
"""

import json
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvist_epp.prompt.chat import UnrenderableError

MAX_DEPTH: Final = 100
"""Levels of a schema; each is indented further."""

_INDENT: Final = "  "
_BETWEEN: Final = ",\n"
_ITSELF: Final = "parameters"
"""Name of the parameters of a function in their own schema."""
_UNION: Final = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
"""What stands for each of several types."""
_CONSTRAINTS: Final = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
"""Fields that are written in front of a type, by its name."""
_VALUES: Final[dict[Any, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}
"""What values of an enumeration are, by the name of their type."""


def declare_tools(tools: list[dict[str, Any]], room: int) -> str | None:
    """Return the declarations of these functions; None if the model's code fails.

    ``room``: most characters of comments, since those of a schema of many levels are indented.

    Raises:
        UnrenderableError: a schema has too many levels, or comments of too many characters.
    """
    writer = _Writer(room)
    try:
        functions = "\n".join([writer.declare(tool["function"]) for tool in tools])
    except (LookupError, TypeError, AttributeError, ValueError):
        return None
    return f"# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"


class _Type(msgspec.Struct):
    """A type; its comments stand in front of what has it."""

    write: Callable[[str], str]
    """Returns it, with its further lines indented by more than this."""
    description: Any = ""
    constraints: dict[str, Any] = {}


class _ObjectType(_Type):
    """An object, with its fields in the order of the schema."""

    fields: list[Callable[[str], str]] = []


class _Writer:
    """Declares functions, whose schemas may refer to each other."""

    def __init__(self, room: int) -> None:
        """``room``: characters of comments that may be written, of all functions."""
        self._room = room
        self._named: dict[str, Any] = {}
        self._refers_to_itself = False

    def declare(self, function: dict[str, Any]) -> str:
        """Return the declaration of a function, behind interfaces for the schemas that it names."""
        self._named, self._refers_to_itself = {}, False
        parsed = self._object(function.get("parameters") or {}, MAX_DEPTH)
        named = list(self._named.items())
        parts, given = [], ""
        if self._refers_to_itself:
            fields = _BETWEEN.join([write(_INDENT) for write in parsed.fields])
            given, body = _ITSELF, f"\n{fields}\n" if fields else ""
            parts.append(f"interface {given} {{{body}}}")
        for name, schema in named:
            comment = self._comment(schema.get("description", ""), {}, "")
            parts.append(f"{comment}interface {name} {self._type(schema, MAX_DEPTH).write('')}")
        parts.append(self._comment(function.get("description"), {}, "").removesuffix("\n"))
        parts.append(f"type {function.get('name', 'function')} = (_: {given or parsed.write('')}) => any;")
        return "\n".join([part for part in parts if part])

    def _type(self, schema: Any, depth: int) -> _Type:
        """Return the type of a schema. Raises what the model's code raises for one that it does not know."""
        if depth == 0:
            raise UnrenderableError("work")
        if type(schema) is bool:
            return _scalar("any" if schema else "null")
        if "$ref" in schema:
            return self._reference(schema)
        if "anyOf" in schema:
            types = [self._type(one, depth - 1) for one in schema["anyOf"]]
            return _Type(lambda indent: " | ".join([one.write(indent) for one in types]), _described(schema))
        if "enum" in schema:
            return _enumeration(schema)
        if "type" not in schema:
            if schema == {}:
                return _scalar("any")
            raise ValueError("a schema of no type")
        kind = schema["type"]
        if type(kind) is list:
            union = " | ".join([_UNION[one] for one in kind])
            return _Type(lambda _: union, _described(schema))
        names = _CONSTRAINTS.get(kind, ()) if type(kind) is str else ()
        constraints = {name: schema[name] for name in names if name in schema}
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            items = schema.get("items")
            item = self._type(items, depth - 1) if items else _scalar("any")
            return _Type(lambda indent: self._array(item, indent), _described(schema), constraints)
        name = "number" if kind == "integer" else kind
        return _Type(lambda _: name, _described(schema), constraints)

    def _reference(self, schema: dict[str, Any]) -> _Type:
        reference = schema["$ref"]
        name = reference.split("/")[-1]
        if reference == "#":
            self._refers_to_itself = True
            name = _ITSELF
        elif not reference.startswith("#/$defs/"):
            raise ValueError("a reference to something else")
        elif self._named[name].get("$self_ref"):
            name = _ITSELF
        return _Type(lambda _: name, _described(schema))

    def _object(self, schema: dict[str, Any], depth: int) -> _ObjectType:
        for name, one in (schema.get("$defs") or {}).items():
            self._named[name] = one
        others = schema.get("additionalProperties")
        if type(others) is dict:
            others = self._type(others, depth - 1)
        properties = schema.get("properties", {})
        optional = set(properties) - set(schema.get("required", ()) if "properties" in schema else ())
        fields = {
            name: self._field(name, one, self._type(one, depth - 1), is_optional=name in optional)
            for name, one in properties.items()
        }
        order = [name for name in sorted(fields) if name not in optional]
        order += sorted(optional)

        def write(indent: str) -> str:
            inner = indent + _INDENT
            lines = [fields[name](inner) for name in order]
            if others is not None:
                lines.append(f"{inner}[k: string]: {_other(others, inner)}")
            return f"{{\n{_BETWEEN.join(lines)}\n{indent}}}" if lines else "{}"

        return _ObjectType(write, _described(schema), fields=list(fields.values()))

    def _field(self, name: str, schema: Any, kind: _Type, *, is_optional: bool) -> Callable[[str], str]:
        default = schema.get("default") if type(schema) is dict else None

        def write(indent: str) -> str:
            comments = self._comment(kind.description, kind.constraints, indent)
            if default is not None:
                is_number = isinstance(default, (int, float))
                shown = repr(default) if is_number else json.dumps(default, ensure_ascii=False)
                comments += f"{indent}// Default: {shown}\n"
            return f"{comments}{indent}{name}{'?' if is_optional else ''}: {kind.write(indent)}"

        return write

    def _array(self, item: _Type, indent: str) -> str:
        inner = indent + _INDENT
        if comment := self._comment(item.description, item.constraints, inner):
            return f"Array<\n{comment}{inner}{item.write(inner)}\n{indent}>"
        return f"Array<{item.write(indent)}>"

    def _comment(self, description: Any, constraints: dict[str, Any], indent: str) -> str:
        """Return the lines in front of what has a description or constraints."""
        lines = (
            [f"{indent}// {line}" if line else "" for line in description.split("\n")] if description else []
        )
        if constraints:
            shown = ", ".join([f"{name}: {constraints[name]}" for name in sorted(constraints)])
            lines.append(f"{indent}// {shown}")
        text = "".join([line + "\n" for line in lines])
        self._room -= len(text)
        if self._room < 0:
            raise UnrenderableError("work")
        return text


def _scalar(name: str) -> _Type:
    return _Type(lambda _: name)


def _described(schema: dict[str, Any]) -> Any:
    return schema.get("description", "")


def _enumeration(schema: dict[str, Any]) -> _Type:
    values = schema["enum"]
    if "type" in schema:
        kind = _type_of_values(schema["type"])
        if any(not _is_a(value, kind) for value in values if value is not None):
            raise ValueError("a value of another type")
    written = " | ".join([f'"{value}"' if type(value) is str else str(value) for value in values])
    return _Type(lambda _: written, _described(schema))


def _type_of_values(kind: Any) -> Any:
    if type(kind) is not list:
        return kind
    if len(kind) == 1:
        return kind[0]
    if len(kind) == 2 and "null" in kind:
        return kind[1] if kind[0] == "null" else kind[0]
    raise ValueError("values of several types")


def _is_a(value: Any, kind: Any) -> bool:
    return isinstance(value, _VALUES[kind]) if kind in _VALUES else True


def _other(others: Any, indent: str) -> str:
    """Return the type of fields that have no name."""
    if type(others) is bool:
        return "any" if others else "never"
    if not isinstance(others, _Type):
        raise ValueError("no schema")  # noqa: TRY004 - as the model's code
    return others.write(indent)
