"""Kinds of engines in virtual time, and the counters of one."""

from dataclasses import dataclass
from typing import Final

from kvist_sim.engine.timing import KV_CACHE_TOKENS, Timing
from kvist_sim.virtual.jobs import BLOCK

H100: Final = Timing()


@dataclass(frozen=True, slots=True)
class Hardware:
    """Kind of engine: the vLLM flags of ``kvist_sim.engine.args`` that matter in virtual time."""

    timing: Timing = H100
    blocks: int = KV_CACHE_TOKENS // BLOCK
    block_size: int = BLOCK
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192

    def scaled(self, speed: float, memory: float) -> "Hardware":
        """Return a GPU that is ``speed`` times as fast, with ``memory`` times the cache."""
        return Hardware(
            self.timing.scaled(speed),
            round(self.blocks * memory),
            self.block_size,
            self.max_num_seqs,
            self.max_num_batched_tokens,
        )


@dataclass(slots=True)
class Totals:
    """Counters since the start, as ``/metrics`` has them."""

    queries: int = 0
    hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated: int = 0
    prefills: int = 0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    token_times: int = 0
    token_seconds: float = 0.0
    received_tokens: int = 0
    transfer_seconds: float = 0.0
