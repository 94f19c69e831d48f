"""The number of sequences in a step, as high as the memory of a sized layout makes useful. Pure.

vLLM runs up to 1,024 sequences at once on GPUs of 70 GiB and more, and 256 on others. Each of them takes
memory from the KV cache (logits, penalties, CUDA graphs), used or not, and sequences without room in the
cache only wait. So layouts are sized with 256, and this rule doubles the number afterwards as long as

1. the KV cache holds as many requests of the workload, of 1,024 tokens where it does not say;
2. the cache loses less than 5 % of its tokens and still holds the whole wish;
3. the number stays within vLLM's default for the GPU and within the tokens of a step.

Example: the FP8 cache of Qwen3-8B on one H100 holds 777 requests of 1,024 tokens, so that 512 may run at
once; on an H200 it holds 1,549, so that 1,024 may.
"""

from dataclasses import replace
from typing import Final

from .plan import Choice
from .requirements import RULE
from .size import WORTH, SizedLayout, SizingInput, default_sequences

SHORT: Final = 1024
"""Tokens of prompt and answer that a short request of a chat has; an assumption."""


def with_sequences(
    q: SizingInput, sized: SizedLayout, tokens: int | None
) -> tuple[SizedLayout, list[Choice]]:
    """Return the layout with the sequences that its memory is enough for, and the choice with the reason.

    ``tokens`` is the length of a request of the workload; None if it is not known. A number that the user
    sets, or that was lowered to make room for the cache, stays.
    """
    first, length = sized.settings.sequences, tokens or SHORT
    most = default_sequences(q.hardware.accelerator)
    if q.engine.max_num_seqs or first < q.settings.sequences or not q.satisfied_by(sized.memory):
        return sized, []
    best, enough = sized, (1 - WORTH) * sized.memory.kv_tokens
    while 2 * best.settings.sequences <= min(most, best.settings.batched_tokens):
        settings = replace(best.settings, sequences=2 * best.settings.sequences)
        memory = q.memory(sized.layout, settings)
        if memory.concurrency(length) < settings.sequences * sized.layout.data:
            break
        if memory.kv_tokens < enough or not q.satisfied_by(memory):
            break
        best = replace(best, settings=settings, memory=memory)
    chosen = best.settings.sequences
    if best is sized and first >= most:
        return sized, []
    held, ranks = int(best.memory.concurrency(length) / sized.layout.data), sized.layout.data
    whose = "the KV cache of each rank" if ranks > 1 else "the KV cache"
    reason = f"{whose} holds {held:,} requests of {length:,} tokens; vLLM's default on this GPU is {most}"
    if held < chosen:
        reason = f"more than the {held:,} requests of {length:,} tokens that {whose} holds, for shorter ones"
    return best, [Choice("maxNumSeqs", chosen, reason, RULE)]
