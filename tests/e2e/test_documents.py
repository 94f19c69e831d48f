"""Commands of README, guides and examples that need a cluster, as they stand there."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from tests.cluster.client import Client
from tests.cluster.cluster import Cluster
from tests.cluster.foreign import keda
from tests.cluster.space import Space
from tests.docs_runner import blocks
from tests.docs_runner.blocks import Block
from tests.docs_runner.running import WrongError
from tests.e2e import pools
from tests.e2e.commands import Commands
from tests.e2e.desk import Desk
from tests.e2e.edge import Edge
from tests.e2e.steps import step
from tests.shapes import ROOT

from kvist_sim import model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]
README: Final = "README.md"
FIRST: Final = "examples/01-minimal/README.md"
APART: Final = "examples/10-airgapped/README.md"
"""Brings a release of its own."""
DEFAULT: Final = ("examples/03-plain-envoy", "examples/05-two-models")
"""Whose namespace is ``default``."""
BLOCKS: Final = {str(block.name).partition(":")[0]: block for block in blocks.commands("e2e")}


async def test_blocks_with_a_cluster_do_what_they_say(
    cluster: Cluster, commands: Commands, admin: Client, system: Space, edge: Edge, tmp_path: Path
) -> None:
    """README's two commands install the operator and make a pool; by it the examples serve, each in a
    namespace of its own."""
    await admin.install_crds(*keda())
    several = [block for name, block in BLOCKS.items() if name not in (README, FIRST, APART)]
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pools.end, commands, system)
        desks = Desks(cluster, commands, admin, tmp_path, stack)
        with step("README: helm install, kubectl apply"):
            desk = await desks.new()
            await desk.run(BLOCKS[README])
        with step(f"{len(several) + 1} examples at once"):
            stack.push_async_callback(_cleared, commands)
            await asyncio.gather(desk.run(BLOCKS[FIRST]), *(desks.type(block) for block in several))


@pytest.mark.parametrize(
    "command",
    [
        "kubectl get nodes -o name\nnode/none",
        "kubectl get nothing",
        "kubectl port-forward service/none 8080:80 &",
    ],
)
async def test_a_wrong_block_is_reported(
    command: str, cluster: Cluster, commands: Commands, admin: Client, tmp_path: Path
) -> None:
    """By file, line and command: another output, a failure, something lasting that ends at once."""
    block = Block(ROOT / "README.md", 7, "console", f"$ {command}\n")
    async with AsyncExitStack() as stack:
        desk = await Desks(cluster, commands, admin, tmp_path, stack).new()
        with pytest.raises(WrongError, match=r"README\.md:7: kubectl"):
            await desk.run(block)


async def test_a_release_without_a_way_out(
    cluster: Cluster, commands: Commands, admin: Client, system: Space, tmp_path: Path
) -> None:
    """The air-gapped example works with images of a private registry and a model from a filled claim."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pools.end, commands, system)
        desk = await Desks(cluster, commands, admin, tmp_path, stack).new()
        await stack.enter_async_context(_filled(cluster, desk.namespace))
        with step("helm install and a pool without a way out"):
            await desk.run(BLOCKS[APART])


class Desks:
    """Places to type at, one for each block, cleared away in the end."""

    def __init__(
        self, cluster: Cluster, commands: Commands, admin: Client, folder: Path, stack: AsyncExitStack
    ) -> None:
        self._cluster = cluster
        self._commands = commands
        self._admin = admin
        self._folder = folder
        self._stack = stack

    async def new(self) -> Desk:
        """At a namespace that admits restricted pods alone."""
        room: Space = await self._stack.enter_async_context(self._cluster.space(self._admin))
        made = Desk(self._commands, room.name, self._folder / room.name)
        await asyncio.to_thread(made.lay)
        return made

    async def type(self, block: Block) -> None:
        """Run a block in a new workplace. Raises WrongError."""
        desk = await self.new()
        with step(f"  {block.name}"):
            await desk.run(block)


async def _cleared(commands: Commands) -> None:
    """Delete what the examples created in the default namespace."""
    files = [f"--filename={ROOT / folder}" for folder in DEFAULT]
    await commands.kubectl("delete", "--namespace=default", *files, "--ignore-not-found", "--wait=false")


@asynccontextmanager
async def _filled(cluster: Cluster, namespace: str) -> AsyncIterator[None]:
    """A volume for the claim ``models``, with a model in it."""
    shared = cluster.folder / "claims" / namespace / "models" / "qwen3-8b"
    shutil.copytree(model.folder(), shared)
    spec = {
        "accessModes": ["ReadWriteMany"],
        "capacity": {"storage": "100Gi"},
        "hostPath": {"path": "/nowhere"},
        "claimRef": {"namespace": namespace, "name": "models"},
    }
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": namespace}, "spec": spec}
    path = "/api/v1/persistentvolumes"
    async with cluster.client() as admin:
        await admin.ask("POST", path, volume)
        yield
        await admin.ask("DELETE", f"{path}/{namespace}")
