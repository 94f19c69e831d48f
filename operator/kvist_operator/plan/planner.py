"""All of the plan, in order: hardware, wish, KV dtype, first settings, size, arguments. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvist_operator.engine_flags import (
    AFFECTS_MEMORY,
    LATEST,
    VERSIONS,
    Version,
    flag_names,
    image_version,
    parse_version,
)
from kvist_operator.errors import SpecError
from kvist_operator.hardware import NodeFacts
from kvist_operator.memory.layout import GIB, Draft, EngineSettings, Layout
from kvist_operator.models.shape import Facts, checkpoint_bytes, parameters
from kvist_operator.spec.pool import Pool

from . import engine_args, layouts, pod, rejection
from .accelerator import choose_hardware
from .fallbacks import first_run
from .kv import KvChoice, choose_kv
from .plan import Choice, Hardware, Plan, PlanVerdict
from .requirements import wish
from .size import Question, Sized, size
from .targets import first_token

LEAST_BITS: Final = 1.5
"""Of a weight, however it is quantised."""


def make_plan(
    pool: Pool, facts: Facts, *, nodes: Sequence[NodeFacts] = (), gpu: str = "", draft: Facts | None = None
) -> Plan:
    """Return the plan of a pool.

    Raises:
        SpecError: a field that cannot be what it is.
        HardwareError: nothing says which accelerator.
    """
    shape = facts.model.shape
    version, versioned = engine_version(pool)
    hardware, seated = choose_hardware(pool.accelerator, nodes=nodes, wanted=gpu)
    wanted = wish(pool, shape)
    kv = choose_kv(pool.engine, shape, hardware.accelerator, version or LATEST)
    proposer = engine_args.draft_of(pool.engine.speculative, shape.mtp_layers, draft)
    base = _base(pool, hardware, kv, proposer)
    settings, first = first_run(pool, shape, hardware.accelerator, wanted, base)
    _check(pool, facts, hardware)
    question = Question(
        model=facts.model, hardware=hardware, engine=pool.engine, wish=wanted, settings=settings
    )
    choices = [_model_choice(facts), *versioned, *seated, *wanted.choices, *kv.choices, *first]
    doubts = find_doubts(pool, facts, hardware, version)
    sized, possible = size(question)
    if sized is None and not possible:
        raise layouts.impossible(pool.engine, facts.model.shape, hardware)
    if sized is None:
        return _refused(pool, question, possible, choices, doubts)
    return _fitting(pool, facts, question, sized, kv, choices, doubts, version or LATEST)


def engine_version(pool: Pool) -> tuple[Version | None, list[Choice]]:
    """From ``spec.engine.version``, else the image's tag; None when neither tells."""
    given = parse_version(pool.engine.version) if pool.engine.version else None
    found = given or image_version(pool.engine.image)
    source = "spec.engine.version" if given else "tag of spec.engine.image"
    shown = ".".join(map(str, found)) if found else "unknown"
    return found, [Choice("engineVersion", shown, f"image {pool.engine.image}", source)]


def _base(pool: Pool, hardware: Hardware, kv: KvChoice, draft: Draft | None) -> EngineSettings:
    extra = {name for _, name in flag_names(pool.engine.extra_args)}
    return EngineSettings(
        kv_dtype=kv.dtype,
        block=kv.block,
        prefix_caching=pool.engine.prefix_caching,
        eager="enforce-eager" in extra or hardware.accelerator.vendor == "cpu",
        images=pool.workload.images != 0,
        online_fp8=pool.engine.quantization == "FP8",
        adapters=len(pool.model.adapters),
        adapter_rank=max((a.rank for a in pool.model.adapters), default=16),
        draft=draft,
    )


def _check(pool: Pool, facts: Facts, hardware: Hardware) -> None:
    """Raise an error for settings with which vLLM would not start."""
    scheme = facts.model.shape.quantization
    if pool.engine.quantization and scheme.method:
        raise SpecError("spec.engine.quantization", f"the checkpoint is {scheme.label} already: leave it out")
    if pool.engine.quantization and not hardware.accelerator.fp8:
        raise SpecError(
            "spec.engine.quantization", f"{hardware.accelerator.name} does not compute in FP8: leave it out"
        )
    _check_size(pool, facts)
    if pool.offload.cpu_bytes and hardware.accelerator.vendor not in ("nvidia", "amd"):
        raise SpecError(
            "spec.offload.cpu", f"{hardware.accelerator.name} engines cannot offload: leave it out"
        )


def _check_size(pool: Pool, facts: Facts) -> None:
    """A size without its unit would make any model fit."""
    given, weights = facts.model.checkpoint_bytes, parameters(facts.model.shape)
    if pool.model.shape and given and given < weights * LEAST_BITS / 8:
        raise SpecError(
            "spec.model.shape.checkpointSize",
            f"{given} bytes are too few for the {weights / 1e9:.1f} billion weights of its config: write it "
            f"like {math.ceil(weights * 2 / GIB)}Gi, or leave it out",
        )


