"""Probes: what is asked, and what the answers mean. Asked from the node, as a kubelet does.

One thing is quicker than on a real node: until a container has once answered it is asked several times a
second, whatever ``periodSeconds`` says, so that tests do not wait for periods made for engines that load for
minutes. How long it may take is as given: ``failureThreshold`` periods.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .follow import Json

EAGER_SECONDS: Final = 0.25
Execute = Callable[[list[str], float], Awaitable[int]]
"""A command in the container, and seconds; its exit code. Raises TimeoutError."""


@dataclass(frozen=True)
class Asker:
    """Asks one container."""

    address: str
    """Of its pod."""
    ports: dict[str, int]
    """By name."""
    execute: Execute

    async def good(self, probe: Json) -> bool:
        """Whether the answer is the one that is hoped for, in time."""
        seconds = probe.get("timeoutSeconds", 1)
        try:
            async with asyncio.timeout(seconds):
                return await self._asked(probe, seconds)
        except (OSError, TimeoutError, aiohttp.ClientError, grpc.RpcError):
            return False

    async def _asked(self, probe: Json, seconds: float) -> bool:
        if "httpGet" in probe:
            return 200 <= await self.get(probe["httpGet"]) < 400
        if "tcpSocket" in probe:
            return await self._connects(probe["tcpSocket"])
        if "grpc" in probe:
            return await self._serves(probe["grpc"])
        return await self.execute(probe["exec"]["command"], seconds) == 0

    def port(self, given: int | str) -> int:
        """A number, or the name of a container's port."""
        return given if isinstance(given, int) else self.ports.get(given) or int(given)

    async def get(self, action: Json) -> int:
        """Status of an ``httpGet``."""
        scheme = action.get("scheme", "HTTP").lower()
        host = action.get("host") or self.address
        url = f"{scheme}://{host}:{self.port(action['port'])}{action.get('path', '/')}"
        headers = {h["name"]: h["value"] for h in action.get("httpHeaders", [])} | {
            "User-Agent": "kube-probe"
        }
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False, force_close=True)) as session,
            session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            return response.status

    async def _connects(self, action: Json) -> bool:
        _, writer = await asyncio.open_connection(
            action.get("host") or self.address, self.port(action["port"])
        )
        writer.close()
        return True

    async def _serves(self, action: Json) -> bool:
        asked = health_pb2.HealthCheckRequest(service=action.get("service", ""))
        async with grpc.aio.insecure_channel(f"{self.address}:{action['port']}") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(asked)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass
class Probing:
    """One probe of one start of a container, counted."""

    asker: Asker
    probe: Json

    @property
    def _period(self) -> float:
        return float(self.probe.get("periodSeconds", 10))

    async def first(self) -> bool:
        """Whether it has answered well within the time that it may fail."""
        deadline = asyncio.get_running_loop().time() + self.allowed
        while not await self.asker.good(self.probe):
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(min(self._period, EAGER_SECONDS))
        return True

    @property
    def allowed(self) -> float:
        """Seconds until a container that never answers has failed."""
        delay = float(self.probe.get("initialDelaySeconds", 0))
        return delay + self._period * int(self.probe.get("failureThreshold", 3))

    async def watch(self, told: Callable[[bool], None], *, good: bool) -> None:
        """Call ``told`` at every turn: bad after ``failureThreshold`` answers in a row, good after
        ``successThreshold``."""
        row = 0
        while True:
            await asyncio.sleep(self._period if good else min(self._period, EAGER_SECONDS))
            answer = await self.asker.good(self.probe)
            row = 0 if answer == good else row + 1
            if row and row >= self._needed(good=answer):
                good, row = answer, 0
                told(good)

    def _needed(self, *, good: bool) -> int:
        key, usual = ("successThreshold", 1) if good else ("failureThreshold", 3)
        return int(self.probe.get(key, usual))
