"""Plans for pooling models: embedding, rerank and classification. Pure.

Such a model computes each prompt once and keeps nothing for a next token. What counts is the batch of one
step, so that a plan promises tokens and prompts of a step, not tokens of a KV cache. Encoders have no KV
cache at all, and a step computes their prompts whole: it has at least as many tokens as the longest prompt.
Decoders cache a prompt only while it is computed; the plan reserves that for a full step and for the longest
prompt.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvist_operator.engine_flags import MERGED
from kvist_operator.errors import ModelError, SpecError
from kvist_operator.extra_args import ExtraFlag
from kvist_operator.hardware import Accelerator
from kvist_operator.memory.layout import EngineSettings
from kvist_operator.models.pooling import FIELD, RENAMED, Pooling, as_requested
from kvist_operator.models.shape import Facts, ModelShape
from kvist_operator.spec.pool import KvDtype, Pool, Task

from .plan import Choice
from .requirements import RULE, Requirements, extend_context
from .size import DEFAULT_SHARE, default_batch, default_sequences

FLOOR: Final = 2048
"""Shortest length of prompts to which a plan reduces it to make a model fit."""
RERANKERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen3ForCausalLM": {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
}
"""Architecture of rerankers that score by the words of their answer → what vLLM's example
``examples/pooling/score/qwen3_reranker_offline.py`` overrides."""
PATHS: Final[Mapping[Task, str]] = {
    Task.EMBED: "/v1/embeddings, /v2/embed and /pooling; /v1/score and /v1/rerank by similarity",
    Task.SCORE: "/v1/rerank, /v1/score and /classify",
    Task.CLASSIFY: "/classify and /pooling",
}
"""Paths that vLLM serves for a task (``entrypoints/pooling``)."""
CHAT_FLAGS: Final = ("tool-call-parser", "reasoning-parser", "enable-auto-tool-choice")
DOCUMENTED: Final = "vLLM: config/model.py"


def pooling_of(pool: Pool, facts: Facts, extra: Sequence[ExtraFlag]) -> Pooling | None:
    """Return how the pooling runner serves the model; None if it generates text.

    Raises:
        SpecError: the model cannot do what ``spec.model.task`` says, or has no use for another field.
    """
    shape = facts.shape
    task, found = pool.model.task or facts.task, shape.pooling
    if task is not None:
        try:
            found = as_requested(found, task, architecture=shape.architecture, causal=shape.causal)
            if found and not pool.model.task:
                found = replace(found, source=facts.source)
        except ModelError as error:
            raise SpecError(FIELD, str(error)) from error
    if found is None:
        return None
    _check_head(found, shape, extra)
    _check_fields(pool, found)
    _check_lengths(pool, shape, found)
    return found


def _check_head(pooling: Pooling, shape: ModelShape, extra: Sequence[ExtraFlag]) -> None:
    """Raise SpecError for a decoder of text without the head for scores or classes."""
    generates = shape.pooling is None or shape.pooling.task is Task.EMBED
    wanted = pooling.task is Task.CLASSIFY or (pooling.task is Task.SCORE and shape.pooling is None)
    overridden = any(each.name == MERGED for each in extra)
    known = pooling.task is Task.SCORE and shape.architecture in RERANKERS
    if generates and wanted and not overridden and not known:
        name = shape.architecture or "this model"
        raise SpecError(
            FIELD,
            f"{pooling.task}: {name} has no head for it: set Embed, or give the head by --{MERGED} in "
            "spec.engine.extraArgs (architectures, classifier_from_token)",
        )


def _check_fields(pool: Pool, pooling: Pooling) -> None:
    """Raise SpecError for fields with which vLLM would not start, or that need a KV cache."""
    engine, kind = pool.engine, f"a model for {pooling.task}"
    cacheless = "" if pooling.causal else "every token attends to all others, so there is no KV cache"
    cached = engine.kv_dtype not in (KvDtype.AUTO, KvDtype.MODEL)
    for field, given, why in (
        ("spec.engine.speculative", engine.speculative, f"{kind} writes no tokens"),
        ("spec.engine.decodeContextParallelSize", (engine.context or 1) > 1, f"{kind} has no decode steps"),
        ("spec.engine.kvCacheDtype", cached and cacheless, cacheless),
        ("spec.offload.cpu", pool.offload.cpu_bytes and cacheless, cacheless),
        ("spec.offload.lmcache", pool.offload.lmcache and cacheless, cacheless),
    ):
        if given:
            raise SpecError(field, f"{why}: leave it out")


def _check_lengths(pool: Pool, shape: ModelShape, pooling: Pooling) -> None:
    """Raise SpecError for a length beyond the model's, and for steps shorter than a prompt."""
    engine, prompt = pool.engine, pool.workload.prompt_tokens or 0
    given, longest, step = engine.max_model_len, shape.max_len, engine.max_num_batched_tokens
    limited = shape.length_known and longest < shape.positions
    fixed = not pooling.causal or limited
    if fixed and prompt > longest:
        problem = f"{prompt} is more than the model's {longest}, which cannot be extended: lower it"
        raise SpecError("spec.workload.promptTokens", problem)
    if given and given > longest and fixed:
        raise SpecError(
            "spec.engine.maxModelLen", f"{given} is beyond the model's {longest}: set at most that"
        )
    context = given or longest
    if step and pooling.whole_prompts and step < context:
        raise SpecError(
            "spec.engine.maxNumBatchedTokens",
            f"{step} is less than a prompt of {context} tokens, and vLLM computes prompts of this model "
            f"whole: raise it, or set spec.engine.maxModelLen to {step} or less",
        )


