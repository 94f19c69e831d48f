"""Rollouts of prefill and decode in step with each other, so that new engines find new partners. Pure.

Engines of two generations exchange no blocks if their label ``kvist.dev/kv-compatibility`` differs. If each
workload rolled for itself, one role could be new altogether while the other is still old. So only one of the
two replaces pods at a time, the one that is less far, decode first (a new decode engine without a partner
computes prompts by itself, a new prefill engine would do nothing). A Deployment is held by ``paused``, a
LeaderWorkerSet by ``partition``. Example with 2 prefill and 4 decode engines:
decode 1, prefill 1, decode 2, decode 3, prefill 2, decode 4.

Everything is read from the workloads, so that a new operator goes on where another one stopped. A workload
stays released until its new pod is ready, so that its own deadline applies, and is held in the seconds
(``minReadySeconds``) until that pod is available.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from kvist_epp.names import LABEL_ROLES
from kvist_operator.json_digest import json_digest
from kvist_operator.manifests.object_names import ENGINE, Json
from kvist_operator.spec.disaggregation import Role
from kvist_operator.spec.pool import COMPONENT

ROLE: Final = LABEL_ROLES[0]
DEPLOYMENT: Final = "Deployment"
PODS: Final = "kvist.dev/pods"
"""Annotation of a workload with a role: hash of the template of its pods, by which generations differ."""


@dataclass(frozen=True, slots=True)
class RoleProgress:
    """The progress of a role's workload."""

    wanted: int
    updated: int
    """Pods of the wanted generation; 0 while the workload's controller has not seen it."""
    ready: int
    available: int
    there: int
    differs: bool
    """Whether the wanted template is not applied yet."""
    seen: bool
    """Whether the workload's controller has seen its newest spec."""
    held: bool
    """Whether it is to replace no more pods."""

    @property
    def complete(self) -> bool:
        """True if no pod is left to replace."""
        return not self.differs and self.seen and self.updated >= self.wanted

    @property
    def part(self) -> Fraction:
        """Share of the pods that are of the wanted generation."""
        return Fraction(self.updated, max(1, self.wanted))

    @property
    def lacks(self) -> bool:
        """True while pods are not ready."""
        return self.ready < max(self.wanted, self.there)

    @property
    def is_replacing(self) -> bool:
        """True from the release of a workload until its new pod is ready."""
        released = not self.held and not self.seen
        return not self.differs and (released or (self.lacks and (self.updated > 0 or not self.held)))

    @property
    def is_settling(self) -> bool:
        """True while the state is not known, or a pod became ready only now."""
        return not self.seen or (not self.lacks and self.available < max(self.wanted, self.there))


def in_step(wanted: Mapping[Any, Json], there: Mapping[Any, Json]) -> dict[Any, Json]:
    """Return the wanted objects, in which at most one of two workloads with roles replaces pods.

    ``wanted`` and ``there`` are the intended and the observed objects by their keys.
    """
    made = {key: _marked(each, there.get(key)) for key, each in wanted.items() if role_of(each)}
    roles = {role_of(each): key for key, each in made.items()}
    if len(roles) == 2 and all(key in there for key in made):
        progress = {role: _progress(made[key], there[key]) for role, key in roles.items()}
        turn = _turn(progress)
        for role, key in roles.items():
            if not progress[role].complete:
                made[key] = _limited(made[key], progress[role], goes_on=role == turn)
    return {**wanted, **made}


def role_of(made: Mapping[str, Any]) -> str:
    """Return the role of a workload of engines; empty for other objects, and for engines without one."""
    labels = made["metadata"].get("labels") or {}
    runs = made["kind"] in (DEPLOYMENT, "LeaderWorkerSet") and labels.get(COMPONENT) == ENGINE
    return str(labels.get(ROLE, "")) if runs else ""


def _turn(progress: Mapping[str, RoleProgress]) -> str:
    """Return the role that replaces pods now; empty while pods have to settle, or if none is left."""
    left = [role for role, each in progress.items() if not each.complete]
    if len(left) < 2:
        return next(iter(left), "")
    replacing = [role for role in left if progress[role].is_replacing]
    if replacing:
        return min(replacing, key=_order)
    if any(each.is_settling for each in progress.values()):
        return ""
    return min(left, key=lambda role: (progress[role].part, _order(role)))


def _order(role: str) -> int:
    return 0 if role == Role.DECODE else 1


def _marked(made: Json, found: Json | None) -> Json:
    """Return a workload with the hash of its pods' template, and one that an autoscaler scales with its
    present replicas: an apply without the field would set it to 1 where the operator has owned it before."""
    spec, meta = made["spec"], made["metadata"]
    template = spec.get("template") or spec["leaderWorkerTemplate"]
    digest = json_digest(template, 16)
    annotations = {**meta.get("annotations", {}), PODS: digest}
    if "replicas" not in spec and found is not None and "replicas" in found["spec"]:
        spec = {"replicas": found["spec"]["replicas"], **spec}
    return {**made, "metadata": {**meta, "annotations": annotations}, "spec": spec}


def _progress(made: Json, found: Json) -> RoleProgress:
    status, spec, meta = found.get("status") or {}, found["spec"], found["metadata"]
    observed, ready = status.get("observedGeneration"), int(status.get("readyReplicas") or 0)
    differs = (meta.get("annotations") or {}).get(PODS) != made["metadata"]["annotations"][PODS]
    rolling = (spec.get("rolloutStrategy") or {}).get("rollingUpdateConfiguration") or {}
    seen = observed is None or observed >= meta.get("generation", 0)
    return RoleProgress(
        wanted=int(made["spec"].get("replicas", 1)),
        updated=int(status.get("updatedReplicas") or 0) if seen and not differs else 0,
        ready=ready,
        # LeaderWorkerSets know no such time
        available=int(status.get("availableReplicas") or 0) if spec.get("minReadySeconds") else ready,
        there=int(status.get("replicas") or 0),
        differs=differs,
        seen=seen,
        held=bool(spec.get("paused") or rolling.get("partition")),
    )


def _limited(made: Json, progress: RoleProgress, *, goes_on: bool) -> Json:
    """Return the workload that replaces one more pod, or no more.

    Groups of a LeaderWorkerSet from ``partition`` on have the new template, the others keep the old one.
    """
    if made["kind"] == DEPLOYMENT:
        return made if goes_on else {**made, "spec": {**made["spec"], "paused": True}}
    more = int(goes_on and not (progress.lacks and progress.updated > 0))
    strategy = made["spec"]["rolloutStrategy"]
    partition = max(0, progress.wanted - progress.updated - more)
    rolling = {**strategy["rollingUpdateConfiguration"], "partition": partition}
    return {
        **made,
        "spec": {**made["spec"], "rolloutStrategy": {**strategy, "rollingUpdateConfiguration": rolling}},
    }
