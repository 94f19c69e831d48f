"""Pools as files: ``valid``, ``warned``, and ``invalid`` with what API server and operator say of each.

A file begins with comments: why, then ``api:`` and ``operator:`` with a part of each message. Without
``api:`` the API server cannot know better, and takes the pool. ``warns:`` has a part of a warning, or of the
reason for which a plan is unverified.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from kvist_operator.models.source import model_facts
from kvist_operator.plan import Plan, PlanVerdict, make_plan
from kvist_operator.spec import read_pool

FOLDER: Final = Path(__file__).parent
CRD: Final = FOLDER.parent.parent / "crds" / "inferencepools.yaml"
GPU: Final = "H100-80GB"
"""Where a pool does not say."""


@dataclass(frozen=True)
class Case:
    """One pool in a file, with the error that is expected of it."""

    name: str
    pool: dict[str, Any]
    api: str = ""
    operator: str = ""
    warns: str = ""


def cases(folder: str) -> list[Case]:
    """All of a folder, by name."""
    return [_case(path) for path in sorted((FOLDER / folder).glob("*.yaml"))]


def _case(path: Path) -> Case:
    text = path.read_text()
    said = {
        key: line.partition(f"# {key}: ")[2]
        for key in ("api", "operator", "warns")
        for line in text.splitlines()
        if line.startswith(f"# {key}: ")
    }
    return Case(
        path.stem, yaml.safe_load(text), said.get("api", ""), said.get("operator", ""), said.get("warns", "")
    )


def planned(resource: dict[str, Any]) -> Plan:
    """Plan a pool as the operator does, without a cluster. Raises OperatorError."""
    pool = read_pool(resource)
    says = pool.accelerator.product or pool.accelerator.resource
    return make_plan(pool, model_facts(pool.model), gpu="" if says else GPU)


def refusal(plan: Plan) -> str:
    """Why a plan is refused; empty when it is not."""
    if plan.verdict is not PlanVerdict.REFUSED:
        return ""
    return plan.refusal