def _model_choice(facts: Facts) -> Choice:
    shape, known = facts.model.shape, facts.model.checkpoint_bytes
    size_gib = (known or checkpoint_bytes(shape)) / GIB
    counted = f"{parameters(shape) / 1e9:.1f} billion weights; files of {size_gib:.1f} GiB"
    return Choice("model", shape.describe(), f"{counted}: {facts.checkpoint_source}", facts.source)


def find_doubts(pool: Pool, facts: Facts, hardware: Hardware, version: Version | None) -> list[str]:
    """Why the plan cannot be vouched for; empty when it can."""
    shape, row = facts.model.shape, hardware.accelerator
    found = [*shape.notes]
    if not row.verified:
        found.append(f"vLLM's memory on {row.name} is not modelled; figures are estimates ({row.source})")
    if not shape.quantization.exact and not facts.model.checkpoint_bytes:
        found.append(
            f"the size of {shape.quantization.label} weights is a guess: set spec.model.shape.checkpointSize"
        )
    if shape.quantization.label == "NVFP4" and row.vendor != "nvidia":
        found.append(f"vLLM is not known to have kernels for NVFP4 weights on {row.name}")
    found += _version_doubts(version)
    touched = [name for _, name in flag_names(pool.engine.extra_args) if name in AFFECTS_MEMORY]
    found += [f"--{name} in spec.engine.extraArgs changes what was counted" for name in touched]
    return found


def _version_doubts(version: Version | None) -> list[str]:
    spans = f"{_dotted(VERSIONS[0])} to {_dotted(VERSIONS[-1])}"
    if version is None:
        return [f"the image does not tell vLLM's version: set spec.engine.version; flags are for {spans}"]
    if version not in VERSIONS:
        return [f"vLLM {_dotted(version)} is not among {spans}, whose flags and arithmetic are known"]
    return []


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _fitting(
    pool: Pool,
    facts: Facts,
    q: Question,
    sized: Sized,
    kv: KvChoice,
    choices: list[Choice],
    doubts: list[str],
    version: Version,
) -> Plan:
    settings = _settled(q, sized)
    memory = q.at(sized.layout, settings)
    needs, needed = pod.pod_needs(pool, q.hardware, sized.layout, memory)
    args = engine_args.arguments(pool, facts, q.hardware, sized.layout, settings, kv, q.wish)
    all_choices = _latest(
        [
            *choices,
            *layouts.describe(sized.layout, facts.model.shape, q.hardware, sized.reason),
            *sized.choices,
            *engine_args.describe(pool, facts, settings),
            *first_token(pool.workload, facts.model.shape, q.hardware.accelerator, sized.layout),
            *needed,
        ]
    )
    return Plan(
        verdict=PlanVerdict.UNVERIFIED if doubts else PlanVerdict.FITS,
        shortfall_bytes=0,
        nearest="",
        hardware=q.hardware,
        layout=sized.layout,
        settings=settings,
        memory=memory,
        model=facts.model.shape.describe(),
        argv=tuple(args.to_argv(version)),
        env=engine_args.environment(pool),
        needs=needs,
        choices=tuple(all_choices),
        doubts=tuple(doubts),
    )


def _settled(q: Question, sized: Sized) -> EngineSettings:
    """On a CPU the cache is given to vLLM as a number, in whole MiB: nothing is profiled."""
    if q.hardware.accelerator.vendor != "cpu":
        return sized.settings
    return replace(sized.settings, kv_bytes=int(sized.memory.kv) >> 20 << 20)


def _latest(choices: list[Choice]) -> list[Choice]:
    """One choice per field, the last word, at the place of the first."""
    last = {choice.field: choice for choice in choices}
    return [last[field] for field in dict.fromkeys(choice.field for choice in choices)]


def _refused(
    pool: Pool, q: Question, possible: list[Layout], choices: list[Choice], doubts: list[str]
) -> Plan:
    layout, settings, memory = rejection.closest(q, possible)
    lacking = rejection.shortfall(memory, q.wish.floor)
    hint = rejection.nearest(q)
    said = Choice("verdict", "refused", rejection.sentence(q, layout, lacking, hint), "rule of size")
    needs, _ = pod.pod_needs(pool, q.hardware, layout, memory)
    return Plan(
        verdict=PlanVerdict.REFUSED,
        shortfall_bytes=lacking,
        nearest=hint,
        hardware=q.hardware,
        layout=layout,
        settings=settings,
        memory=memory,
        model=q.model.shape.describe(),
        argv=(),
        env={},
        needs=needs,
        choices=tuple(_latest([*choices, said])),
        doubts=tuple(doubts),
    )
