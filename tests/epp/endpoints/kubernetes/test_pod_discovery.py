"""Discovery by pool, pods and objectives, and the source that flags select."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.epp.endpoints.kubernetes.documents import PODS, pod
from tests.fakes.apiserver import ApiServer, api_server

from kvist_epp.endpoints.discovery import open_discovery
from kvist_epp.endpoints.endpoint import EndpointSet
from kvist_epp.endpoints.endpoints_file import EndpointsFileWatcher
from kvist_epp.endpoints.kubernetes.pod_discovery import PodDiscovery
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry.metrics import PickerMetrics

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/ns/inferencepools"
OBJECTIVES = "/apis/llm-d.ai/v1alpha2/namespaces/ns/inferenceobjectives"


def pool(*ports: int, **labels: str) -> dict[str, Any]:
    """Return the spec of a pool."""
    return {"spec": {"selector": {"matchLabels": labels}, "targetPorts": [{"number": p} for p in ports]}}


class Seen:
    """Callbacks of a discovery."""

    def __init__(self) -> None:
        self.fleets: list[EndpointSet] = []
        self.priorities: list[Mapping[str, int]] = []

    @property
    def hostports(self) -> list[list[str]]:
        """Addresses of every endpoint set so far."""
        return [[e.hostport for e in fleet] for fleet in self.fleets]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; the test's time limit bounds it."""
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """Return a small API server with one pod."""
    async with api_server() as made:
        made.put(PODS, "a", **pod())
        yield made


@asynccontextmanager
async def following(
    server: ApiServer, folder: Path, **flags: Any
) -> AsyncIterator[tuple[Seen, PodDiscovery]]:
    """Run what ``open_discovery`` returns for these flags."""
    seen = Seen()
    discovery = open_discovery(
        Settings(pool_namespace="ns", **flags),
        seen.fleets.append,
        {"KUBECONFIG": str(server.kubeconfig(folder))},
        on_priorities=seen.priorities.append,
    )
    assert isinstance(discovery, PodDiscovery)
    task = asyncio.create_task(discovery.run())
    try:
        yield seen, discovery
    finally:
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_until_the_new_pods_are_listed_the_old_fleet_stays(server: ApiServer, tmp_path: Path) -> None:
    """A pool with a new selector changes nothing before the newly selected pods are listed."""
    server.put(POOLS, "p", **pool(8000, app="x"))
    async with following(server, tmp_path, pool_name="p") as (seen, discovery):
        await seen.until(lambda: seen.hostports == [["10.0.0.1:8000"]])
        server.open.clear()
        server.put(POOLS, "p", **pool(9000, app="y"))
        await seen.until(lambda: discovery.describe()["selector"] == "app=y")
        server.put(PODS, "b", **pod("b", "10.0.0.2"))
        await seen.until(lambda: any(q.get("labelSelector") == "app=y" for _, q in server.asked))
        assert len(seen.fleets) == 1

        server.open.set()
        await seen.until(lambda: len(seen.fleets) == 2)
        assert seen.hostports[-1] == ["10.0.0.1:9000", "10.0.0.2:9000"]


async def test_changes_are_published_together(server: ApiServer, tmp_path: Path) -> None:
    """A hundred changes at once are published in a few sets, the last one complete; an irrelevant change in
    none."""
    selector = {"endpoint_selector": "app=x", "endpoint_target_ports": "8000"}
    async with following(server, tmp_path, **selector) as (seen, discovery):
        await seen.until(lambda: len(seen.fleets) == 1)
        server.put(PODS, "a", **pod(annotations={"other": "thing"}))
        for number in range(2, 102):
            server.put(PODS, f"p{number}", **pod(f"p{number}", f"10.0.1.{number}"))
        await seen.until(lambda: len(seen.fleets[-1]) == 101)
        assert len(seen.fleets) < 12
        assert discovery.describe()["watches"][0]["changes"] == 102
        assert all(fleet.by_key("ns/a") is seen.fleets[0].by_key("ns/a") for fleet in seen.fleets)


async def test_priorities_are_published_when_they_change(server: ApiServer, tmp_path: Path) -> None:
    """Priorities of the pool's objectives are published by name; an irrelevant change is not."""
    server.put(POOLS, "p", **pool(8000, app="x"))
    async with following(server, tmp_path, pool_name="p") as (seen, _):
        reference = {"poolRef": {"name": "p"}}
        server.put(OBJECTIVES, "high", spec={"priority": 3, **reference})
        await seen.until(lambda: seen.priorities == [{"high": 3}])
        server.put(OBJECTIVES, "high", spec={"priority": 3, **reference}, status={"x": 1})
        server.put(OBJECTIVES, "low", spec={"priority": -3, **reference})
        await seen.until(lambda: len(seen.priorities) == 2)
        assert seen.priorities[-1] == {"high": 3, "low": -3}


async def test_what_it_shows(server: ApiServer, tmp_path: Path) -> None:
    """/debug/fleet shows source, selection, complaints and every watch; metrics show watches and errors."""
    server.put(PODS, "odd", **pod("odd", "10.0.0.2", annotations={"kvist.dev/kv-events-port": "x"}))
    selector = {"endpoint_selector": "app=x", "endpoint_target_ports": "8000,8001"}
    async with following(server, tmp_path, **selector) as (seen, discovery):
        await seen.until(lambda: len(seen.fleets) == 1)
        await seen.until(lambda: [watched.open for watched in discovery.watches()] == [True] * 3)
        shown = discovery.describe()
        assert {key: shown[key] for key in ("kind", "namespace", "selector", "ports", "problem")} == {
            "kind": "selector",
            "namespace": "ns",
            "selector": "app=x",
            "ports": [8000, 8001],
            "problem": "",
        }
        assert len(shown["complaints"]) == 1
        pods, *_ = discovery.watches()
        assert (pods.resource, pods.open, pods.lists, pods.errors) == ("pods", True, 1, {})

        metrics = PickerMetrics()
        metrics.gauges.watches = discovery.watches
        page = metrics.snapshot().format("")[0].decode()
        assert 'kvist_epp_discovery_watching{resource="pods"} 1.0' in page
        assert 'kvist_epp_discovery_lists_total{resource="inferenceobjectives.llm-d.ai"} 1.0' in page


def test_a_file_is_no_business_of_kubernetes(tmp_path: Path) -> None:
    """With --endpoints-file no cluster is needed."""
    file = str(tmp_path / "endpoints.yaml")
    found = open_discovery(Settings(endpoints_file=file), lambda _: None, {})

    assert isinstance(found, EndpointsFileWatcher)
    assert found.describe() == {"kind": "file", "path": file, "problem": "", "refused": 0}
    assert found.watches() == ()
