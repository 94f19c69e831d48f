"""A whole cluster for tests: ``async with Cluster(folder) as cluster``. What is in it: ``node.box``."""

import asyncio
import functools
import itertools
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, Self

import aiohttp
from tests.cluster.client import Client
from tests.cluster.control_plane import ADMIN
from tests.cluster.inside import Inside
from tests.cluster.node.box import READY, SPEC
from tests.cluster.node.images import Programs
from tests.cluster.node.network import ROUTER
from tests.cluster.node.nodes import NodeSpec
from tests.cluster.space import Apis, Space
from tests.golang import GoError

from kvist_sim.processes import Child, Children

ROOT: Final = Path(__file__).parents[2]
START_SECONDS: Final = 90.0
"""Five on an idle machine."""
H100: Final = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.count": "8"}
NODES: Final = tuple(
    NodeSpec(f"node-{n}", f"10.244.0.1{n}", f"10.244.{n}.0/24", H100, {"nvidia.com/gpu": "8"}) for n in (1, 2)
)
"""Two: with one, its loss would be taken for that of the network, and nothing would be evicted."""
RESTRICTED: Final = {"pod-security.kubernetes.io/enforce": "restricted"}
_BOX: Final = (
    *("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child=SIGKILL"),
    *("--mount-proc", "--propagation", "private", sys.executable, "-m", "tests.cluster.node.box"),
)


class Cluster:
    """Running, and gone on the way out: with it every process, interface and mount of it."""

    def __init__(
        self, folder: Path, nodes: Sequence[NodeSpec] = NODES, images: Programs | None = None
    ) -> None:
        """``images``: more than the usual ones."""
        self.folder = folder
        self.nodes = nodes
        self._images = images or {}
        self._stack = AsyncExitStack()
        self._numbers = itertools.count(1)
        self.inside: Inside
        """Its network."""
        self.port = 0
        """Of the API server."""
        self.first = 0
        """Process id of the first process in it, as seen from outside."""

    async def __aenter__(self) -> Self:
        if os.geteuid():
            raise GoError("a cluster needs network namespaces and mounts of its own: run these tests as root")
        told = {"nodes": [node.json() for node in self.nodes], "images": self._images}
        (self.folder / SPEC).write_text(json.dumps(told))
        children = await self._stack.enter_async_context(Children(self.folder, grace_seconds=0.0))
        try:
            box = children.start("box", [*_BOX, str(self.folder)], environment={"PYTHONPATH": str(ROOT)})
            await children.ready(box, self._said, START_SECONDS)
            self.port = json.loads((self.folder / READY).read_text())["port"]
            self.first = _first_process(box)
            self.inside = self._stack.enter_context(Inside(self.first))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _said(self) -> bool:
        return (self.folder / READY).exists()

    @asynccontextmanager
    async def client(self, token: str = ADMIN) -> AsyncIterator[Client]:
        """Return a client of the API with this token."""
        tls = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        url = f"https://{ROUTER}:{self.port}"
        headers = {"Authorization": f"Bearer {token}"}
        connector = self.inside.connector(ssl=tls)
        async with aiohttp.ClientSession(url, connector=connector, headers=headers) as session:
            yield Client(session)

    @asynccontextmanager
    async def http(self, **more: object) -> AsyncIterator[aiohttp.ClientSession]:
        """A client in the cluster's network, with the names of the cluster."""
        async with aiohttp.ClientSession(connector=self.inside.connector(**more)) as session:
            yield session

    @asynccontextmanager
    async def space(self, client: Client, name: str = "", *, restricted: bool = True) -> AsyncIterator[Space]:
        """A namespace that admits restricted pods alone; deleted in the end, its pods at once."""
        name = name or f"t{next(self._numbers)}"
        body = {"metadata": {"name": name, "labels": RESTRICTED if restricted else {}}}
        await client.ask("POST", "/api/v1/namespaces", body)
        made = Space(client, name, Apis(client), self.folder / "logs")
        await made.until(functools.partial(made.found, "ServiceAccount", "default"), "the default account")
        try:
            yield made
        finally:
            await asyncio.shield(made.delete())


def _first_process(box: Child) -> int:
    """Return the first process of the box: the only child of ``unshare``."""
    return int(Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text().split()[0])


async def running_for(seconds: float, folder: Path) -> None:
    """A cluster to play with: ``python -m tests.cluster.cluster FOLDER``."""
    async with Cluster(folder) as cluster:
        inside = f"nsenter --target {cluster.first} --net --mount"
        sys.stdout.write(f"{inside} env KUBECONFIG={folder}/components.kubeconfig bash\n")
        sys.stdout.flush()
        await asyncio.sleep(seconds)


if __name__ == "__main__":
    asyncio.run(running_for(3600, Path(sys.argv[1])))
