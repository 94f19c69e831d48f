"""What is wanted: how long a context, how many at once, how much per step. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.errors import SpecError
from kvist_operator.models.shape import ModelShape
from kvist_operator.spec.pool import Pool

from .plan import Choice

CONTEXT: Final = 32_768
CONCURRENCY: Final = 8
FLOOR: Final = 8192
"""The context never falls below this to make a model fit."""
STEP: Final = 1024
YARN_LIMIT: Final = 8
"""Largest factor by which YaRN is known to stretch a context usefully."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Context and sequences that a plan tries to have memory for."""

    context: int
    floor: int
    """The shortest context that will do; equal to ``context`` when the user fixed it."""
    concurrency: int
    typical: int
    """Tokens one of those requests has; the whole context unless the workload says."""
    overrides: Mapping[str, Any] | None
    """``--hf-overrides`` for a context beyond the native one."""
    choices: tuple[Choice, ...]


def wish(pool: Pool, shape: ModelShape) -> Wish:
    """From the spec and the native length. Raises SpecError for a length RoPE cannot be stretched to."""
    context, why = _context(pool, shape)
    fixed = pool.engine.max_model_len is not None
    concurrency = pool.workload.concurrency or CONCURRENCY
    typical = min(context, pool.workload.typical_tokens or context)
    overrides = _overrides(context, shape) if context > shape.max_len else None
    return Wish(
        context=context,
        floor=context if fixed else min(FLOOR, context),
        concurrency=concurrency,
        typical=typical,
        overrides=overrides,
        choices=(why, _at_once(pool, concurrency, typical, context), *_stretched(overrides, shape)),
    )


def _context(pool: Pool, shape: ModelShape) -> tuple[int, Choice]:
    field, native = "maxModelLen", shape.max_len
    if pool.engine.max_model_len is not None:
        chosen = pool.engine.max_model_len
        return chosen, Choice(
            field, chosen, f"as asked; the model was made for {native}", "spec.engine.maxModelLen"
        )
    hinted = pool.workload.typical_tokens or 0
    wanted = max(CONTEXT, math.ceil(hinted / STEP) * STEP)
    chosen = min(native, wanted)
    if hinted > native:
        raise SpecError(
            "spec.workload",
            f"promptTokens and outputTokens make {hinted}, more than the model's {native}: set "
            "spec.engine.maxModelLen to stretch its context",
        )
    if chosen == native:
        return chosen, Choice(
            field, chosen, "the model's native length", "config.json: max_position_embeddings"
        )
    why = (
        "prompt and output of the workload" if wanted > CONTEXT else f"default; the model could take {native}"
    )
    return chosen, Choice(field, chosen, why, "spec.workload" if wanted > CONTEXT else "rule of size")


def _at_once(pool: Pool, concurrency: int, typical: int, context: int) -> Choice:
    hinted = pool.workload.concurrency is not None
    each = f"{typical} tokens each" if typical < context else f"the full context of {context} tokens each"
    source = "spec.workload.concurrency" if hinted else "rule of size"
    return Choice("concurrency", concurrency, f"room is sought for so many requests of {each}", source)


def _overrides(context: int, shape: ModelShape) -> Mapping[str, Any]:
    """YaRN by ``--hf-overrides``; the length is raised too, because the factor alone does not do it."""
    rope = dict(shape.rope)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    factor = math.ceil(context / shape.max_len * 100) / 100
    if kind not in ("default", "yarn") or "mrope_section" in rope or shape.latent or factor > YARN_LIMIT:
        raise SpecError("spec.engine.maxModelLen", _refusal(context, kind, factor, shape))
    original = int(rope.get("original_max_position_embeddings") or shape.max_len)
    parameters = {
        **({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}),
        "rope_type": "yarn",
        "factor": round(context / original, 2),
        "original_max_position_embeddings": original,
    }
    return {"rope_parameters": parameters, "max_position_embeddings": context}


def _refusal(context: int, kind: str, factor: float, shape: ModelShape) -> str:
    head = f"{context} is beyond the model's {shape.max_len} tokens"
    if factor > YARN_LIMIT:
        return f"{head} by a factor of {factor:g}; YaRN is of use up to {YARN_LIMIT}: ask for less"
    return (
        f"{head}, and its RoPE ({kind}) cannot be stretched by a plan: set at most {shape.max_len}, or give "
        "spec.model.shape.config with the rope_parameters and max_position_embeddings for this length"
    )


def _stretched(overrides: Mapping[str, Any] | None, shape: ModelShape) -> list[Choice]:
    if overrides is None:
        return []
    factor = overrides["rope_parameters"]["factor"]
    reason = f"YaRN by {factor:g}, since {shape.max_len} is native; short prompts may lose a little quality"
    return [Choice("hfOverrides", overrides, reason, "spec.engine.maxModelLen")]
