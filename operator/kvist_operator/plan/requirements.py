"""Requirements of a pool: context length, concurrency and latency targets. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.errors import SpecError
from kvist_operator.models.shape import ModelShape
from kvist_operator.spec.pool import Pool

from .plan import Choice

DEFAULT_CONTEXT: Final = 32_768
DEFAULT_CONCURRENCY: Final = 8
MIN_CONTEXT: Final = 8192
"""Shortest context to which a plan reduces it to make a model fit."""
STEP: Final = 1024
YARN_LIMIT: Final = 8
"""Largest factor by which YaRN is known to extend a context usefully."""
RULE: Final = "sizing rule"
"""Source of a choice that the plan makes by its own rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Context and sequences for which a plan reserves memory."""

    context: int
    floor: int
    """Shortest acceptable context; equal to ``context`` if the user fixed it."""
    concurrency: int
    typical: int
    """Tokens of one of those requests; the whole context unless the workload has hints."""
    overrides: Mapping[str, Any] | None
    """Value of ``--hf-overrides`` for a context beyond the native one."""
    choices: tuple[Choice, ...]


def read_requirements(pool: Pool, shape: ModelShape) -> Requirements:
    """Return the requirements of a spec. Raises SpecError for a context that the model cannot have."""
    context, choice = _context(pool, shape)
    concurrency = pool.workload.concurrency or DEFAULT_CONCURRENCY
    typical = min(context, pool.workload.typical_tokens or context)
    each = f"{typical} tokens each" if typical < context else f"the full context of {context} tokens each"
    source = "spec.workload.concurrency" if pool.workload.concurrency else RULE
    reason = f"the KV cache should hold this many requests, {each}"
    choices = [choice, Choice("concurrency", concurrency, reason, source)]
    overrides = None
    if context > shape.max_len:
        overrides, extended = extend_context(context, shape)
        choices.append(extended)
    return Requirements(
        context=context,
        floor=context if pool.engine.max_model_len is not None else min(MIN_CONTEXT, context),
        concurrency=concurrency,
        typical=typical,
        overrides=overrides,
        choices=tuple(choices),
    )


def extend_context(context: int, shape: ModelShape) -> tuple[Mapping[str, Any], Choice]:
    """Return the overrides of config.json for a context beyond the native one, and their reason.

    Raises:
        SpecError: the model's context cannot be extended so far.
    """
    overrides = _yarn(context, shape)
    factor = overrides["rope_parameters"]["factor"]
    reason = (
        f"YaRN by a factor of {factor:g}, because the native length is {shape.max_len}; answers to short "
        "prompts may be slightly worse"
    )
    return overrides, Choice("hfOverrides", overrides, reason, "spec.engine.maxModelLen")


def _context(pool: Pool, shape: ModelShape) -> tuple[int, Choice]:
    field, native, given = "maxModelLen", shape.max_len, pool.engine.max_model_len
    if given is not None:
        reason = f"as requested; the model's native length is {native}"
        return given, Choice(field, given, reason, "spec.engine.maxModelLen")
    hinted = pool.workload.typical_tokens or 0
    if hinted > native:
        raise SpecError(
            "spec.workload",
            f"promptTokens and outputTokens add up to {hinted}, more than the model's {native}: set "
            "spec.engine.maxModelLen to extend its context",
        )
    wanted = max(DEFAULT_CONTEXT, math.ceil(hinted / STEP) * STEP)
    if wanted >= native:
        source = "config.json: max_position_embeddings"
        return native, Choice(field, native, "the model's native length", source)
    if wanted > DEFAULT_CONTEXT:
        return wanted, Choice(field, wanted, "prompt and output of the workload", "spec.workload")
    return wanted, Choice(field, wanted, f"default; the model allows {native}", RULE)


def _yarn(context: int, shape: ModelShape) -> Mapping[str, Any]:
    """Return ``--hf-overrides`` for YaRN, the length included, because the factor alone does not raise it."""
    rope = dict(shape.rope)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    factor = math.ceil(context / shape.max_len * 100) / 100
    problem = f"{context} is beyond the model's {shape.max_len} tokens"
    if factor > YARN_LIMIT:
        problem += f" by a factor of {factor:g}; YaRN is useful up to {YARN_LIMIT}: set a smaller value"
        raise SpecError("spec.engine.maxModelLen", problem)
    if kind not in ("default", "yarn") or "mrope_section" in rope or shape.latent:
        problem += (
            f", and a plan cannot extend its RoPE ({kind}): set at most {shape.max_len}, or set "
            "spec.model.shape.config with the rope_parameters and max_position_embeddings for this length"
        )
        raise SpecError("spec.engine.maxModelLen", problem)
    original = int(rope.get("original_max_position_embeddings") or shape.max_len)
    parameters = {
        **({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}),
        "rope_type": "yarn",
        "factor": round(context / original, 2),
        "original_max_position_embeddings": original,
    }
    return {"rope_parameters": parameters, "max_position_embeddings": context}
