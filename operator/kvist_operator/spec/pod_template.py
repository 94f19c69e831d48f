"""Overlays of pods: ``spec.podTemplate``, ``spec.picker.podTemplate`` and ``spec.gateway.podTemplate``.

They may have any field of a pod, except what the operator sets itself. They are compared with the fields of
Kubernetes: misspelled fields, wrong types, containers without image. ``pod_fields.json`` is written by
``python -m tests.operator.pod_fields``, from the schemas of Kubernetes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Final

from kvist_epp.names import LABEL_MAX_NUM_SEQS, LABEL_POOL
from kvist_operator.errors import SpecError

from .fields import Fields, suggestion, type_name
from .pool import COMPONENT, ENGINE_CONTAINER, ENVOY_CONTAINER, INSTANCE, PICKER_CONTAINER, Pool

FILE: Final = "pod_fields.json"
ROOT: Final = "PodTemplateSpec"
DIRECTIVE: Final = "$patch"
REPLACE, DELETE, MERGE = DIRECTIVES = ("replace", "delete", "merge")
KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "quantity": (str, int, float),
    "int-or-string": (int, str),
}
LIKENESS: Final = 0.85
"""Likeness to a known field from which a name is a misspelling; others may be fields of a newer version."""
CONTAINERS: Final = ("containers", "initContainers")


Remedies = Mapping[tuple[str, ...], str]
"""Path of a field that the operator sets → what to write instead."""
_BY_OPERATOR: Final = "is set by the operator; leave it out"
_LABELS: Final = (LABEL_POOL, LABEL_MAX_NUM_SEQS, INSTANCE, COMPONENT)
_METADATA: Final[Remedies] = {
    **{("labels", label): _BY_OPERATOR for label in _LABELS},
    ("name",): _BY_OPERATOR,
    ("namespace",): _BY_OPERATOR,
}


@dataclass(frozen=True, slots=True)
class Overlay:
    """An overlay of the pods of one component, and the fields of these pods that it may not have."""

    path: str
    container: str
    """Name of the component's own container."""
    owners: str
    """The pods' component, for messages."""
    of_container: Remedies
    of_pod: Remedies = field(default_factory=dict)


