"""Makes a plan: hardware, requirements, KV dtype, first settings, size and arguments, or a refusal. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from kvist_operator.engine_version import EngineVersion, engine_version
from kvist_operator.extra_args import ExtraFlag, read_extra
from kvist_operator.hardware import ROWS, NodeFacts
from kvist_operator.memory.layout import GIB, Draft, EngineSettings, Layout
from kvist_operator.models.shape import Facts, checkpoint_bytes, parameters
from kvist_operator.spec.pool import Pool

from .checks import check, unverified, warnings
from .engine_args import adapter_numbers, arguments, describe_arguments, environment, read_draft
from .kv import KvChoice, choose_kv
from .layouts import describe_layout, impossible
from .plan import Choice, Hardware, Plan, PlanVerdict
from .requirements import RULE, expected_ttft, read_requirements
from .resources import choose_hardware, pod_resources
from .shared_cache import share_cache
from .size import SizedLayout, SizingInput, first_settings, size, tighter_settings


def make_plan(
    pool: Pool, facts: Facts, *, nodes: Sequence[NodeFacts] = (), gpu: str = "", draft: Facts | None = None
) -> Plan:
    """Return the plan of a pool; ``gpu`` overrides the accelerator of the spec and of the nodes.

    Raises:
        SpecError: a field that has an invalid value.
        HardwareError: no source names the accelerator, or it is not known.
    """
    shape = facts.shape
    version = engine_version(pool.engine.image, pool.engine.version)
    extra = read_extra(pool.engine.extra_args, version)
    hardware, described = choose_hardware(pool.accelerator, nodes=nodes, gpu=gpu)
    required = read_requirements(pool, shape)
    kv = choose_kv(pool.engine, shape, hardware.accelerator, version.flags)
    proposer = read_draft(pool.engine.speculative, shape.mtp_layers, draft)
    base = _base_settings(pool, hardware, kv, proposer, extra, version)
    settings, first = first_settings(pool, shape, hardware.accelerator, required, base)
    check(pool, facts, hardware)
    q = SizingInput(facts=facts, hardware=hardware, engine=pool.engine, required=required, settings=settings)
    size_gib = (facts.checkpoint_bytes or checkpoint_bytes(shape)) / GIB
    counted = f"{parameters(shape) / 1e9:.1f} billion weights; files of {size_gib:.1f} GiB"
    model = Choice("model", shape.describe(), f"{counted}: {facts.checkpoint_source}", facts.source)
    engine = Choice("engineVersion", str(version), f"image {pool.engine.image}", version.source)
    choices = [model, engine, *described, *required.choices, *kv.choices, *first]
    doubts = unverified(pool, facts, hardware, version, extra)
    sized, layouts = size(q)
    if sized is None and not layouts:
        raise impossible(pool.engine, shape, hardware)
    if sized is None:
        return _refused(pool, q, layouts, choices, doubts)
    sized, spread = share_cache(q, sized)
    return _fitting(pool, facts, q, sized, kv, spread, choices, doubts, extra)


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
    facts: Facts,
    q: SizingInput,
    sized: SizedLayout,
    kv: KvChoice,
    spread: list[Choice],
    choices: list[Choice],
    doubts: list[str],
    extra: Sequence[ExtraFlag],
) -> Plan:
    settings, layout, shape = sized.settings, sized.layout, facts.shape
    if q.hardware.accelerator.vendor == "cpu":
        # vLLM does not profile a CPU: the cache has a fixed size, in whole MiB
        settings = replace(settings, kv_bytes=int(sized.memory.kv) >> 20 << 20)
    memory = q.memory(layout, settings)
    pod, pod_choices = pod_resources(pool, q.hardware, layout, memory)
    args = arguments(pool, facts, q.hardware, layout, settings, kv, q.required, extra)
    all_choices = [
        *choices,
        *describe_layout(layout, shape, q.hardware, sized.reason),
        *spread,
        *sized.choices,
        *describe_arguments(pool, facts, settings),
        *expected_ttft(pool.workload, shape, q.hardware.accelerator, layout),
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
        env=environment(pool),
        pod=pod,
        choices=_last_per_field(all_choices),
        doubts=tuple(doubts),
        notes=(kv.note,) if kv.note else (),
        warnings=tuple(warnings(pool, facts, q.hardware, layout, settings, memory)),
    )


def _last_per_field(choices: list[Choice]) -> tuple[Choice, ...]:
    """Return the last choice of each field, at the place of the first."""
    return tuple({choice.field: choice for choice in choices}.values())


def _refused(
    pool: Pool, q: SizingInput, layouts: list[Layout], choices: list[Choice], doubts: list[str]
) -> Plan:
    floor, row = q.required.floor, q.hardware.accelerator
    # the candidate that lacks least on its fullest GPU, with the tightest settings
    settings = [q.settings, *tighter_settings(q.engine, q.required, q.settings)][-1]
    settings = replace(settings, max_len=floor)
    candidates = [(layout, q.memory(layout, settings)) for layout in layouts]
    layout, memory = min(candidates, key=lambda pair: pair[1].missing(floor, 1))
    lacking = memory.missing(floor, 1)
    nearest = _nearest(q)
    gpus = f"{layout.gpus} × {row.name}"
    reason = f"{floor} tokens of context lack {lacking / GIB:.1f} GiB on each of {gpus}; {nearest}"
    pod, _ = pod_resources(pool, q.hardware, layout, memory)
    return Plan(
        verdict=PlanVerdict.REFUSED,
        shortfall_bytes=lacking,
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
        if row.verified and row.vendor in ("nvidia", "amd") and row != q.hardware.accelerator:
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
