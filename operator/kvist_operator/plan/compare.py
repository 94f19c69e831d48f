"""Two plans side by side: the second is the first with some fields of the spec changed. Pure."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from kvist_operator.errors import SpecError

from .plan import Plan


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact in which two plans differ."""

    field: str
    before: Any
    after: Any


def override(resource: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """The resource with ``engine.kvCacheDtype=Model`` and the like set; the value is YAML.

    Raises:
        SpecError: an assignment without ``=``, or through something that is no object.
    """
    changed = copy.deepcopy(dict(resource))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise SpecError(f"--with {assignment}", "write it like engine.kvCacheDtype=Model")
        keys = path.removeprefix("spec.").split(".")
        _assign(changed.setdefault("spec", {}), keys, _value(text, assignment), path)
    return changed


def _value(text: str, assignment: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        problem = str(error).partition("\n")[0]
        raise SpecError(f"--with {assignment}", f"the value is no YAML ({problem}): quote it") from error


def _assign(target: Any, keys: list[str], value: Any, path: str) -> None:
    for key in keys[:-1]:
        target = target.setdefault(key, {}) if isinstance(target, dict) else None
    if not isinstance(target, dict):
        raise SpecError(f"--with {path}", "does not lead to a field of the spec")
    target[keys[-1]] = value


def differences(before: Plan, after: Plan) -> list[Difference]:
    """The facts in which the two differ, in the order a plan prints them."""
    a, b = _facts(before), _facts(after)
    return [Difference(key, a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)]


def _facts(plan: Plan) -> dict[str, Any]:
    whole = plan.to_dict()
    flat = {"verdict": whole["verdict"], "shortfall_gib": whole["shortfall_gib"]}
    for section in ("accelerator", "parallelism", "memory", "pod", "env"):
        flat |= {f"{section}.{key}": value for key, value in whole[section].items()}
    return flat | {f"choice.{c.field}": c.value for c in plan.choices} | _arguments(plan.argv)


def _arguments(argv: Iterable[str]) -> dict[str, str]:
    """Flag → its values, joined; a switch is ``on``."""
    found: dict[str, list[str]] = {}
    flag = "args"
    for word in argv:
        if word.startswith("--"):
            flag = word
            found[flag] = []
        else:
            found.setdefault(flag, []).append(word)
    return {name: " ".join(words) or "on" for name, words in found.items()}
