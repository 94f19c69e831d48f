"""The whole status, from everything known. Pure; the same input gives the same status: at rest nothing is
written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvist_epp.names import LABEL_POOL
from kvist_operator.errors import OperatorError
from kvist_operator.manifests.cluster_facts import Note
from kvist_operator.manifests.object_names import ENGINE_PORT, ObjectNames
from kvist_operator.plan import Plan, PlanVerdict
from kvist_operator.spec.pool import Pool

from . import conditions_builder as build
from .conditions import Condition, Json, written
from .views import Counts, ObservedPool, counts, plan_status


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Input of a status."""

    name: str
    generation: int
    pool: Pool | None = None
    """None where the spec cannot be read."""
    plan: Plan | None = None
    error: OperatorError | None = None
    notes: Sequence[Note] = ()


def status(subject: Subject, observed: ObservedPool, old: Mapping[str, Any], now: datetime) -> Json:
    """``old``: the status before, from which come the times of conditions that stay as they are, and the plan
    that runs on while a new spec cannot be planned."""
    found = counts(observed.workload)
    conditions = written(
        _conditions(subject, observed, found), old.get("conditions") or (), subject.generation, now
    )
    made: Json = {
        "observedGeneration": subject.generation,
        "replicas": found.there,
        "readyReplicas": found.ready,
        "updatedReplicas": found.updated,
        "selector": f"{LABEL_POOL}={subject.name}",
        "targetPorts": [{"number": ENGINE_PORT}],
        "url": url(subject.pool) if subject.pool else old.get("url", ""),
        "conditions": conditions,
        "advice": [*observed.advice, *(note.message for note in subject.notes if not note.condition)],
    }
    plan = _plan(subject, observed, old)
    if plan:
        made["plan"] = plan
    if observed.kv_tokens is not None:
        made["reportedKvTokens"] = observed.kv_tokens
    return made


def _conditions(subject: Subject, observed: ObservedPool, found: Counts) -> list[Condition]:
    basic = [
        build.accepted(subject.plan, subject.error),
        build.available(found),
        build.progressing(observed, found),
    ]
    more = _optional(subject.pool, observed, subject.notes) if subject.pool else []
    others = [*basic, *more]
    return [build.ready(subject.pool, observed, others), *others]


def _optional(pool: Pool, observed: ObservedPool, notes: Sequence[Note]) -> list[Condition]:
    asked = (
        build.attached(pool, observed, notes),
        build.precise(pool, notes),
        build.monitored(notes),
    )
    return [condition for condition in asked if condition]


def _plan(subject: Subject, observed: ObservedPool, old: Mapping[str, Any]) -> Json | None:
    """The plan that runs: the last good one while there are engines of it."""
    refused = subject.plan is not None and subject.plan.verdict is PlanVerdict.REFUSED
    if subject.plan is None or (refused and observed.workload is not None):
        return old.get("plan")
    return plan_status(subject.plan)


def url(pool: Pool) -> str:
    """Return the address for requests; empty if only the Gateway knows it."""
    names = ObjectNames.of(pool)
    if pool.gateway.mode == "Envoy":
        return f"http://{names.host(names.envoy)}"
    if pool.gateway.mode == "Route":
        return f"http://{pool.gateway.hostnames[0]}" if pool.gateway.hostnames else ""
    return f"http://{names.host(names.engine)}:{ENGINE_PORT}"