def pooling_requirements(
    pool: Pool, shape: ModelShape, pooling: Pooling, gpu: Accelerator, extra: Sequence[ExtraFlag]
) -> Requirements:
    """Return the longest prompt, and as many of them as fill a step."""
    given = pool.engine.max_model_len
    context = given or shape.max_len
    if given:
        source, reason = "spec.engine.maxModelLen", f"as requested; the model's own length is {shape.max_len}"
    else:
        source, reason = "config.json: max_position_embeddings", "the longest prompt of the model"
    choices = [Choice("maxModelLen", context, reason, source)]
    overrides: dict[str, Any] = {}
    if context > shape.max_len:
        extended, choice = extend_context(context, shape)
        overrides |= extended
        choices.append(choice)
    if not any(each.name == MERGED for each in extra):
        overrides |= _named_for_vllm(pooling, shape)
    step = pool.engine.max_num_batched_tokens or default_batch(gpu)
    return Requirements(
        context=context,
        floor=context if given else min(FLOOR, context),
        concurrency=1 if pooling.whole_prompts else max(1, math.ceil(step / context)),
        typical=context,
        overrides=overrides or None,
        choices=tuple(choices),
    )


def _named_for_vllm(pooling: Pooling, shape: ModelShape) -> Mapping[str, Any]:
    """Return the overrides of config.json without which vLLM takes the model for another kind."""
    if pooling.task is Task.SCORE and shape.architecture in RERANKERS:
        return RERANKERS[shape.architecture]
    if shape.architecture in RENAMED:
        return {"architectures": [RENAMED[shape.architecture]]}
    return {}


def pooling_settings(
    pool: Pool, gpu: Accelerator, required: Requirements, base: EngineSettings, shape: ModelShape
) -> tuple[EngineSettings, list[Choice]]:
    """Return the settings to try first: vLLM's defaults unless the user differs."""
    engine, pooling = pool.engine, base.pooling
    assert pooling is not None
    share = engine.memory_percent or DEFAULT_SHARE
    tokens, source = engine.max_num_batched_tokens, "spec.engine.maxNumBatchedTokens"
    reason = "as requested"
    if not tokens:
        tokens, source = default_batch(gpu), "vLLM: engine/arg_utils.py"
        reason = "tokens of a step: vLLM's default for this GPU memory"
        longest = required.context if shape.length_known or engine.max_model_len else shape.positions
        if pooling.whole_prompts and tokens < longest:
            tokens, source = longest, DOCUMENTED
            reason = "tokens of a step: the longest prompt, because vLLM computes prompts of this model whole"
    sequences = engine.max_num_seqs or min(default_sequences(gpu), tokens)
    settings = replace(
        base,
        share=share,
        batched_tokens=max(tokens, sequences),
        sequences=sequences,
        max_len=required.context,
        prefix_caching=base.prefix_caching and pooling.caches_prefixes,
    )
    asked = "spec.engine.gpuMemoryUtilizationPercent" if engine.memory_percent else "vLLM: config/cache.py"
    why = "as requested" if engine.memory_percent else "vLLM's default; vLLM starts only if as much is free"
    prompts = (
        "as requested" if engine.max_num_seqs else "prompts of a step: vLLM's default for this GPU memory"
    )
    counted = "spec.engine.maxNumSeqs" if engine.max_num_seqs else "vLLM: engine/arg_utils.py"
    return settings, [
        Choice("gpuMemoryUtilizationPercent", share, why, asked),
        Choice("maxNumBatchedTokens", settings.batched_tokens, reason, source),
        Choice("maxNumSeqs", sequences, prompts, counted),
    ]


