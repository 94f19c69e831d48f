"""vLLM's metrics of KV tiers: where cached tokens came from, and how fast tiers give them. No I/O.

Names are of vLLM 0.32 (``distributed/kv_transfer/kv_connector/v1/offloading/metrics.py``,
``v1/kv_offload/tiering/metrics.py``, ``v1/metrics/cache_hit_source.py``); older engines have some of them or
none. A block of storage is read into host memory first and copied to the GPU from there.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from kvist_epp.engines.vllm.kv_events import CPU, GPU, LMCACHE, SHARED, STORAGE

NAMES: Final = (
    r"prompt_tokens_cached_by_source_total"
    r"|kv_offload_(?:(?:load|total)_(?:bytes|time)_total|tiering_read_(?:bytes|time)_total)"
)
"""Names without ``vllm:``, as a regular expression."""
_LABEL: Final = re.compile(r'(?:source|transfer_type|tier)="([^"\\]*)"')
_NOT_STORAGE: Final = ("primary", "p2p")

DEVICE: Final = "device"
HOST: Final = "host"
DISK: Final = "disk"
EXTERNAL: Final = "external_unspecified"
"""What a connector loaded that does not say from where, as LMCache's."""


def source_of(medium: str) -> str:
    """Return the label ``source`` under which the engine counts tokens from a medium of its events."""
    return {GPU: DEVICE, CPU: HOST, LMCACHE: EXTERNAL}.get(medium, DISK)


@dataclass(frozen=True, slots=True)
class TierCounters:
    """Totals of one scrape since the engine started."""

    cached: Mapping[str, float] = field(default_factory=dict)
    """Cached prompt tokens by source; empty: the engine does not say."""
    load_bytes: float = 0.0
    """Copied to the GPU from slower tiers, all ranks."""
    load_seconds: float = 0.0
    read_bytes: float = 0.0
    """Read into host memory from storage."""
    read_seconds: float = 0.0


NO_TIERS: Final = TierCounters()


def tier_counters(lines: Iterable[tuple[str, str, float]]) -> TierCounters:
    """Return the counters of the lines (name, labels, value) of a page; other names are ignored."""
    cached: dict[str, float] = {}
    totals: dict[str, float] = {}
    legacy: dict[str, float] = {}
    for name, labels, value in lines:
        label = found[1] if (found := _LABEL.search(labels)) else ""
        if name == "prompt_tokens_cached_by_source_total":
            cached[label] = cached.get(label, 0.0) + value
        elif name.startswith("kv_offload_total_"):  # before 0.31: one pair of counters for both directions
            if label == "CPU_to_GPU":
                legacy[name] = legacy.get(name, 0.0) + value
        elif not label.endswith(_NOT_STORAGE):
            totals[name] = totals.get(name, 0.0) + value
    old = not totals.get("kv_offload_load_bytes_total")
    get, load = totals.get, (legacy, "total") if old else (totals, "load")
    return TierCounters(
        cached,
        load[0].get(f"kv_offload_{load[1]}_bytes_total", 0.0),
        load[0].get(f"kv_offload_{load[1]}_time_total", 0.0),
        get("kv_offload_tiering_read_bytes_total", 0.0),
        get("kv_offload_tiering_read_time_total", 0.0),
    )


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Speeds at which an engine loads blocks of its tiers; all None until enough was loaded."""

    bytes_per_token: float | None = None
    """Of KV cache, over all ranks: bytes loaded by tokens that came from slower tiers."""
    host_bytes_per_second: float | None = None
    """From host memory to the GPU."""
    storage_bytes_per_second: float | None = None
    """From storage to host memory."""

    @property
    def tokens_per_second(self) -> Mapping[str, float]:
        """Tokens/s by medium. What storage has passes through host memory, one after the other."""
        if self.bytes_per_token is None or self.host_bytes_per_second is None:
            return {}
        found = {CPU: self.host_bytes_per_second / self.bytes_per_token}
        if self.storage_bytes_per_second is not None:
            seconds = 1.0 / self.host_bytes_per_second + 1.0 / self.storage_bytes_per_second
            found |= dict.fromkeys((STORAGE, SHARED), 1.0 / seconds / self.bytes_per_token)
        return found


class TierSpeedEstimator:
    """Learns the speed of one engine's tiers from successive scrapes.

    Sums of recent loads, in which those before weigh 20 % less with every later one of 400 tokens or more,
    and less than that with a smaller one: otherwise loads of one short prompt a scrape would never add up to
    ``LEAST_TOKENS``. Seconds of loads that overlap add up, so that the speed of a busy tier is what each of
    them sees.
    """

    LEAST_TOKENS: Final = 1000.0
    """Tokens loaded before anything is said: less is mostly the fixed time of a transfer."""
    FORGOTTEN: Final = 0.2
    """Share of the sums that a scrape takes away at most."""
    RETRY_SECONDS: Final = 60.0
    """A tier that was not read for so long may have become quicker: then it may be tried again."""

    def __init__(self) -> None:
        self.speed = TierSpeed()
        self.rates: Mapping[str, float] = {}
        """Tokens/s by medium, as far as known."""
        self._last: TierCounters | None = None
        self._tokens = self._load_bytes = self._load_seconds = 0.0
        self._read_bytes = self._read_seconds = 0.0
        self._loaded_at = self._read_at = -inf

    def observe(self, counters: TierCounters, now: float) -> None:
        """Add the counters of a scrape; those that fell are of an engine that has restarted."""
        last, self._last = self._last, counters
        if last is counters:
            return
        if last is None or counters.load_bytes < last.load_bytes:
            return
        tokens = _external(counters) - _external(last)
        size = counters.load_bytes - last.load_bytes
        if tokens > 0 and size > 0:
            kept = self._kept(tokens)
            self._tokens = kept * self._tokens + tokens
            self._load_bytes = kept * self._load_bytes + size
            self._load_seconds = kept * self._load_seconds + counters.load_seconds - last.load_seconds
            self._loaded_at = now
        if (read := counters.read_bytes - last.read_bytes) > 0:
            kept = self._kept(read * self._tokens / self._load_bytes) if self._load_bytes else 1.0
            self._read_bytes = kept * self._read_bytes + read
            self._read_seconds = kept * self._read_seconds + counters.read_seconds - last.read_seconds
            self._read_at = now
        self._update()

    def skipped(self, prefill_rate: float, now: float) -> frozenset[str]:
        """Return the media from which loading was lately slower than computing ``prefill_rate`` tokens/s."""
        return frozenset(
            medium
            for medium, rate in self.rates.items()
            if rate < prefill_rate
            and now - (self._loaded_at if medium == CPU else self._read_at) < self.RETRY_SECONDS
        )

    def _kept(self, tokens: float) -> float:
        """Return the share of a sum that is kept when so many tokens are added. With small loads the sum
        tends to twice ``LEAST_TOKENS``."""
        return 1.0 - min(self.FORGOTTEN, tokens / (2 * self.LEAST_TOKENS))

    def _update(self) -> None:
        if self._tokens < self.LEAST_TOKENS or self._load_seconds <= 0:
            return
        size = self._load_bytes / self._tokens
        known = self._read_seconds > 0 and self._read_bytes >= self.LEAST_TOKENS * size
        self.speed = TierSpeed(
            size,
            self._load_bytes / self._load_seconds,
            self._read_bytes / self._read_seconds if known else self.speed.storage_bytes_per_second,
        )
        self.rates = self.speed.tokens_per_second


def _external(counters: TierCounters) -> float:
    """Return the tokens that came from any tier but the GPU."""
    return sum(tokens for source, tokens in counters.cached.items() if source != DEVICE)
