"""One cluster with Envoy Gateway in it; kvist is installed by the tests themselves."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Final

import pytest
import pytest_asyncio
from tests.charts.helm import NAMESPACE
from tests.cluster.client import Client
from tests.cluster.cluster import H100, NODES, Cluster
from tests.cluster.control_plane import running
from tests.cluster.space import Space
from tests.e2e import edge as envoy_gateway
from tests.e2e.binaries import PROGRAM
from tests.e2e.binaries import envoy_gateway as program
from tests.e2e.commands import Commands
from tests.e2e.edge import Edge
from tests.e2e.istio import install as istio
from tests.e2e.steps import step

L40S: Final = {"nvidia.com/gpu.product": "NVIDIA-L40S", "nvidia.com/gpu.count": "8"}
"""What the examples are for."""
ROOM: Final = {"nvidia.com/gpu": "32"}
"""For two pools: four to an engine, says the plan."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node of each kind of GPU that examples name, and the images of Envoy Gateway and Istio."""
    images = {envoy_gateway.IMAGE: {PROGRAM: str(program())}, **istio.images()}
    nodes = [
        replace(node, labels=labels, capacity=ROOM) for node, labels in zip(NODES, (L40S, H100), strict=True)
    ]
    made = Cluster(tmp_path_factory.mktemp("cluster"), nodes, images)
    with step("a cluster: control plane, two nodes"):
        started = running(made)
        started.__enter__()
    try:
        yield made
    finally:
        started.__exit__(None, None, None)


@pytest.fixture(scope="session")
def commands(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """helm and kubectl."""
    return Commands(cluster, tmp_path_factory.mktemp("commands"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def admin(cluster: Cluster) -> AsyncIterator[Client]:
    """The API as its administrator."""
    async with cluster.client() as made:
        yield made


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def system(cluster: Cluster, admin: Client) -> AsyncIterator[Space]:
    """The namespace of kvist's release: helm lets a CRD go to no other one."""
    async with cluster.space(admin, NAMESPACE) as made:
        yield made


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def edge(cluster: Cluster, admin: Client, commands: Commands) -> AsyncIterator[Edge]:
    """Envoy Gateway, ready."""
    async with cluster.space(admin) as space:
        with step("helm install of Envoy Gateway"):
            made = await envoy_gateway.install(commands, cluster, space)
        yield made
        await envoy_gateway.uninstall(commands, made)
