"""vLLM's metrics of KV cache transfers with NIXL: how fast an engine receives blocks of others. No I/O.

Names are of vLLM 0.32 (``distributed/kv_transfer/kv_connector/v1/nixl/stats.py``): histograms of the seconds
and bytes of each transfer, of which the sums are read. The tokens are those of the source
``external_kv_transfer``. An engine that has none of them keeps the default rate.
"""

import re
from dataclasses import dataclass
from typing import Final

NAMES: Final = r"nixl_(?:xfer_time_seconds|bytes_transferred)_sum"
"""Names without ``vllm:``, as a regular expression."""
TOKENS_SOURCE: Final = 'source="external_kv_transfer"'
"""Label of ``prompt_tokens_by_source_total`` that counts prompt tokens received."""


@dataclass(frozen=True, slots=True)
class TransferCounters:
    """Totals of one scrape since the engine started."""

    seconds: float = 0.0
    """Of all transfers, over all ranks; those that overlap add up."""
    bytes: float = 0.0
    tokens: float = 0.0
    """Prompt tokens received; 0: none, or the engine does not say."""


NO_TRANSFERS: Final = TransferCounters()
_FAILED: Final = re.compile(r"^vllm:nixl_num_failed_transfers_total(?:\{[^}\n]*\})? (\S+)", re.MULTILINE)


def failed_transfers(page: str) -> float | None:
    """Return how many transfers to an engine have failed so far, by its metrics; None: they do not say."""
    found = _FAILED.findall(page)
    return sum(map(float, found)) if found else None


class TransferRateEstimator:
    """Learns how many tokens/s one engine receives, from successive scrapes.

    Sums of recent transfers, in which each scrape weighs 20 % less with every later one that has some. Where
    the engine does not count received tokens, their number follows from the bytes once the bytes of a token
    are known, and nothing is learned until then. Seconds of several ranks add up: the rate of an engine with
    tensor parallelism is too low by that factor, so that a transfer seems to take longer than it does."""

    LEAST_TOKENS: Final = 2_000.0
    """Tokens received before anything is said: less is mostly the fixed time of a transfer."""
    KEPT: Final = 0.8

    def __init__(self) -> None:
        self.rate: float | None = None
        """Tokens/s; None: not measured."""
        self._last: TransferCounters | None = None
        self._token_bytes: float | None = None
        self._tokens = self._seconds = 0.0

    def observe(self, counters: TransferCounters) -> None:
        """Add the counters of a scrape; those that fell are of an engine that has restarted."""
        last, self._last = self._last, counters
        if last is None or counters.seconds <= last.seconds:
            return
        size = counters.bytes - last.bytes
        if (tokens := counters.tokens - last.tokens) > 0:
            if size > 0:
                self._token_bytes = size / tokens
        elif self._token_bytes is not None:
            tokens = size / self._token_bytes
        if tokens <= 0:
            return
        self._tokens = self.KEPT * self._tokens + tokens
        self._seconds = self.KEPT * self._seconds + counters.seconds - last.seconds
        if self._tokens >= self.LEAST_TOKENS:
            self.rate = self._tokens / self._seconds
