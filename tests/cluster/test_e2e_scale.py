"""Pools that grow and shrink in a whole cluster, under load."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.cluster.cluster import Cluster
from tests.cluster.external_metrics import NAME as METRIC
from tests.cluster.external_metrics import external_metric
from tests.cluster.pooled import Served, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
Json = dict[str, Any]
TARGET = 10
"""Of the metric, for each replica."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def twig(cluster: Cluster) -> AsyncIterator[Served]:
    """One engine, one picker, two Envoys."""
    async with serving(cluster) as made:
        yield made


async def settled(twig: Served, replicas: int) -> None:
    """Wait until the pool has so many engines, is ready, and its status says so."""

    async def done() -> bool:
        return len(await twig.engines()) == replicas

    await twig.room.until(done, f"{replicas} engines")
    found = await twig.until_ready()
    assert found["status"]["replicas"] == replicas


async def test_a_pool_is_scaled_through_its_subresource_without_a_failed_request(twig: Served) -> None:
    """Up, and down again, as ``kubectl scale`` does it; new engines serve, old ones finish what they have."""
    async with twig.load() as load:
        await twig.room.patch("InferencePool", twig.name, {"spec": {"replicas": 3}}, sub="scale")
        await settled(twig, 3)
        await twig.room.until(lambda: all_serve(twig), "answers of every engine")
        await twig.room.patch("InferencePool", twig.name, {"spec": {"replicas": 1}}, sub="scale")
        await settled(twig, 1)

        async def gone() -> bool:
            return len(await twig.room.pods(**{"kvist.dev/pool": twig.name})) == 1

        await twig.room.until(gone, "the other engines to be gone")
        await load.until(20)
    assert load.failures == []


async def all_serve(twig: Served) -> bool:
    """Whether each engine has finished a request."""
    found = []
    async with twig.cluster.http() as http:
        for pod in await twig.engines():
            async with http.get(f"http://{pod['status']['podIP']}:8000/metrics") as response:
                lines = (await response.text()).splitlines()
            counts = [line for line in lines if line.startswith("vllm:request_success_total")]
            found.append(int(sum(float(line.rpartition(" ")[2]) for line in counts)))
    return all(found)


async def test_an_autoscaler_scales_a_pool_by_an_external_metric(cluster: Cluster, twig: Served) -> None:
    """The HorizontalPodAutoscaler finds replicas and selector in ``/scale``, and follows the number."""
    async with external_metric(cluster, twig.room) as metric:
        metric.value = 3 * TARGET
        await twig.room.apply(autoscaler(twig.name))
        await settled(twig, 3)
        metric.value = TARGET
        await settled(twig, 1)
        await twig.room.remove("HorizontalPodAutoscaler", "twig")
    await twig.ask("Still there?")


def autoscaler(name: str) -> Json:
    """One replica for each ten of the metric, one to three of them, at once."""
    target = {"type": "AverageValue", "averageValue": str(TARGET)}
    metric = {"type": "External", "external": {"metric": {"name": METRIC}, "target": target}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "twig"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool", "name": name},
            "minReplicas": 1,
            "maxReplicas": 3,
            "metrics": [metric],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }
