"""One control plane for the session, one namespace for each test."""

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml
from tests.cluster.client import GAIE, Client, Namespace, client, namespace
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ControlPlane, running
from tests.cluster.foreign import crds
from tests.cluster.space import Space
from tests.crd.cases import CRD

from kvist_sim.relays import TcpRelay

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running control plane."""
    with running(ControlPlane(tmp_path_factory.mktemp("control-plane"))) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of one test."""
    return tmp_path


@pytest.fixture
async def admin(plane: ControlPlane) -> AsyncIterator[Client]:
    """The API as its administrator."""
    async with client(plane) as made:
        yield made


@pytest.fixture
async def space(admin: Client) -> Namespace:
    """A namespace of this test alone."""
    return await namespace(admin, f"t{next(_NUMBERS)}")


@pytest.fixture
async def restricted(space: Namespace, admin: Client) -> AsyncIterator[Namespace]:
    """A namespace that enforces Pod Security *restricted*, in a cluster with our CRD and others'."""
    own = yaml.safe_load(CRD.read_text())
    name = own["metadata"]["name"]
    await admin.uninstall(name)  # another test's may be a smaller one
    await admin.install(GAIE)
    await admin.install_crds(own, *crds())
    labels = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    merge = {"Content-Type": "application/merge-patch+json"}
    await admin.ask("PATCH", f"/api/v1/namespaces/{space.name}", labels, headers=merge)
    yield space
    for crd in (name, GAIE):  # other tests bring their own; nobody minds the rest
        await admin.uninstall(crd)


@pytest.fixture
async def relay(plane: ControlPlane) -> AsyncIterator[TcpRelay]:
    """A way to the API server that can be cut and parted."""
    async with TcpRelay(plane.port) as made:
        yield made


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A whole cluster, with nodes that run pods."""
    if Path(__file__).is_relative_to("/tmp"):
        pytest.fail("pods that mount a volume at /tmp would not see this checkout: move it elsewhere")
    with running(Cluster(tmp_path_factory.mktemp("cluster"))) as made:
        yield made


@pytest.fixture
async def room(cluster: Cluster) -> AsyncIterator[Space]:
    """A namespace of it for this test alone, which admits restricted pods."""
    async with cluster.client() as admin, cluster.space(admin) as made:
        yield made
