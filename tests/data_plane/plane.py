"""A client, a real Envoy, a stub picker and two upstreams, put together."""

import asyncio
import copy
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tests.data_plane.stub import StubPicker, Transport
from tests.data_plane.upstream import Upstream
from tests.epp.http2.certificates import self_made

from kvist_epp.endpoints.endpoint import hostport
from kvist_epp.http2.call import Server
from kvist_epp.http2.tls import Certificates
from kvist_epp.names import SUBSET_KEY, SUBSET_NAMESPACE
from kvist_sim.envoy import Envoy, Gateway, Json, Mode, config
from kvist_sim.envoy_settings import PickerTls

ROOT = Path(__file__).parents[2]

Tweak = Callable[[Json], None]


@dataclass
class Plane:
    """Everything a test may look at."""

    client: aiohttp.ClientSession
    envoy: Envoy
    picker: StubPicker
    server: Server
    upstreams: tuple[Upstream, Upstream]

    @property
    def addresses(self) -> tuple[str, str]:
        """Both upstreams' "ip:port"."""
        return self.upstreams[0].address, self.upstreams[1].address

    async def filter_stats(self) -> dict[str, int]:
        """Envoy's own counters of the ext_proc filter, by their last name."""
        found = await self.envoy.stats("ext_proc")
        return {name.rpartition(".")[2]: value for name, value in found.items()}

    async def picker_is(self, *, healthy: bool) -> None:
        """Wait until Envoy's health check says so."""
        await healthy_pickers(self.envoy, int(healthy))


async def healthy_pickers(envoy: Envoy, count: int) -> None:
    """Wait until Envoy counts so many healthy pickers."""
    name = "cluster.picker.membership_healthy"
    while (await envoy.stats(name))[name] != count:
        await asyncio.sleep(0.02)


@asynccontextmanager
async def plane(
    transport: Transport,
    mode: Mode,
    *,
    tweak: Tweak = lambda _: None,
    observe_responses: bool = False,
    tls: bool = False,
    host: str = "127.0.0.1",
    **gateway: Any,
) -> AsyncIterator[Plane]:
    """All of it running; ``tweak`` changes Envoy's configuration, ``gateway`` the fields of `Gateway`.

    ``tls``: between Envoy and the picker, verified. ``host``: where upstreams and picker listen.
    """
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(Upstream(host)) for _ in range(2)]
        picker = StubPicker(observe_responses=observe_responses)
        picker.picks(second.address)
        server = await picker.serve(transport, tls=self_made() if tls else None, host=host)
        stack.push_async_callback(server.close)
        if tls:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvist-ca-")))
            gateway["picker_tls"] = trusting(self_made(), folder)
        envoy = await stack.enter_async_context(
            envoy_for(hostport(host, server.port), mode, (first, second), tweak=tweak, **gateway)
        )
        client = await stack.enter_async_context(aiohttp.ClientSession(envoy.url))
        yield Plane(client, envoy, picker, server, (first, second))


def subset_hint(hint: Any) -> Tweak:
    """A gateway that names the endpoints it allows: a list, a comma string, or something else."""

    def give(settings: Json) -> None:
        options = ext_proc(settings)["metadata_options"]
        forwarded = options.get("forwarding_namespaces", {"untyped": []})["untyped"]
        options["forwarding_namespaces"] = {"untyped": [*forwarded, SUBSET_NAMESPACE]}
        set_metadata = {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
            "metadata": [{"metadata_namespace": SUBSET_NAMESPACE, "value": {SUBSET_KEY: hint}}],
        }
        connection_manager(settings)["http_filters"].insert(
            0, {"name": "envoy.filters.http.set_metadata", "typed_config": set_metadata}
        )

    return give


def trusting(certificates: Certificates, folder: Path) -> PickerTls:
    """Return the TLS settings of a gateway that trusts this picker alone."""
    (folder / "ca.crt").write_bytes(certificates.material.ca)
    return PickerTls(ca_file=folder / "ca.crt", name="127.0.0.1")


def envoy_for(
    picker: str, mode: Mode, upstreams: tuple[Upstream, ...], *, tweak: Tweak = lambda _: None, **gateway: Any
) -> Envoy:
    """An Envoy, not yet started, between clients and ``upstreams``."""
    endpoints = [upstream.address for upstream in upstreams]
    settings = copy.deepcopy(config(Gateway(endpoints=endpoints, picker=picker, mode=mode, **gateway)))
    tweak(settings)
    return Envoy(settings)


def connection_manager(settings: Json) -> Json:
    """The HTTP connection manager inside a configuration, to be changed."""
    chain = settings["static_resources"]["listeners"][0]["filter_chains"][0]
    found: Json = chain["filters"][0]["typed_config"]
    return found


def ext_proc(settings: Json) -> Json:
    """The ext_proc filter inside a configuration, to be changed."""
    filters = connection_manager(settings)["http_filters"]
    [found] = [row["typed_config"] for row in filters if row["name"] == "envoy.filters.http.ext_proc"]
    assert isinstance(found, dict)
    return found


def route(settings: Json) -> Json:
    """The one route inside a configuration, to be changed."""
    found: Json = connection_manager(settings)["route_config"]["virtual_hosts"][0]["routes"][0]
    return found


@asynccontextmanager
async def picker_process(
    transport: Transport, endpoint: str, port: str = "0", certificates: str = ""
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A stub picker in a process of its own, and its address."""
    command = (sys.executable, "-m", "tests.data_plane.stub_server", transport, endpoint, port, certificates)
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process, f"127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
