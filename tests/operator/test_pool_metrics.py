"""Metrics of each pool, from the operator's loops on a cluster in memory."""

import time
from datetime import UTC, datetime

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.operator.memory import Memory
from tests.operator.test_runtime import OPTIONAL, pool, running, until

from kvist_operator.cluster.kinds import POOL, Target
from kvist_operator.cluster.pool_cache import PoolKey
from kvist_operator.errors import Unavailable
from kvist_operator.process.pool_metrics import PoolMetrics
from kvist_operator.process.runtime import Operator

TWIG = PoolKey("forest", "twig")


@pytest.fixture
def cluster() -> Memory:
    """Return a cluster without optional APIs."""
    made = Memory()
    made.absent = set(OPTIONAL)
    return made


def series(operator: Operator, name: str) -> dict[tuple[str, ...], float]:
    """Return the values of a metric by its labels in the order of their names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(operator.metrics_page().decode())
        for sample in family.samples
        if sample.name == f"kvist_operator_{name}"
    }


async def test_a_pool_has_its_figures(cluster: Memory) -> None:
    """Expectations of the spec, the plan, conditions, the certificate and the last success are exported."""
    began = time.time()
    workload = {
        "promptTokens": 4000,
        "sharedPrefixTokens": 3000,
        "outputTokens": 100,
        "ttftMilliseconds": 500,
        "tpotMilliseconds": 40,
    }
    cluster.put(pool(workload=workload, replicas=2))
    async with running(cluster) as (operator, _):
        await until(lambda: ("forest", "twig") in series(operator, SUCCESS))
        found = {
            name: series(operator, name)[TWIG]
            for name in (
                "pool_shared_prefix_ratio",
                "pool_ttft_target_seconds",
                "pool_tpot_target_seconds",
                "pool_replicas",
                "pool_ready_replicas",
                "reconcile_failures_total",
            )
        }
        assert found == {
            "pool_shared_prefix_ratio": 0.75,
            "pool_ttft_target_seconds": 0.5,
            "pool_tpot_target_seconds": 0.04,
            "pool_replicas": 2,
            "pool_ready_replicas": 0,
            "reconcile_failures_total": 0,
        }
        status = cluster.objects[Target(POOL, "forest", "twig")]["status"]
        planned = status["plan"]["memory"]["kvTokens"]
        assert series(operator, "pool_planned_cache_tokens") == {TWIG: planned}
        assert series(operator, "pool_reported_cache_tokens") == {}
        assert series(operator, "pool_condition") == {
            (*TWIG, each["type"]): each["status"] == "True" for each in status["conditions"]
        }
        assert began <= series(operator, SUCCESS)[TWIG] <= time.time()
        days = (series(operator, "pool_certificate_expiry_timestamp_seconds")[TWIG] - began) / 86_400
        assert 364 < days < 366


SUCCESS = "reconcile_last_success_timestamp_seconds"


async def test_a_failing_pool_has_no_success(cluster: Memory) -> None:
    """Failures are counted for the pool that fails; the time of its last success stands."""
    cluster.refuse = lambda _verb, target: (
        Unavailable("busy", 503) if target.name.startswith("twig") else None
    )
    cluster.put(pool("twig"))
    cluster.put(pool("other"))
    async with running(cluster) as (operator, _):
        await until(lambda: series(operator, "reconcile_failures_total").get(TWIG, 0) >= 1)
        await until(lambda: ("forest", "other") in series(operator, SUCCESS))
        assert TWIG not in series(operator, SUCCESS)
        assert series(operator, "reconcile_failures_total")["forest", "other"] == 0


async def test_series_go_with_their_pool(cluster: Memory) -> None:
    """A deleted pool has no series any more, in any metric."""
    cluster.put(pool("twig"))
    cluster.put(pool("other"))
    async with running(cluster) as (operator, ears):
        await until(lambda: len(series(operator, SUCCESS)) == 2)
        gone = cluster.objects.pop(Target(POOL, "forest", "twig"))
        await ears.tell("DELETED", gone)
        await until(lambda: len(series(operator, SUCCESS)) == 1)
        page = operator.metrics_page().decode()
        assert 'pool="other"' in page
        assert 'pool="twig"' not in page


def test_what_is_not_known_has_no_series() -> None:
    """A pool without hints, plan or certificate has only what is known of it; a reconciliation of a pool that
    is not managed counts nowhere."""
    metrics = PoolMetrics(now=lambda: 5.0)
    metrics.on_managed(TWIG)
    metrics.on_certificate(TWIG, datetime(2027, 1, 1, tzinfo=UTC))
    metrics.on_certificate(TWIG, None)
    metrics.on_status(TWIG, None, {"conditions": [{"type": "Ready", "status": "Unknown"}]})
    metrics.on_reconciled(TWIG, ok=True)
    metrics.on_reconciled(PoolKey("forest", "foreign"), ok=False)

    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }
    assert found == {
        ("kvist_operator_reconcile_last_success_timestamp_seconds", *TWIG): 5.0,
        ("kvist_operator_reconcile_failures_total", *TWIG): 0,
        ("kvist_operator_pool_condition", *TWIG, "Ready"): 0,
    }
