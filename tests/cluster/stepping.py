"""The operator without its loops: looked at, worked through and thrown away when the test says so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.cluster.control_plane import ControlPlane
from tests.cluster.operated import administrator

from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.cluster_api import Hook, Moment, Write
from kvist_operator.cluster.pool_cache import PoolKey
from kvist_operator.process.runtime import Operator
from kvist_operator.process.settings import OperatorSettings

ROUNDS = 10


class Killed(BaseException):
    """The operator's process has ended here."""


class Fuse:
    """Counts moments before and after writes, and ends the operator at one of them; 0 = never."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.moments: list[str] = []

    async def __call__(self, moment: Moment, write: Write) -> None:
        """Count a write; raise Killed at the chosen one."""
        self.moments.append(f"{moment} {write.verb} {write.target.kind} {write.target.name}")
        if len(self.moments) == self.at:
            raise Killed(self.moments[-1])


@asynccontextmanager
async def fresh(plane: ControlPlane, space: str, hook: Hook | None = None) -> AsyncIterator["Stepper"]:
    """An operator that knows nothing but what the cluster says."""
    async with administrator(plane, hook) as server:
        operator = Operator(OperatorSettings(namespaces=space), server, _deaf)
        try:
            async with operator.pickers:
                yield Stepper(operator, server)
        finally:
            await operator.models.close()


class Stepper:
    """Runs one operator step by step."""

    def __init__(self, operator: Operator, server: ApiServer) -> None:
        self.operator = operator
        self.server = server

    async def settle(self) -> None:
        """Look, and work until there is nothing left to write."""
        await self.operator.discover()
        for _ in range(ROUNDS):
            before = self.writes
            for key in self.operator.cache.pools():
                await self._work_on(key)
            if self.writes == before:
                return
            await self.operator.informer.resync()
        raise AssertionError(f"it does not come to rest: {self.server.connection.requests}")

    @property
    def writes(self) -> int:
        """Requests that write."""
        told = self.server.connection.requests
        return sum(number for key, number in told.items() if not key.startswith("GET"))

    async def _work_on(self, key: PoolKey) -> None:
        again: float | None = 0.0
        while again == 0.0:
            again = await self.operator.reconciler.reconcile(key)


async def _deaf(*_: object) -> None:
    await asyncio.Event().wait()