ENGINES: Final = Overlay(
    "spec.podTemplate",
    ENGINE_CONTAINER,
    "engines",
    {
        ("args",): "is set by the plan: use spec.engine.extraArgs",
        ("command",): "is set by the plan: use spec.engine.image for an image with vLLM on its PATH",
        ("image",): "is set by the plan: use spec.engine.image",
    },
    {("terminationGracePeriodSeconds",): "is set by the plan: use spec.rollout.drainSeconds"},
)
PICKERS: Final = Overlay(
    "spec.picker.podTemplate",
    PICKER_CONTAINER,
    "pickers",
    {
        ("args",): "is set by the operator: other flags are variables of spec.picker.env",
        ("command",): "is set by the operator: use spec.picker.image",
        ("env",): "has a field of its own: use spec.picker.env",
        ("image",): "has a field of its own: use spec.picker.image",
        ("resources",): "has a field of its own: use spec.picker.resources",
    },
)
ENVOYS: Final = Overlay(
    "spec.gateway.podTemplate",
    ENVOY_CONTAINER,
    "Envoys",
    {
        ("args",): _BY_OPERATOR,
        ("command",): _BY_OPERATOR,
        ("image",): "is set by the operator: use the value envoy.image of the operator's chart",
    },
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A field that Kubernetes would refuse, or that this table does not know."""

    path: str
    text: str
    certain: bool = True
    """False for a field that a newer Kubernetes may have."""


@cache
def _file() -> Mapping[str, Any]:
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


def read_template(f: Fields, overlay: Overlay) -> Mapping[str, Any]:
    """Return an overlay, without its empty parts. Raises SpecError for what the operator sets itself."""
    found = f.done({key: f.free(key) for key in ("metadata", "spec")})
    _reject(found["metadata"], f.at("metadata"), _METADATA)
    _reject(found["spec"], f.at("spec"), {**overlay.of_pod, ("restartPolicy",): _BY_OPERATOR})
    for container in found["spec"].get("containers") or []:
        if isinstance(container, Mapping) and container.get("name") == overlay.container:
            _reject(container, f"{f.path}.spec.containers[{overlay.container}]", overlay.of_container)
    return {key: value for key, value in found.items() if value}


def _reject(raw: Any, path: str, remedies: Remedies) -> None:
    for keys, remedy in remedies.items():
        inner, rest = raw, list(keys)
        while rest and isinstance(inner, Mapping) and rest[0] in inner:
            inner = inner[rest.pop(0)]
        if not rest:
            raise SpecError(".".join((path, *keys)), remedy)


def check_templates(pool: Pool) -> None:
    """Raise SpecError for the first field of an overlay that no Kubernetes would take."""
    for problem in _all_problems(pool):
        if problem.certain:
            raise SpecError(problem.path, problem.text)


def remarks(pool: Pool) -> list[str]:
    """Return the fields of overlays that are not known, in a sentence each."""
    return [f"{each.path}: {each.text}" for each in _all_problems(pool) if not each.certain]


def _all_problems(pool: Pool) -> Iterator[Problem]:
    yield from problems(pool.pod_template)
    yield from problems(pool.picker.pod_template, PICKERS)
    yield from problems(pool.gateway.pod_template, ENVOYS)


def problems(template: Mapping[str, Any], overlay: Overlay = ENGINES) -> Iterator[Problem]:
    """Yield what is wrong with an overlay of a pod; nulls and directives of a strategic merge are no
    fields."""
    yield from _object(template, ROOT, overlay.path)
    for kind in CONTAINERS:
        listed = (template.get("spec") or {}).get(kind)
        for i, container in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(container, Mapping) and container.get(DIRECTIVE) != REPLACE:
                yield from _container(container, kind, f"{overlay.path}.spec.{kind}[{i}]", overlay)


def _container(container: Mapping[str, Any], kind: str, path: str, overlay: Overlay) -> Iterator[Problem]:
    name = container.get("name")
    own = overlay.container if kind == "containers" else ""
    if not name:
        hint = f": write {own} for that of the {overlay.owners}" if own else ": write one"
        yield Problem(f"{path}.name", f"is missing, and containers are merged by name{hint}")
    elif name != own and not container.get("image") and container.get(DIRECTIVE) != DELETE:
        hint = suggestion(str(name), [own]) or f"; that of the {overlay.owners} is called {own}"
        yield Problem(f"{path}.image", f"is missing: {name!r} is a container of its own{hint if own else ''}")


def _value(value: Any, kind: str, path: str) -> Iterator[Problem]:
    if value is None or kind == "any":
        return
    if kind.startswith("["):
        if not isinstance(value, list):
            yield Problem(path, f"is {type_name(value)}, not a list: begin each item with a dash")
            return
        for i, item in enumerate(value):
            if item is None:
                yield Problem(f"{path}[{i}]", "is null: leave this item of the list out")
            yield from _value(item, kind[1:], f"{path}[{i}]")
    elif kind in KINDS:
        if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
            quote = ": put it in quotes" if kind == "string" and isinstance(value, int | float) else ""
            yield Problem(path, f"is {type_name(value)}, not {_article(kind)}{quote}")
    elif not isinstance(value, Mapping):
        yield Problem(path, f"is {type_name(value)}, not an object")
    elif kind.startswith("{"):
        for key, below in value.items():
            yield from (
                _directive(below, path) if key == DIRECTIVE else _value(below, kind[1:], f"{path}.{key}")
            )
    else:
        yield from _object(value, kind, path)


def _directive(value: Any, path: str) -> Iterator[Problem]:
    if value not in DIRECTIVES:
        shown = repr(value) if isinstance(value, str) else type_name(value)
        yield Problem(f"{path}.{DIRECTIVE}", f"is {shown}: write {REPLACE}, {DELETE} or {MERGE}")


def _article(kind: str) -> str:
    names = {"integer": "a whole number", "int-or-string": "a number or a string"}
    return names.get(kind, f"a {kind}")


def _object(value: Mapping[str, Any], kind: str, path: str) -> Iterator[Problem]:
    fields = _file()["types"].get(kind)
    if not fields:
        return
    for key, below in value.items():
        if key in fields:
            yield from _value(below, fields[key], f"{path}.{key}")
        elif key == DIRECTIVE:
            yield from _directive(below, path)
        else:
            certain = bool(suggestion(str(key), sorted(fields), LIKENESS))
            near = suggestion(str(key), sorted(fields))
            version = _file()["version"]
            newer = (
                f"is not a field of pods in Kubernetes {version}{near}: leave it out unless yours is newer"
            )
            yield Problem(f"{path}.{key}", f"unknown field{near}" if certain else newer, certain=certain)
