"""Random declarations of functions: JSON schemas of a few levels, also odd ones."""

import random
from typing import Any

WORDS = ("a", "two words", "", "é😀", "a\nb", "\n", 'q"t', "// c")
KINDS = ("string", "number", "integer", "boolean", "object", "array", "null", "weird")
LIMITS = ("maxLength", "minLength", "pattern", "maximum", "minimum", "minItems", "maxItems")
REFERENCES = ("#", "#/$defs/D", "#/$defs/E", "#/$defs/absent", "elsewhere")


def function(generator: random.Random) -> dict[str, Any]:
    """A tool of one function."""
    parameters = _schema(generator, 4)
    if isinstance(parameters, dict) and generator.random() < 0.8:
        parameters["type"] = "object"
    described = {"name": "f", "description": generator.choice((None, *WORDS)), "parameters": parameters}
    return {"type": "function", "function": described}


def _value(generator: random.Random, depth: int = 2) -> Any:
    kind = generator.randrange(6) if depth else generator.randrange(4)
    if kind == 0:
        return generator.choice((0, -5, 1.5, 1e20, True, False))
    if kind == 1:
        return None
    if kind == 4:
        return [_value(generator, depth - 1) for _ in range(generator.randrange(3))]
    if kind == 5:
        return {generator.choice(WORDS): _value(generator, depth - 1) for _ in range(generator.randrange(3))}
    return generator.choice(WORDS)


def _schema(generator: random.Random, depth: int) -> Any:
    def often(share: float) -> bool:
        return generator.random() < share

    if often(0.03):
        return generator.choice((True, False, {}, None, "x", [], 3))
    schema: dict[str, Any] = {}
    if often(0.93):
        several = [generator.choice(KINDS) for _ in range(generator.randrange(4))]
        schema["type"] = generator.choice(KINDS) if often(0.9) else several
    schema |= {name: _value(generator, 1) for name in LIMITS if often(0.1)}
    if often(0.4):
        schema["description"] = generator.choice(WORDS) if often(0.95) else _value(generator)
    if often(0.2):
        schema["default"] = _value(generator)
    if often(0.1):
        schema["enum"] = [_value(generator, 0) for _ in range(generator.randrange(4))]
    if often(0.05):
        schema["$ref"] = generator.choice(REFERENCES)
    if depth:
        _add_inner(generator, schema, depth - 1)
    return schema


def _add_inner(generator: random.Random, schema: dict[str, Any], depth: int) -> None:
    """Add schemas within a schema."""

    def often(share: float) -> bool:
        return generator.random() < share

    if schema.get("type") == "object" or often(0.2):
        names = [generator.choice(("a", "b", "c-d", "e f")) for _ in range(generator.randrange(4))]
        schema["properties"] = {name: _schema(generator, depth) for name in names}
        if often(0.5):
            schema["required"] = generator.choice((["a"], ["b", "z"], [], None))
    if often(0.15):
        schema["additionalProperties"] = generator.choice((True, False, None, "x", _schema(generator, depth)))
    if schema.get("type") == "array" and often(0.6):
        schema["items"] = _schema(generator, depth)
    if often(0.06):
        schema["anyOf"] = [_schema(generator, depth) for _ in range(generator.randrange(3))]
    if often(0.1):
        schema["$defs"] = {name: _schema(generator, depth) for name in ("D", "E") if often(0.7)}
