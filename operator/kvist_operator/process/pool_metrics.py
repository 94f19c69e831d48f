"""Metrics of each pool: its reconciliations, its conditions, and what its spec expects.

A series exists as long as this operator manages its pool. Figures are those of the last reconciliation: they
are not read from the cluster at a scrape, so a page costs the same whatever the pools are like.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist_operator.cluster.pool_cache import PoolKey
from kvist_operator.reconcile.pool_observer import PoolObserver
from kvist_operator.spec.pool import Pool

LABELS: Final = ("namespace", "pool")

GAUGES: Final = {
    "reconcile_last_success_timestamp_seconds": "Time of the last successful reconciliation in Unix seconds.",
    "pool_replicas": "Number of replicas of engines that the spec sets.",
    "pool_ready_replicas": "Number of replicas of engines that are ready.",
    "pool_planned_cache_tokens": "Number of tokens that the KV cache of a replica holds by the plan.",
    "pool_reported_cache_tokens": "Number of tokens that the KV cache of a replica holds as engines report.",
    "pool_shared_prefix_ratio": "Part of a prompt that spec.workload says is shared, from 0 to 1.",
    "pool_ttft_target_seconds": "Seconds to the first token that spec.workload sets as the target.",
    "pool_tpot_target_seconds": "Seconds per output token that spec.workload sets as the target.",
    "pool_certificate_expiry_timestamp_seconds": (
        "Time at which the certificate in the Secret of the pickers expires in Unix seconds."
    ),
}
"""HELP text of each gauge of a pool. One that is not known of a pool has no series."""


@dataclass(slots=True)
class PoolFigures:
    """Figures of one pool."""

    failures: int = 0
    gauges: dict[str, float] = field(default_factory=dict)
    """By name in ``GAUGES``."""
    conditions: dict[str, bool] = field(default_factory=dict)
    """By type: whether the status is ``True``."""

    def set(self, name: str, value: float | None) -> None:
        """Set a gauge; None: it is not known."""
        if value is None:
            self.gauges.pop(name, None)
        else:
            self.gauges[name] = value


class PoolMetrics(PoolObserver, Collector):
    """Figures of all pools that this operator manages."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """``now`` returns Unix seconds."""
        self._now = now
        self._pools: dict[PoolKey, PoolFigures] = {}

    def on_managed(self, key: PoolKey) -> None:
        """See ``PoolObserver``: the pool has series from now on."""
        self._pools.setdefault(key, PoolFigures())

    def on_status(self, key: PoolKey, pool: Pool | None, status: Mapping[str, Any]) -> None:
        """See ``PoolObserver``: take the figures from spec and status."""
        figures = self._pools.setdefault(key, PoolFigures())
        conditions = status.get("conditions") or ()
        figures.conditions = {each["type"]: each["status"] == "True" for each in conditions}
        memory = (status.get("plan") or {}).get("memory") or {}
        figures.set("pool_planned_cache_tokens", memory.get("kvTokens"))
        figures.set("pool_reported_cache_tokens", status.get("reportedKvTokens"))
        figures.set("pool_ready_replicas", status.get("readyReplicas"))
        if pool is not None:
            workload = pool.workload
            figures.set("pool_replicas", pool.replicas)
            figures.set(
                "pool_shared_prefix_ratio", _ratio(workload.shared_prefix_tokens, workload.prompt_tokens)
            )
            figures.set("pool_ttft_target_seconds", _seconds(workload.ttft_ms))
            figures.set("pool_tpot_target_seconds", _seconds(workload.tpot_ms))

    def on_certificate(self, key: PoolKey, expires: datetime | None) -> None:
        """See ``PoolObserver``: the certificate has a gauge of its own."""
        figures = self._pools.setdefault(key, PoolFigures())
        name = "pool_certificate_expiry_timestamp_seconds"
        figures.set(name, None if expires is None else expires.timestamp())

    def on_gone(self, key: PoolKey) -> None:
        """See ``PoolObserver``: remove the series of the pool."""
        self._pools.pop(key, None)

    def on_reconciled(self, key: PoolKey, *, ok: bool) -> None:
        """Count a reconciliation of a pool that is managed; others are ignored."""
        figures = self._pools.get(key)
        if figures is None:
            return
        if ok:
            figures.set("reconcile_last_success_timestamp_seconds", self._now())
        else:
            figures.failures += 1

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        pools = sorted(self._pools.items())
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"kvist_operator_{name}", text, labels=LABELS)
            for key, figures in pools:
                if (value := figures.gauges.get(name)) is not None:
                    gauge.add_metric(key, value)
            yield gauge
        text = "Number of reconciliations of a pool that failed."
        failures = CounterMetricFamily("kvist_operator_reconcile_failures", text, labels=LABELS)
        text = "1 if a condition of the pool is True, 0 if it is False or Unknown."
        conditions = GaugeMetricFamily("kvist_operator_pool_condition", text, labels=(*LABELS, "type"))
        for key, figures in pools:
            failures.add_metric(key, figures.failures)
            for kind, holds in figures.conditions.items():
                conditions.add_metric((*key, kind), float(holds))
        yield failures
        yield conditions


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
