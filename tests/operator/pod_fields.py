"""Writes the fields of pods that ``spec.podTemplate`` may have: ``python -m tests.operator.pod_fields``.

They come from the JSON schemas of Kubernetes in the package kubernetes-validate, of the newest version there.
"""

import json
from pathlib import Path
from typing import Any, Final

import kubernetes_validate

VERSION: Final = "1.37"
SCHEMAS: Final = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
FILE: Final = Path(__file__).parents[2] / "operator" / "kvist_operator" / "spec" / "pod_fields.json"
ROOT: Final = "PodTemplateSpec"
ATOMS: Final = {"Quantity": "quantity", "IntOrString": "int-or-string", "Time": "string", "FieldsV1": "any"}
"""Types of which no field is listed."""


def table() -> dict[str, dict[str, str]]:
    """Return type → field → its type; a list begins with ``[``, a map with ``{``."""
    path = SCHEMAS / f"v{VERSION}.0-local" / "_definitions.json"
    definitions = {name.split(".")[-1]: each for name, each in _wanted(json.loads(path.read_text())["$defs"])}
    found: dict[str, dict[str, str]] = {}
    waiting = [ROOT]
    while waiting:
        name = waiting.pop()
        if name in found or name not in definitions:
            continue
        found[name] = {
            field: _type(each) for field, each in sorted(definitions[name].get("properties", {}).items())
        }
        waiting += [text.strip("[{") for text in found[name].values()]
    return dict(sorted(found.items()))


def _wanted(definitions: dict[str, Any]) -> list[tuple[str, Any]]:
    parts = ("api.core.v1.", "pkg.apis.meta.v1.")
    return [(name, each) for name, each in definitions.items() if any(part in name for part in parts)]


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = str(schema["$ref"]).split(".")[-1]
        return ATOMS.get(name, str(name))
    if "items" in schema:
        return "[" + _type(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        return "{" + _type(schema["additionalProperties"])
    kinds = schema.get("type", "any")
    return next(str(kind) for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null")


def text() -> str:
    """Return the content of the file, one line for each type."""
    lines = [
        f"{json.dumps(name)}:{json.dumps(fields, separators=(',', ':'))}" for name, fields in table().items()
    ]
    return f'{{"version":"{VERSION}","types":{{\n' + ",\n".join(lines) + "\n}}\n"


if __name__ == "__main__":
    FILE.write_text(text())
