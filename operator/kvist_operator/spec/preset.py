"""Presets: fields of pools that a platform team writes once, and the pool made of both. Pure.

``spec.presetRef`` names an ``InferencePoolPreset``. Its ``spec`` has the sections of a pool's, such as
``accelerator`` and ``engine``, and none is required. What the pool sets itself wins: objects are merged field
by field, lists and values are taken whole, and null leaves a field to the plan instead of the preset (as in a
JSON merge patch, RFC 7396).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.errors import SpecError

Json = Mapping[str, Any]
PRESET_KIND: Final = "InferencePoolPreset"
SECTIONS: Final = (
    "model",
    "engine",
    "accelerator",
    "workload",
    "offload",
    "rollout",
    "picker",
    "gateway",
    "networkPolicy",
    "interconnect",
    "tracing",
    "monitoring",
    "podTemplate",
)
"""Sections of a pool's spec that a preset may have."""
OF_ONE_POOL: Final = ("source", "revision", "servedName", "adapters", "shape")
"""Fields of ``model`` that only a pool can set: which model it is."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The preset of a pool and the fields that it sets."""

    namespace: str
    name: str
    fields: tuple[str, ...]
    """Paths of fields whose value is the preset's, such as ``spec.engine.image``."""
    generation: int = 0

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


def preset_name(resource: Json) -> str:
    """Return the name in ``spec.presetRef``; empty without one."""
    spec = resource.get("spec")
    ref = spec.get("presetRef") if isinstance(spec, Mapping) else None
    return str(ref.get("name") or "") if isinstance(ref, Mapping) else ""


def with_preset(resource: Json, found: Json) -> tuple[Json, Preset]:
    """Return the pool's resource with the fields that it leaves to the preset, and their paths.

    Raises:
        SpecError: the preset has a section or field that only a pool can have.
    """
    meta = found.get("metadata") or {}
    defaults, own = found.get("spec") or {}, resource.get("spec") or {}
    where = f"preset {meta.get('name')}: spec"
    if not isinstance(defaults, Mapping):
        raise SpecError(where, "is not an object: write sections of a pool's spec, such as accelerator")
    for name in defaults:
        if name not in SECTIONS:
            raise SpecError(
                f"{where}.{name}", f"is not a part of presets: write one of {', '.join(SECTIONS)}"
            )
    for name in OF_ONE_POOL:
        if name in (defaults.get("model") or {}):
            problem = (
                "is not a part of presets, because it says which model a pool has: write it into the pool"
            )
            raise SpecError(f"{where}.model.{name}", problem)
    preset = Preset(
        namespace=str(meta.get("namespace") or ""),
        name=str(meta.get("name") or ""),
        fields=tuple(sorted(_taken(defaults, own, "spec"))),
        generation=int(meta.get("generation") or 0),
    )
    return {**resource, "spec": _merged(defaults, own)}, preset


def _merged(defaults: Any, own: Any) -> Any:
    if not isinstance(defaults, Mapping) or not isinstance(own, Mapping):
        return own
    both = {key: _merged(defaults[key], own[key]) for key in defaults if key in own}
    return {**defaults, **own, **both}


def _taken(defaults: Json, own: Json, path: str) -> Iterator[str]:
    """Yield the paths of values that come from ``defaults``."""
    for key, value in defaults.items():
        if key not in own:
            yield from _leaves(value, f"{path}.{key}")
        elif isinstance(value, Mapping) and isinstance(own[key], Mapping):
            yield from _taken(value, own[key], f"{path}.{key}")


def _leaves(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}")
    else:
        yield path