def describe_pooling(pool: Pool, pooling: Pooling, overrides: Mapping[str, Any] | None) -> list[Choice]:
    """Return the choices that only plans for pooling models have."""
    headed = pooling.labels or pooling.architecture in RERANKERS or pooling.task is not Task.SCORE
    paths = PATHS[pooling.task if headed else Task.EMBED]
    found = [Choice("task", str(pooling.task), f"served at {paths}", pooling.source)]
    found.append(Choice("runner", "pooling", "one result for each prompt, no tokens are written", RULE))
    if overrides and "architectures" in overrides:
        reason = "config.json names the model that it was made from, or a name that vLLM does not know"
        found.append(Choice("hfOverrides", dict(overrides), reason, "vLLM: pooling models"))
    if not pooling.causal:
        value: bool | str = False
        reason = "each token attends to all others, so vLLM has no KV cache for it and computes prompts whole"
    elif pooling.whole_prompts:
        value, reason = (
            False,
            f"{pooling.method} pooling takes all tokens of a prompt, so vLLM computes it whole",
        )
    elif not pool.engine.prefix_caching:
        value, reason = False, "as requested"
    else:
        value = "vLLM's default"
        reason = f"{pooling.method} pooling of a decoder: prefixes that an engine happens to hold are reused"
    found.append(Choice("prefixCaching", value, reason, DOCUMENTED))
    if pool.picker.mode != "Off":
        reason = "the picker routes by load: prompts share little, and none is continued"
        found.append(Choice("kvEvents", "off", reason, RULE))
    return found


def pooling_doubts(
    pool: Pool, shape: ModelShape, pooling: Pooling, extra: Sequence[ExtraFlag]
) -> Iterator[str]:
    """Yield why a plan for a pooling model is unverified."""
    if shape.architecture in RENAMED and not any(each.name == "trust-remote-code" for each in extra):
        yield (
            f"vLLM reads {shape.architecture} by code of the repository: add --trust-remote-code to "
            "spec.engine.extraArgs once you have read that code"
        )
    if pool.model.adapters and not pooling.causal:
        yield f"spec.model.adapters: whether vLLM loads adapters for {shape.architecture} is not known"
    known = pooling.task is Task.SCORE and shape.architecture in RERANKERS
    if shape.pooling is None and not known:
        yield (
            f"spec.model.task is {pooling.task}, and the files that were read do not say so: vLLM makes its "
            "results of the last token's hidden state"
        )


def pooling_warnings(pool: Pool, pooling: Pooling, extra: Sequence[ExtraFlag]) -> Iterator[str]:
    """Yield fields without effect on a pooling model, in a sentence each."""
    workload, why = pool.workload, f"a model for {pooling.task} writes no tokens; leave it out"
    for field, given in (
        ("spec.workload.outputTokens", workload.output_tokens),
        ("spec.workload.tpotMilliseconds", workload.tpot_ms),
    ):
        if given:
            yield f"{field} has no effect: {why}"
    yield from (
        f"spec.engine.extraArgs: --{each.name} has no effect: {why}"
        for each in extra
        if each.name in CHAT_FLAGS
    )
    by_load = "the picker routes requests of such models by load; leave it out"
    if workload.shared_prefix_tokens:
        yield f"spec.workload.sharedPrefixTokens has no effect: {by_load}"
    if pool.picker.mode == "Approximate":
        yield f"spec.picker.mode has no effect: {by_load}"
    if pool.picker.tokenizer:
        yield f"spec.picker.tokenizer has no effect: {by_load}"
    if pool.offload.needs_connector:
        yield (
            "spec.offload is of little use: prompts of such models are not continued, so that blocks are "
            "seldom read again; leave it out"
        )
