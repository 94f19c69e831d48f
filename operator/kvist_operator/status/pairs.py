"""The condition Disaggregated: whether engines that prefill and engines that decode find each other. Pure.

Engines exchange blocks only if their labels ``kvist.dev/kv-compatibility`` are equal. Pods of any generation
count, as they do for the picker.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvist_epp.names import LABEL_KV_COMPATIBILITY, LABEL_POOL, LABEL_ROLES
from kvist_operator.plan import Plan, PlanVerdict
from kvist_operator.spec.disaggregation import Role
from kvist_operator.spec.pool import Pool

from .condition import FALSE, TRUE, Condition

DISAGGREGATED: Final = "Disaggregated"
Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Ready engines by what they can exchange blocks with: (compatibility, role) → engines."""

    ready: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def number(self, role: Role) -> int:
        """Return the ready engines of a role."""
        return sum(number for (_, own), number in self.ready.items() if own == role)

    def matched(self, role: Role) -> int:
        """Return the ready engines of a role with a partner."""
        return sum(
            number
            for (value, own), number in self.ready.items()
            if own == role and value and self._partners(value, role, number)
        )

    def _partners(self, value: str, role: Role, number: int) -> bool:
        if role is Role.BOTH:
            return number > 1
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        return self.ready.get((value, other), 0) > 0

    def values(self, role: Role) -> str:
        """Return the values of the label that engines of a role have, for messages."""
        found = sorted(value or "none" for value, own in self.ready if own == role)
        return ", ".join(found)


def pairs_of(pods: Iterable[Object]) -> Pairs:
    """Return the ready engines of a pool's pods that serve requests."""
    found: Counter[tuple[str, str]] = Counter()
    for pod in pods:
        meta = pod["metadata"]
        labels = meta.get("labels") or {}
        conditions = (pod.get("status") or {}).get("conditions") or ()
        ready = any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
        if LABEL_POOL in labels and ready and "deletionTimestamp" not in meta:
            found[labels.get(LABEL_KV_COMPATIBILITY, ""), labels.get(LABEL_ROLES[0], "")] += 1
    return Pairs(found)


def disaggregated(pool: Pool, plan: Plan | None, pairs: Pairs) -> Condition | None:
    """Return Disaggregated: whether prompts can be computed elsewhere; None for other pools."""
    if pool.disaggregation is None or plan is None or plan.verdict is PlanVerdict.REFUSED:
        return None
    if pool.disaggregation.fluid:
        return _alike(pairs)
    prefill, decode = pairs.number(Role.PREFILL), pairs.number(Role.DECODE)
    if not prefill:
        text = "no engine for prefill is ready, so engines that decode compute prompts by themselves: see "
        text += "Progressing and spec.disaggregation.prefill"
        return Condition(DISAGGREGATED, FALSE, "NoPrefill", text)
    if not decode:
        text = "no engine for decode is ready, so requests wait or run on engines for prefill: see "
        text += "Progressing and spec.disaggregation.decode"
        return Condition(DISAGGREGATED, FALSE, "NoDecode", text)
    own, other = pairs.matched(Role.PREFILL), pairs.matched(Role.DECODE)
    where = f"with a partner: {own} of {prefill} engines for prefill, {other} of {decode} for decode"
    if not own or not other:
        text = (
            f"engines exchange blocks only within one value of {LABEL_KV_COMPATIBILITY}, and those for "
            f"prefill have {pairs.values(Role.PREFILL)}, those for decode {pairs.values(Role.DECODE)}: wait "
            "for the rollout, or see Progressing for what holds it up"
        )
        return Condition(DISAGGREGATED, FALSE, "NoPairs", text)
    if (own, other) != (prefill, decode):
        return Condition(DISAGGREGATED, TRUE, "PartlyPaired", f"{where}; a rollout replaces the others")
    return Condition(DISAGGREGATED, TRUE, "Paired", where)


def _alike(pairs: Pairs) -> Condition:
    """Return the condition of engines that are alike, each of which needs another one."""
    number, matched = pairs.number(Role.BOTH), pairs.matched(Role.BOTH)
    where = f"with a partner: {matched} of {number} engines"
    if matched == number > 0:
        return Condition(DISAGGREGATED, TRUE, "Paired", where)
    if matched:
        return Condition(DISAGGREGATED, TRUE, "PartlyPaired", f"{where}; a rollout replaces the others")
    if number > 1:
        text = (
            f"engines exchange blocks only within one value of {LABEL_KV_COMPATIBILITY}, and they have "
            f"{pairs.values(Role.BOTH)}: wait for the rollout, or see Progressing for what holds it up"
        )
        return Condition(DISAGGREGATED, FALSE, "NoPairs", text)
    text = f"ready engines: {number}; to compute a prompt elsewhere takes two: raise spec.replicas"
    return Condition(DISAGGREGATED, FALSE, "OneEngine", text)
