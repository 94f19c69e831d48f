"""Durations of engine steps. Every constant of the simulated hardware is here."""

from dataclasses import dataclass, replace
from typing import Protocol


class Clock(Protocol):
    """Wall time or virtual time, the only source of time for the loop."""

    def now(self) -> float:
        """Return seconds since some fixed moment; never decreases."""

    async def sleep_until(self, when: float) -> None:
        """Return at `when` or a little later; always let other tasks run once."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Step times of Qwen3-32B on one H100 80 GB, bf16.

    llm-d publishes the prefill rate for this pair; the other figures follow from the sizes of weights and
    KV cache and from the memory's bandwidth (3.35 TB/s).
    """

    prefill_tokens_per_second: float = 15_928.0
    """Prompt tokens computed per second when nothing else limits."""
    step_seconds: float = 0.018
    """Least time of a step: one pass over the weights (64 GB at 3.35 TB/s)."""
    sequence_seconds: float = 0.0001
    """Seconds added per sequence that decodes in the step: reading its keys and values."""

    def step(self, prefill_tokens: int, decoding: int) -> float:
        """Seconds for one step. Prompt tokens ride on the same pass over the weights as the decoding
        sequences, so the longer of the two counts (a roofline), not their sum."""
        compute = (prefill_tokens + decoding) / self.prefill_tokens_per_second
        return max(self.step_seconds, compute) + self.sequence_seconds * decoding

    def scaled(self, factor: float) -> "Timing":
        """Return the same hardware, faster by ``factor`` in every respect."""
        return replace(
            self,
            prefill_tokens_per_second=self.prefill_tokens_per_second * factor,
            step_seconds=self.step_seconds / factor,
            sequence_seconds=self.sequence_seconds / factor,
        )


KV_BYTES_PER_TOKEN: int = 262_144
"""Qwen3-32B: 64 layers x 2 (keys, values) x 8 KV heads x 128 x 2 bytes; half with an 8-bit cache."""

KV_CACHE_TOKENS: int = 250_000
"""Cache of the default engine: about 61 GiB, as two H100 would leave. All measurements of policies use it."""
