"""Makes the plan of engines: hardware, requirements, KV dtype, size and arguments, or a refusal. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvist_operator.engine_version import EngineVersion, engine_version
from kvist_operator.errors import SpecError
from kvist_operator.extra_args import ExtraFlag, read_extra
from kvist_operator.hardware import ROWS
from kvist_operator.memory.layout import GIB, Draft, EngineSettings, Layout
from kvist_operator.models.shape import Facts, parameters
from kvist_operator.node_labels import NodeFacts
from kvist_operator.spec.disaggregation import Role
from kvist_operator.spec.pool import Pool

from .checks import check, too_old, unverified, warnings
from .engine_args import (
    adapter_numbers,
    arguments,
    describe_arguments,
    environment,
    model_argument,
    publishes_kv_events,
    read_draft,
)
from .kv import KvChoice, choose_kv
from .kv_transfer import check_layout, check_offload, needs_connector, storage_namespace
from .latency import expected_tpot, expected_ttft, step_for_target
from .layouts import describe_layout, impossible
from .nixl import check_nixl, check_role_layout, describe_role
from .plan import Choice, Hardware, Plan, PlanVerdict
from .prompt_batch import (
    describe_pooling,
    pooling_doubts,
    pooling_of,
    pooling_requirements,
    pooling_settings,
    pooling_warnings,
)
from .requirements import RULE, read_requirements
from .resources import HardwareOption, checkpoint_size, hardware_options, pod_resources
from .selection import HardwareSizing, choose, described, for_image, lacking, neighbours, tightest
from .sequences import with_sequences
from .shared_cache import share_cache
from .size import SizedLayout, SizingInput, first_settings, most_worth, size
from .tiers import bytes_per_token, describe_tiers, tiers

OFFERED: Final = (
    "A100-40GB",
    "A100-80GB",
    "A10",
    "L4",
    "L40S",
    "H100-80GB",
    "H200-141GB",
    "B200-180GB",
    "GB200-186GB",
    "RTX-PRO-6000-96GB",
    "MI300X-192GB",
    "MI325X-256GB",
)
"""Accelerators that a refusal may suggest: those that several clouds rent."""


def plan_engines(
    pool: Pool,
    facts: Facts,
    *,
    nodes: Sequence[NodeFacts] = (),
    gpu: str = "",
    draft: Facts | None = None,
    prices: Mapping[str, float] | None = None,
) -> Plan:
    """Return the plan of engines that are alike: of a whole pool, or of one role.

    ``gpu`` overrides the accelerator of the spec and of the nodes.

    ``prices`` of an accelerator for an hour, by its name, decide between kinds of accelerators.

    Raises:
        SpecError: a field that has an invalid value.
        HardwareError: no source names the accelerator, or it is not known.
    """
    version = engine_version(pool.engine.image, pool.engine.version)
    extra = read_extra(pool.engine.extra_args, version)
    kinds = hardware_options(
        pool.accelerator, nodes=for_image(nodes, pool.engine.image), gpu=gpu, prices=prices
    )
    attempts: list[HardwareSizing] = []
    errors: list[SpecError] = []
    for kind in kinds:
        try:
            attempts.append(_attempt(pool, facts, kind, version, extra, draft))
        except SpecError as error:
            errors.append(error)  # such as FP8 weights on an older kind of GPU
    if not attempts:
        raise errors[0]
    chosen = choose(attempts)
    shape, q = facts.shape, chosen.q
    size_gib = checkpoint_size(facts, None) / GIB
    number = parameters(shape)
    weights = f"{number / 1e9:.1f} billion" if number >= 1e8 else f"{number / 1e6:.0f} million"
    counted = f"{weights} weights; files of {size_gib:.1f} GiB"
    model = Choice("model", shape.describe(), f"{counted}: {facts.checkpoint_source}", facts.source)
    engine = Choice("engineVersion", str(version), f"image {pool.engine.image}", version.source)
    accelerator = described(chosen, attempts)
    choices = [
        *_from_preset(pool),
        model,
        engine,
        *accelerator,
        *q.required.choices,
        *chosen.kv.choices,
        *chosen.settings,
    ]
    doubts = unverified(pool, facts, q.hardware, version, extra)
    if q.settings.pooling:
        doubts += pooling_doubts(pool, shape, q.settings.pooling, extra)
        choices += describe_pooling(pool, q.settings.pooling, q.required.overrides)
    if chosen.sized is None:
        return _refused(pool, chosen, len(kinds), choices, doubts)
    found = _fitting(pool, chosen, chosen.sized, choices, doubts, extra, version)
    return found if q.settings.pooling else replace(found, neighbours=neighbours(chosen, attempts))


def _from_preset(pool: Pool) -> list[Choice]:
    if pool.preset is None:
        return []
    fields = ", ".join(pool.preset.fields) or "no field that the pool does not set"
    return [Choice("preset", str(pool.preset), f"sets {fields}", "spec.presetRef")]


def _attempt(
    pool: Pool,
    facts: Facts,
    candidate: HardwareOption,
    version: EngineVersion,
    extra: Sequence[ExtraFlag],
    draft: Facts | None,
) -> HardwareSizing:
    """Return the sizing on one kind of accelerator. Raises SpecError for what it cannot do."""
    shape, hardware = facts.shape, candidate.hardware
    gpu = hardware.accelerator
    pooling = pooling_of(pool, facts, extra)
    if pooling:
        facts = replace(facts, tool_parser="", reasoning_parser="")
        required = pooling_requirements(pool, shape, pooling, gpu, extra)
    else:
        required = read_requirements(pool, shape)
    kv = choose_kv(pool.engine, shape, gpu, version.flags, pooling, connector=needs_connector(pool))
    proposer = read_draft(pool.engine.speculative, shape.mtp_layers, draft)
    base = replace(_base_settings(pool, hardware, kv, proposer, extra, version), pooling=pooling)
    if pooling:
        settings, first = pooling_settings(pool, gpu, required, base, shape)
    else:
        settings, first = first_settings(pool, gpu, required, base)
    check(pool, facts, hardware)
    check_offload(pool, hardware, version)
    check_nixl(pool, version, extra)
    q = SizingInput(facts=facts, hardware=hardware, engine=pool.engine, required=required, settings=settings)
    sized, layouts = size(q)
    target = 0 if pooling else pool.workload.tpot_ms
    if target and not pool.engine.max_num_batched_tokens:
        q, sized, layouts = _with_step_for(target, q, sized, layouts)
        reason = f"the largest step that keeps the TPOT target of {target} ms, if one does (tpotMilliseconds)"
        step = q.settings.batched_tokens
        first.append(Choice("maxNumBatchedTokens", step, reason, "spec.workload.tpotMilliseconds"))
        if q.settings.sequences < settings.sequences:
            first.append(Choice("maxNumSeqs", q.settings.sequences, "a step has a token of each", RULE))
    if not layouts:
        raise impossible(pool.engine, shape, hardware)
    found = []
    if sized:
        found = [(sized, list[Choice]())] if pooling else _with_shared_cache(q, sized)
    sized, spread = most_worth(found, lambda each: q.held(each[0].memory)) or (None, [])
    others = tuple(each for each, _ in found if each is not sized)
    if sized and not target and not pooling and pool.role is not Role.PREFILL:
        sized, sequences = with_sequences(q, sized, pool.workload.typical_tokens)
        spread = [*spread, *sequences]
    return HardwareSizing(
        candidate=candidate,
        q=q,
        kv=kv,
        settings=tuple(first),
        sized=sized,
        layouts=tuple(layouts),
        spread=tuple(spread),
        others=others,
    )


def _with_step_for(
    target_ms: int, q: SizingInput, sized: SizedLayout | None, layouts: list[Layout]
) -> tuple[SizingInput, SizedLayout | None, list[Layout]]:
    """Return the sizing with the largest step that keeps a TPOT target.

    A smaller step leaves more memory, so that fewer GPUs may do, which are slower: hence the rounds. Steps
    only become smaller, so they end.
    """
    gpu, shape = q.hardware.accelerator, q.facts.shape
    while sized is not None:
        step = step_for_target(target_ms, shape, gpu, sized.memory, q.required)
        step = max(step, q.engine.max_num_seqs or 0)
        if step >= q.settings.batched_tokens:
            break
        settings = replace(q.settings, batched_tokens=step, sequences=min(q.settings.sequences, step))
        q = replace(q, settings=settings)
        sized, layouts = size(q)
    return q, sized, layouts


def _with_shared_cache(q: SizingInput, sized: SizedLayout) -> list[tuple[SizedLayout, list[Choice]]]:
    """Return the layout and the others that fit, the smallest first, each divided as its cache is best: a
    smaller one may hold as much then."""
    reason = f"the smallest that holds enough of {q.load}"
    others = [replace(each, reason=reason) for each in sized.others]
    found = sorted([sized, *others], key=lambda each: each.layout.gpus)
    return [share_cache(q, each) for each in found]


def _base_settings(
    pool: Pool,
    hardware: Hardware,
    kv: KvChoice,
    draft: Draft | None,
    extra: Sequence[ExtraFlag],
    version: EngineVersion,
) -> EngineSettings:
    eager = any(each.name == "enforce-eager" and each.on for each in extra)
    return EngineSettings(
        version=version.stated or version.flags,
        kv_dtype=kv.dtype,
        plain_windows=kv.plain_windows,
        block=kv.block,
        prefix_caching=pool.engine.prefix_caching,
        eager=eager or hardware.accelerator.vendor == "cpu",
        images=pool.workload.images != 0,
        pictures=pool.workload.images or 0,
        online_fp8=pool.engine.quantization == "FP8",
        adapters=adapter_numbers(pool)[0] if pool.model.adapters else 0,
        adapter_rank=max((a.rank for a in pool.model.adapters), default=16),
        draft=draft,
    )


def _fitting(
    pool: Pool,
    chosen: HardwareSizing,
    sized: SizedLayout,
    choices: list[Choice],
    doubts: list[str],
    extra: Sequence[ExtraFlag],
    version: EngineVersion,
) -> Plan:
    q, kv, facts = chosen.q, chosen.kv, chosen.q.facts
    settings, layout, shape = sized.settings, sized.layout, facts.shape
    pooling, gpu = settings.pooling, q.hardware.accelerator
    if gpu.vendor == "cpu" and (pooling is None or pooling.causal):
        # vLLM does not profile a CPU: the cache has a fixed size, in whole MiB
        settings = replace(settings, kv_bytes=int(sized.memory.kv) >> 20 << 20)
    memory = q.memory(layout, settings)
    pod, pod_choices = pod_resources(
        pool, q.hardware, layout, memory, checkpoint_size(q.facts, settings.draft)
    )
    check_layout(pool, q.hardware, layout)
    check_role_layout(pool, shape, layout)
    model = model_argument(pool)
    storage = storage_namespace(pool, facts, q.hardware, layout, settings, kv, version, model)
    folder = storage.name if storage else ""
    args = arguments(pool, facts, q.hardware, layout, settings, kv, q.required, extra, folder)
    places = tiers(pool, shape, q.hardware, memory)
    workload = replace(pool.workload, tpot_ms=None) if pooling else pool.workload
    tpot, slow = expected_tpot(workload, shape, gpu, memory, q.required, settings.batched_tokens)
    warned = warnings(pool, facts, q.hardware, layout, settings, memory)
    if pooling:
        warned = [*warned, *pooling_warnings(pool, pooling, extra)]
    all_choices = [
        *choices,
        *describe_role(pool, bytes_per_token(memory, shape, q.hardware)),
        *describe_layout(layout, shape, q.hardware, sized.reason),
        *chosen.spread,
        *sized.choices,
        *describe_arguments(pool, facts, settings),
        *describe_tiers(pool, shape, q.hardware, memory, places),
        *expected_ttft(pool.workload, shape, gpu, layout),
        *tpot,
        *pod_choices,
    ]
    return Plan(
        verdict=PlanVerdict.UNVERIFIED if doubts else PlanVerdict.FITS,
        shortfall_bytes=0,
        nearest="",
        hardware=q.hardware,
        layout=layout,
        settings=settings,
        memory=memory,
        model=shape.describe(),
        argv=tuple(args.to_argv()),
        env=environment(pool, facts),
        pod=pod,
        choices=_last_per_field(all_choices),
        doubts=tuple(doubts),
        notes=(*((kv.note,) if kv.note else ()), *slow),
        warnings=tuple(warned),
        kv_events=publishes_kv_events(pool, settings),
        tiers=places,
        storage=storage,
        role=str(pool.role or ""),
    )


def _last_per_field(choices: list[Choice]) -> tuple[Choice, ...]:
    """Return the last choice of each field, at the place of the first."""
    return tuple({choice.field: choice for choice in choices}.values())


def _refused(
    pool: Pool, chosen: HardwareSizing, kinds: int, choices: list[Choice], doubts: list[str]
) -> Plan:
    q = chosen.q
    floor, row = q.required.floor, q.hardware.accelerator
    layout, shortfall = lacking(chosen)
    settings = replace(tightest(q), max_len=floor)
    memory = q.memory(layout, settings)
    nearest = _nearest(q)
    gpus = f"{layout.gpus} × {row.name}" + (f", the best of {kinds} kinds of nodes" if kinds > 1 else "")
    reason = f"{floor} tokens of context lack {shortfall / GIB:.1f} GiB on each of {gpus}; {nearest}"
    pod, _ = pod_resources(pool, q.hardware, layout, memory, checkpoint_size(q.facts, settings.draft))
    return Plan(
        verdict=PlanVerdict.REFUSED,
        shortfall_bytes=shortfall,
        nearest=nearest,
        hardware=q.hardware,
        layout=layout,
        settings=settings,
        memory=memory,
        model=q.facts.shape.describe(),
        argv=(),
        env={},
        pod=pod,
        choices=_last_per_field([*choices, Choice("verdict", "refused", reason, RULE)]),
        doubts=tuple(doubts),
    )


def _nearest(q: SizingInput) -> str:
    """Return the nearest configuration that fits: quantized, without the user's limits, or on other GPUs."""
    if not q.facts.shape.quantization.method and not q.settings.online_fp8 and q.hardware.accelerator.fp8:
        found, _ = size(replace(q, settings=replace(q.settings, online_fp8=True)))
        if found:
            return f"spec.engine.quantization: FP8 on {_describe_size(found, q.hardware)} would fit"
    engine = replace(q.engine, tensor=None, pipeline=None)
    if q.hardware.count or q.engine.tensor or q.engine.pipeline:
        found, _ = size(replace(q, engine=engine, hardware=replace(q.hardware, count=None)))
        if found:
            on = _describe_size(found, q.hardware)
            return f"{on} would fit: leave count and parallel sizes to the plan"
    # the fewest nodes, and of those the least memory in total
    options = []
    for row in ROWS:
        offered = row.name in OFFERED and row.name != q.hardware.accelerator.name
        if offered and not too_old(q.facts.shape, row):
            hardware = Hardware(accelerator=row, per_node=row.per_node)
            found, _ = size(replace(q, engine=engine, hardware=hardware))
            if found:
                memory = found.layout.gpus * row.memory_gib
                options.append((hardware.nodes(found.layout), memory, _describe_size(found, hardware)))
    return f"{min(options)[-1]} would fit" if options else "no known accelerator would be enough"


def _describe_size(found: SizedLayout, hardware: Hardware) -> str:
    nodes = hardware.nodes(found.layout)
    over = f" on {nodes} nodes" if nodes > 1 else ""
    return f"{found.layout.gpus} × {hardware.accelerator.name}{over}"
