"""vLLM's metrics of KV tiers: where cached tokens came from, and how fast tiers give them. No I/O.

Names are of vLLM 0.32 (``distributed/kv_transfer/kv_connector/v1/offloading/metrics.py``,
``v1/kv_offload/tiering/metrics.py``, ``v1/metrics/cache_hit_source.py``); older engines have some of them or
none. A block of storage is read into host memory first and copied to the GPU from there.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvist_epp.engines.vllm.kv_events import CPU, GPU

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


def source_of(medium: str) -> str:
    """Return the label ``source`` under which the engine counts tokens from a medium of its events."""
    return {GPU: DEVICE, CPU: HOST}.get(medium, DISK)


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
