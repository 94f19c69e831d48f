"""``spec.podTemplate`` against the fields of pods: misspelled fields, wrong types, containers without image.

``pod_fields.json`` is written by ``python -m tests.operator.pod_fields``, from the schemas of Kubernetes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from kvist_operator.errors import SpecError

from .fields import suggestion, type_name
from .pool import ENGINE_CONTAINER

FILE: Final = "pod_fields.json"
ROOT: Final = "PodTemplateSpec"
PATH: Final = "spec.podTemplate"
DIRECTIVE: Final = "$patch"
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


def check_template(template: Mapping[str, Any]) -> None:
    """Raise SpecError for the first field that no Kubernetes would take."""
    for problem in problems(template):
        if problem.certain:
            raise SpecError(problem.path, problem.text)


def remarks(template: Mapping[str, Any]) -> list[str]:
    """Return the fields that are not known, in a sentence each."""
    return [f"{each.path}: {each.text}" for each in problems(template) if not each.certain]


def problems(template: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with an overlay of a pod; nulls and directives of a strategic merge are no
    fields."""
    yield from _object(template, ROOT, PATH)
    for kind in CONTAINERS:
        listed = (template.get("spec") or {}).get(kind)
        for i, container in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(container, Mapping) and DIRECTIVE not in container:
                yield from _container(container, kind, f"{PATH}.spec.{kind}[{i}]")


def _container(container: Mapping[str, Any], kind: str, path: str) -> Iterator[Problem]:
    name = container.get("name")
    own = ENGINE_CONTAINER if kind == "containers" else ""
    if not name:
        hint = f": write {own} for that of the engines" if own else ": write one"
        yield Problem(f"{path}.name", f"is missing, and containers are merged by name{hint}")
    elif name != own and not container.get("image"):
        hint = suggestion(str(name), [own]) or f"; the engines' container is called {own}"
        yield Problem(f"{path}.image", f"is missing: {name!r} is a container of its own{hint if own else ''}")


def _value(value: Any, kind: str, path: str) -> Iterator[Problem]:
    if value is None or kind == "any":
        return
    if kind.startswith("["):
        if not isinstance(value, list):
            yield Problem(path, f"is {type_name(value)}, not a list: begin each item with a dash")
            return
        for i, item in enumerate(value):
            yield from _value(item, kind[1:], f"{path}[{i}]")
    elif kind in KINDS:
        if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
            quote = ": put it in quotes" if kind == "string" and isinstance(value, int | float) else ""
            yield Problem(path, f"is {type_name(value)}, not {_article(kind)}{quote}")
    elif not isinstance(value, Mapping):
        yield Problem(path, f"is {type_name(value)}, not an object")
    elif kind.startswith("{"):
        for key, below in value.items():
            yield from _value(below, kind[1:], f"{path}.{key}")
    else:
        yield from _object(value, kind, path)


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
        elif key != DIRECTIVE:
            certain = bool(suggestion(str(key), sorted(fields), LIKENESS))
            near = suggestion(str(key), sorted(fields))
            version = _file()["version"]
            newer = (
                f"is not a field of pods in Kubernetes {version}{near}: leave it out unless yours is newer"
            )
            yield Problem(f"{path}.{key}", f"unknown field{near}" if certain else newer, certain=certain)
