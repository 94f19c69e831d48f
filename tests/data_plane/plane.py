"""A client, a real Envoy, a stub picker and two upstreams, put together."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from tests.data_plane.stub import StubPicker, Transport
from tests.data_plane.upstream import Upstream

from kvist_epp.wire.call import Server
from kvist_sim.envoy import Envoy, Gateway, Json, Mode, config

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
    **gateway: Any,
) -> AsyncIterator[Plane]:
    """All of it running; ``tweak`` changes Envoy's configuration, ``gateway`` the fields of `Gateway`."""
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(Upstream()) for _ in range(2)]
        picker = StubPicker(observe_responses=observe_responses)
        picker.picks(second.address)
        server = await picker.serve(transport)
        stack.push_async_callback(server.close)
        envoy = await stack.enter_async_context(
            envoy_for(f"127.0.0.1:{server.port}", mode, (first, second), tweak=tweak, **gateway)
        )
        client = await stack.enter_async_context(aiohttp.ClientSession(envoy.url))
        yield Plane(client, envoy, picker, server, (first, second))


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
    found: Json = connection_manager(settings)["http_filters"][0]["typed_config"]
    return found


def route(settings: Json) -> Json:
    """The one route inside a configuration, to be changed."""
    found: Json = connection_manager(settings)["route_config"]["virtual_hosts"][0]["routes"][0]
    return found
