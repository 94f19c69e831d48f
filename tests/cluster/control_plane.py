"""A real etcd and a real kube-apiserver as child processes: data in a folder, ports free ones, TLS and RBAC
on.

Other tiers build on it: ``ControlPlane.kubeconfig`` and ``keys`` are what a controller manager, a scheduler
or a kubelet needs to join; ``flags`` adds to the API server's."""

import asyncio
import functools
import json
import signal
import ssl
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import aiohttp
from tests.cluster import keys as pki
from tests.cluster.binaries import binary

from kvist_sim.http1 import answers
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, Children

HOST = "127.0.0.1"
ADMIN = "kvist-test-admin"
"""Bearer token of a cluster administrator."""
NAMES = (HOST, "::1", "localhost", "kubernetes.default.svc", "10.96.0.1", "10.244.0.1")
START_SECONDS = 60.0
"""Two and a half seconds on an idle machine."""


class ControlPlane:
    """``async with ControlPlane(folder) as plane``: running, and ended on the way out."""

    def __init__(self, folder: Path, *, flags: Sequence[str] = ()) -> None:
        self.folder = folder
        self.keys = pki.make(folder)
        self.etcd_port, self._peer_port, self.port = free_ports(3)
        self._flags = flags
        self._stack = AsyncExitStack()
        self._children: Children | None = None
        self.apiserver: Child | None = None
        self.etcd: Child | None = None

    @property
    def url(self) -> str:
        """Return the URL of the API server."""
        return f"https://{HOST}:{self.port}"

    async def __aenter__(self) -> Self:
        self.keys.issue("apiserver", names=NAMES)
        (self.folder / "tokens.csv").write_text(f'{ADMIN},admin,admin,"system:masters"\n')
        self._children = await self._stack.enter_async_context(Children(self.folder, grace_seconds=1.0))
        try:
            self.etcd = self._start("etcd", _etcd(self.folder, self.etcd_port, self._peer_port))
            probe = functools.partial(answers, HOST, self.etcd_port, "/health")
            await self._children.ready(self.etcd, probe, START_SECONDS)
            await self.start_apiserver()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.apiserver is not None:
            await self.kill_apiserver()  # it waits a minute for watches to end when it is asked
        await self._stack.aclose()

    async def start_apiserver(self) -> None:
        """Start it, again or for the first time, and wait until it is ready."""
        assert self._children is not None
        self.apiserver = self._start("kube-apiserver", self._apiserver())
        await self._children.ready(self.apiserver, self.ready, START_SECONDS)

    async def kill_apiserver(self) -> None:
        """Kill the API server, as a crash would."""
        assert self._children is not None
        assert self.apiserver is not None
        child, self.apiserver = self.apiserver, None
        await self._children.end(child, signal.SIGKILL, 5)

    async def ready(self) -> bool:
        """Whether the API server says so."""
        try:
            timeout = aiohttp.ClientTimeout(total=5)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{self.url}/readyz", ssl=self.tls()) as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def compact(self) -> None:
        """Forget etcd's history: every resource version older than now is gone."""
        url = f"http://{HOST}:{self.etcd_port}/v3/kv"
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/range", json={"key": "AA=="}) as response:
                revision = (await response.json())["header"]["revision"]
            async with session.post(
                f"{url}/compaction", json={"revision": revision, "physical": True}
            ) as response:
                assert response.status == 200, await response.text()

    def tls(self) -> ssl.SSLContext:
        """Trusts this cluster's authority."""
        return ssl.create_default_context(cafile=str(self.keys.ca))

    def kubeconfig(self, name: str, token: Path | str = ADMIN, *, server: str = "") -> Path:
        """Write a kubeconfig file with this token, or the token in this file; ``server``: the address of a
        relay."""
        user = {"tokenFile": str(token)} if isinstance(token, Path) else {"token": token}
        cluster = {"server": server or self.url, "certificate-authority": str(self.keys.ca)}
        document: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(document))
        return path

    def _start(self, name: str, argv: Sequence[str]) -> Child:
        assert self._children is not None
        return self._children.start(name, argv)

    def _apiserver(self) -> list[str]:
        folder, accounts = self.folder, self.keys.accounts
        return [
            str(binary("kube-apiserver")),
            f"--etcd-servers=http://{HOST}:{self.etcd_port}",
            f"--bind-address={HOST}",
            f"--secure-port={self.port}",
            f"--tls-cert-file={folder / 'apiserver.crt'}",
            f"--tls-private-key-file={folder / 'apiserver.key'}",
            f"--client-ca-file={self.keys.ca}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            f"--service-account-issuer={pki.ISSUER}",
            f"--service-account-key-file={accounts}",
            f"--service-account-signing-key-file={accounts}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none",  # else it complains of a loopback address every few seconds
            "--allow-privileged=true",
            *self._flags,
        ]


def _etcd(folder: Path, port: int, peer_port: int) -> list[str]:
    return [
        str(binary("etcd")),
        f"--data-dir={folder / 'etcd'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls=http://{HOST}:{port}",
        f"--advertise-client-urls=http://{HOST}:{port}",
        f"--listen-peer-urls=http://{HOST}:{peer_port}",
        "--log-level=error",
    ]


class Started(Protocol):
    """A part that ``async with`` starts and ends."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


_S = TypeVar("_S", bound=Started)


@contextmanager
def running(made: _S) -> Iterator[_S]:
    """For the tests of a session, each of which has a loop of its own."""
    with asyncio.Runner() as runner:
        runner.run(made.__aenter__())
        try:
            yield made
        finally:
            runner.run(made.__aexit__())


async def running_for(seconds: float, folder: Path) -> None:
    """A control plane to play with: ``python -m tests.cluster.control_plane``."""
    async with ControlPlane(folder) as plane:
        print(f"KUBECONFIG={plane.kubeconfig('admin')}", flush=True)  # noqa: T201
        await asyncio.sleep(seconds)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        asyncio.run(running_for(3600, Path(made)))
