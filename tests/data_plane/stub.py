"""A picker that records its requests, answers as the test says, and records the reports of gateways."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from tests.fakes.deferred import deferred

from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.extproc.pick_request import Decision, PendingResult, PickRequest, PickResult
from kvist_epp.extproc.response import ObservedResponse
from kvist_epp.extproc.service import ext_proc_methods
from kvist_epp.http2.call import Server
from kvist_epp.http2.grpc_health import Health
from kvist_epp.http2.grpc_server import serve_grpc
from kvist_epp.http2.server import serve_http2
from kvist_epp.http2.tls import Certificates
from kvist_epp.names import LASTING_METHODS

Transport = Literal["fast", "grpc"]
Answer = Callable[[PickRequest], Decision | Awaitable[Decision]]


@dataclass
class StubPicker:
    """Answers with ``answer``, and keeps every question and every report."""

    answer: Answer = lambda _: PickResult(("127.0.0.1:1",))
    observe_responses: bool = False
    seen: list[ObservedResponse] = field(default_factory=list)
    asks: list[PickRequest] = field(default_factory=list)
    ended: list[AccessLogEntry] = field(default_factory=list)
    protocol_errors: list[str] = field(default_factory=list)
    health: Health = field(default_factory=Health)
    reported: asyncio.Event = field(default_factory=asyncio.Event)

    def decide(self, ask: PickRequest) -> Decision | PendingResult:
        """Keep the question, give the answer."""
        self.asks.append(ask)
        return deferred(self.answer(ask))

    def picks(self, *endpoints: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Answer with these endpoints."""
        picked = PickResult(endpoints, headers)
        self.answer = lambda _: picked

    def note(self, entries: list[AccessLogEntry]) -> None:
        """Keep what the access log reports."""
        self.ended += entries
        self.reported.set()

    def _responded(self, seen: ObservedResponse) -> None:
        self.seen.append(seen)
        self.reported.set()

    async def sees(self, count: int) -> list[ObservedResponse]:
        """Wait until the streams have reported ``count`` responses."""
        while len(self.seen) < count:
            self.reported.clear()
            await self.reported.wait()
        return self.seen

    async def reports(self, count: int) -> list[AccessLogEntry]:
        """Wait until the access log has reported ``count`` requests."""
        while len(self.ended) < count:
            self.reported.clear()
            await self.reported.wait()
        return self.ended

    async def serve(
        self,
        transport: Transport,
        port: int = 0,
        tls: Certificates | None = None,
        host: str = "127.0.0.1",
    ) -> Server:
        """Serve it, ready; on port 0 the system chooses one."""
        self.health.set(True)
        table = ext_proc_methods(
            self.decide,
            self.note,
            self.health,
            observe_responses=self.observe_responses,
            on_response=self._responded,
            on_error=lambda name, *_: self.protocol_errors.append(name),
        )
        if transport == "grpc":
            name = f"[{host}]" if ":" in host else host
            return await serve_grpc(table, name, port, tls=tls, lasting=LASTING_METHODS)
        context = tls.context if tls else None
        return await serve_http2(table, host, port, ssl=context, lasting=LASTING_METHODS)
