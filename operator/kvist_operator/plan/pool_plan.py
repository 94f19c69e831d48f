"""The plan of a pool, whose engines may have roles: one plan for each, that of prefill inside decode's. Pure.

Each role is planned as a pool of its own, with the role's accelerator, parallelism and arguments. What the
roles have to have in common is made alike where the user leaves it to the plan (dtype of the KV cache, tensor
parallelism of prefill), and checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvist_operator.engine_version import engine_version
from kvist_operator.errors import SpecError
from kvist_operator.models.shape import Facts
from kvist_operator.node_labels import NodeFacts
from kvist_operator.spec.disaggregation import Role
from kvist_operator.spec.disaggregation_reader import field_of_role, pools_by_role
from kvist_operator.spec.pool import KvDtype, Pool, Workload

from .nixl import check_sizes, kv_compatibility
from .plan import Choice, Plan, PlanVerdict
from .planner import plan_engines
from .prompt_batch import pooling_of
from .requirements import DEFAULT_CONCURRENCY


def make_plan(
    pool: Pool,
    facts: Facts,
    *,
    nodes: Sequence[NodeFacts] = (),
    gpu: str = "",
    draft: Facts | None = None,
    prices: Mapping[str, float] | None = None,
) -> Plan:
    """Return the plan of a pool; ``gpu`` overrides the accelerator of the spec and of the nodes.

    ``prices`` of an accelerator for an hour, by its name, decide between kinds of accelerators. With roles
    the plan is that of decode, and ``prefill`` the other one; a refused plan is that of the refused role.

    Raises:
        SpecError: a field that has an invalid value.
        HardwareError: no source names the accelerator, or it is not known.
    """

    def planned(role: Role, of: Pool) -> Plan:
        own = replace(of, workload=_workload(of.workload, role))
        try:
            return plan_engines(own, facts, nodes=nodes, gpu=gpu, draft=draft, prices=prices)
        except SpecError as error:
            raise SpecError(field_of_role(pool, role, error.field), error.problem) from error

    roles = pools_by_role(pool)
    if not roles:
        return plan_engines(pool, facts, nodes=nodes, gpu=gpu, draft=draft, prices=prices)
    if pooling_of(pool, facts, ()):
        problem = "is for models that write text; this one has no answers to decode: leave it out"
        raise SpecError("spec.disaggregation", problem)
    if Role.BOTH in roles:
        return _labelled(pool, facts, planned(Role.BOTH, roles[Role.BOTH]))
    plans = {role: planned(role, each) for role, each in roles.items()}
    if pool.engine.kv_dtype is KvDtype.AUTO and _kv_formats(plans) > 1:
        engine = replace(pool.engine, kv_dtype=KvDtype.MODEL)
        roles = pools_by_role(replace(pool, engine=engine))
        plans = {role: planned(role, each) for role, each in roles.items()}
    decode, prefill = plans[Role.DECODE], plans[Role.PREFILL]
    if _narrower(decode, prefill, facts) and not roles[Role.PREFILL].engine.tensor:
        own = roles[Role.PREFILL]
        narrow = replace(own, engine=replace(own.engine, tensor=decode.layout.tensor))
        prefill = planned(Role.PREFILL, narrow)
    for role, plan in ((Role.DECODE, decode), (Role.PREFILL, prefill)):
        if plan.verdict is PlanVerdict.REFUSED:
            return _refused(role, plan)
    check_sizes(facts.shape, prefill.layout, decode.layout)
    _check_formats(decode, prefill)
    return _joined(_labelled(pool, facts, decode), _labelled(pool, facts, prefill, like=decode))


def _workload(hints: Workload, role: Role) -> Workload:
    """Return the workload of one role: prefill writes one token of each answer, and computes few prompts at
    once; targets are those of the role that keeps them."""
    if role is Role.DECODE:
        return replace(hints, ttft_ms=None)
    if role is Role.BOTH:
        return hints
    output = None if hints.output_tokens is None else 1
    at_once = min(hints.concurrency or DEFAULT_CONCURRENCY, DEFAULT_CONCURRENCY)
    return replace(hints, output_tokens=output, concurrency=at_once, tpot_ms=None)


def _kv_formats(plans: Mapping[Role, Plan]) -> int:
    return len({(plan.settings.kv_dtype, plan.settings.plain_windows) for plan in plans.values()})


def _narrower(decode: Plan, prefill: Plan, facts: Facts) -> bool:
    """Return whether decode has fewer tensor-parallel ranks than it could read from."""
    fit = PlanVerdict.REFUSED not in (decode.verdict, prefill.verdict)
    return fit and not facts.shape.latent and prefill.layout.tensor > decode.layout.tensor


def _check_formats(decode: Plan, prefill: Plan) -> None:
    """Raise SpecError for formats of the cache in which the roles' accelerators differ."""
    first, second = (_facts(plan) for plan in (prefill, decode))
    for field, remedy in (
        ("kvCacheDtype", "set it to one that both have, or to Model"),
        ("attentionBackend", "set one that both have"),
    ):
        if first[field] != second[field]:
            problem = (
                f"prefill on {prefill.hardware.accelerator.name} would use {first[field]} and decode on "
                f"{decode.hardware.accelerator.name} {second[field]}, which exchange no blocks: {remedy}"
            )
            raise SpecError(f"spec.engine.{field}", problem)


def _facts(plan: Plan) -> dict[str, str]:
    chosen = {choice.field: str(choice.value) for choice in plan.choices}
    return {"kvCacheDtype": plan.settings.kv_dtype, "attentionBackend": chosen.get("attentionBackend", "")}


def _labelled(pool: Pool, facts: Facts, plan: Plan, like: Plan | None = None) -> Plan:
    """Return the plan with the hash of what its engines and those of the other role have in common."""
    if plan.verdict is PlanVerdict.REFUSED:
        return plan
    version = engine_version(pool.engine.image, pool.engine.version)
    return replace(plan, kv_compatibility=kv_compatibility(pool, like or plan, version, facts))


def _joined(decode: Plan, prefill: Plan) -> Plan:
    doubts = dict.fromkeys([*decode.doubts, *prefill.doubts])
    warnings = dict.fromkeys([*decode.warnings, *prefill.warnings])
    return replace(
        decode,
        prefill=prefill,
        doubts=tuple(doubts),
        warnings=tuple(warnings),
        verdict=PlanVerdict.UNVERIFIED if doubts else decode.verdict,
    )


def _refused(role: Role, plan: Plan) -> Plan:
    """Return the refused plan of one role, whose reason names the role."""
    choices = [
        Choice(c.field, c.value, f"{role}: {c.reason}", c.source) if c.field == "verdict" else c
        for c in plan.choices
    ]
    return replace(plan, choices=tuple(choices), nearest=f"{role}: {plan.nearest}")
