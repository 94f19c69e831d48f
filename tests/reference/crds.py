"""Reference of the fields of both CRDs, from their schemas."""

from collections.abc import Iterator
from typing import Any, Final

import yaml
from tests.reference.markdown import code, page, prose, table
from tests.shapes import ROOT

CRDS: Final = ROOT / "crds"
HEAD: Final = ("field", "type", "default", "meaning")
Schema = dict[str, Any]
Row = tuple[str, str, str, str]


def pools() -> str:
    """Return the page of the fields of an InferencePool."""
    crd = _read("inferencepools.yaml")
    schema = _schema(crd)
    spec, status = schema["properties"]["spec"], schema["properties"]["status"]
    names = crd["spec"]["names"]
    return page(
        "Fields of an InferencePool",
        "crds/inferencepools.yaml",
        f"`{crd['metadata']['name']}`, version `{crd['spec']['versions'][0]['name']}`, short name "
        f"`{names['shortNames'][0]}`. "
        f"{prose(schema['description'])} [Pools](../guides/pools.md) explains what the operator makes of it; "
        "`kubectl explain inferencepools.kvist.dev --recursive` shows the same on a cluster.",
        prose(spec["description"]),
        *_sections("spec", spec),
        "## status\n\nWritten by the operator. [Conditions and reasons](conditions.md) has the values of "
        "`conditions`.",
        table(HEAD, _fields(status, ""), "fields"),
    )


def presets() -> str:
    """Return the page of InferencePoolPresets: what they lack of a pool."""
    preset = _schema(_read("inferencepoolpresets.yaml"))
    own = dict(_paths(preset["properties"]["spec"], "spec"))
    whole = dict(_paths(_schema(_read("inferencepools.yaml"))["properties"]["spec"], "spec"))
    missing = [path for path in whole if path not in own and path.rpartition(".")[0] in {*own, "spec"}]
    assert not set(own) - set(whole), "a preset has a field that pools lack: give it a row here"
    return page(
        "Fields of an InferencePoolPreset",
        "crds/inferencepoolpresets.yaml",
        f"`inferencepoolpresets.kvist.dev`. {prose(preset['description'])} "
        "[Presets](../guides/pools.md#presets) has an example.",
        f"Its `spec` has the {len(own)} fields of a [pool's `spec`](inferencepool.md) except these, and "
        "none of them is required:",
        table(("field that only a pool has", "meaning"), ((code(p), _text(whole[p])) for p in missing)),
    )


def _read(name: str) -> Schema:
    found: Schema = yaml.safe_load((CRDS / name).read_text())
    return found


def _schema(crd: Schema) -> Schema:
    found: Schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def _sections(above: str, schema: Schema) -> Iterator[str]:
    """Yield a heading, text and table for every object field; one table for the plain fields before them."""
    fields = schema["properties"]
    plain = {name: field for name, field in fields.items() if "properties" not in field}
    yield f"## {above}"
    needed = schema.get("required", ())
    yield table(HEAD, (_row(name, field, name in needed) for name, field in plain.items()), "fields")
    for name, field in fields.items():
        if name not in plain:
            required = " Required." if name in needed else ""
            yield f"## {above}.{name}\n\n{_text(field)}{required}"
            yield table(HEAD, _fields(field, ""), "fields")


def _fields(schema: Schema, prefix: str) -> Iterator[Row]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        yield _row(f"{prefix}{name}", field, name in required)
        yield from _fields(field, f"{prefix}{name}.")
        yield from _fields(field.get("items", {}), f"{prefix}{name}[].")


def _row(path: str, field: Schema, required: bool) -> Row:
    default = code(_plain(field["default"])) if "default" in field else ""
    kind = _type(field)
    return code(path), f"{kind}, required" if required else kind, default, _text(field)


def _text(field: Schema) -> str:
    return prose(field.get("description", ""))


def _type(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(code(_plain(value)) for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_type(field['items'])}"
    if isinstance(field.get("additionalProperties"), dict):
        return f"map of {_type(field['additionalProperties'])}"
    bounds = [f"{field[key]:,}" if key in field else "" for key in ("minimum", "maximum")]
    if any(bounds):
        low, high = bounds
        return (
            f"{kind}, {low} to {high}"
            if all(bounds)
            else f"{kind}, {'from ' + low if low else 'up to ' + high}"
        )
    return str(kind)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "{}" if value == {} else str(value)


def _paths(schema: Schema, above: str) -> Iterator[tuple[str, Schema]]:
    for name, field in schema.get("properties", {}).items():
        path = f"{above}.{name}"
        yield path, field
        yield from _paths(field, path)
        yield from _paths(field.get("items", {}), f"{path}[]")
