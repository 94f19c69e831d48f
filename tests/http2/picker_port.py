"""The real server with the picker's real methods, in this process; only the decision is the test's."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.fakes.deferred import AwaitedResult

from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.extproc.pick_request import Decision, PendingResult, PickRequest, PickResult
from kvist_epp.extproc.service import ext_proc_methods
from kvist_epp.http2.grpc_health import Health
from kvist_epp.http2.limits import Limits
from kvist_epp.http2.server import Http2Server, serve_http2
from kvist_epp.http2.tls import Certificates
from kvist_epp.names import LASTING_METHODS

ENGINE = "10.0.0.1:8000"


class PickerPort:
    """A listening port, the requests that arrived there, and their decisions."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.health = Health()
        self.ended: list[AccessLogEntry] = []
        self.asked: list[PickRequest] = []
        self.waiting: list[asyncio.Future[Decision]] = []
        self.defers = False
        """Whether decisions wait until ``decide`` is called."""
        self.server: Http2Server
        self._changed = asyncio.Event()

    @property
    def target(self) -> str:
        """Return the address for clients."""
        return f"127.0.0.1:{self.server.port}"

    def decide(self) -> None:
        """Pick an endpoint for every waiting request."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(PickResult((ENGINE,)))

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a request or an access log that makes the condition true."""
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _decided(self, ask: PickRequest) -> Decision | PendingResult:
        self.asked.append(ask)
        self._changed.set()
        if not self.defers:
            return PickResult((ENGINE,))
        future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._changed.set())
        self.waiting.append(future)
        return AwaitedResult(future)

    def _logged(self, entries: list[AccessLogEntry]) -> None:
        self.ended.extend(entries)
        self._changed.set()


@asynccontextmanager
async def opened(tls: Certificates | None, **limits: Any) -> AsyncIterator[PickerPort]:
    """A ready picker's port."""
    port = PickerPort(Limits(message_bytes=33 << 20, **limits))
    port.health.set(True)
    # the clients are no Envoys, and end their calls as one does
    served = ext_proc_methods(port._decided, port._logged, port.health, from_envoy=True)
    ssl = tls.context if tls is not None else None
    port.server = await serve_http2(served, "127.0.0.1", 0, port.limits, ssl=ssl, lasting=LASTING_METHODS)
    try:
        yield port
    finally:
        await port.server.close()
