"""The garbage collector of a real kube-controller-manager, beside a control plane."""

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from tests.cluster.binaries import binary
from tests.cluster.control_plane import HOST, ControlPlane

from kvist_sim.ports import free_ports
from kvist_sim.processes import Children

START_SECONDS = 90.0


@asynccontextmanager
async def collecting(plane: ControlPlane, folder: Path, *more: str) -> AsyncIterator[None]:
    """Run the garbage collector: objects without an owner go, and deletions in the foreground end.

    ``more``: names of other controllers to run.
    """
    [port] = free_ports(1)
    config = plane.kubeconfig("collector")
    argv = [
        *(str(binary("kube-controller-manager")), "--leader-elect=false", f"--bind-address={HOST}"),
        *(f"--{flag}={config}" for flag in ("kubeconfig", "authentication-kubeconfig")),
        *(f"--authorization-kubeconfig={config}", f"--secure-port={port}"),
        f"--controllers={','.join(('garbage-collector-controller', *more))}",
    ]
    async with Children(folder, grace_seconds=1.0) as children:
        child = children.start("kube-controller-manager", argv)
        await children.ready(child, functools.partial(_healthy, port), START_SECONDS)
        yield


async def _healthy(port: int) -> bool:
    """By a certificate that it makes itself."""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"https://{HOST}:{port}/healthz", ssl=False) as response,
        ):
            return response.status == 200
    except aiohttp.ClientError:
        return False
