"""The gRPC methods both servers serve, free of any transport: ext_proc, access log, health.

Each method starts a `Call` on a `Sink` (``call.py``). The decision is usually made synchronously; one that
comes later (`DeferredResult`, a request that waits in a queue; or any awaitable) is cancelled with its call.
"""

import asyncio
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from kvist_epp.errors import PickError, ProtocolError
from kvist_epp.extproc import access_log as accesslog
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.extproc.pick_request import Decision, DeferredResult, PickRequest, PickResult
from kvist_epp.extproc.response import ObservedResponse
from kvist_epp.extproc.session import ExtProcSession, Step
from kvist_epp.http2.call import Method, Sink
from kvist_epp.http2.grpc_health import Health, service_of
from kvist_epp.names import (
    ACCESS_LOG_METHOD,
    HEALTH_CHECK_METHOD,
    HEALTH_LIST_METHOD,
    HEALTH_WATCH_METHOD,
    PROCESS_METHOD,
)

Decide = Callable[[PickRequest], Decision | Awaitable[Decision]]
"""Answers or raises `PickError`; an awaitable answer is cancelled when the request goes away."""

ResponseCallback = Callable[[ObservedResponse], None]
"""Told what was seen of a response, where responses are observed."""

ErrorCounter = Callable[[str, int], None]
"""Counts what a peer or the picker got wrong: a name of ``PROTOCOL_ERRORS`` and how many."""

PROTOCOL_ERRORS: Final = ("ext-proc-message", "access-log-message", "access-log-entry", "pick-failed")

_INVALID_ARGUMENT: Final = 3
_NOT_FOUND: Final = 5
_INTERNAL: Final = 13

_log = logging.getLogger(__name__)


def ext_proc_methods(
    decide: Decide,
    ended: Callable[[list[AccessLogEntry]], None],
    health: Health,
    *,
    on_response: ResponseCallback | None = None,
    on_error: ErrorCounter = lambda _name, _count: None,
) -> dict[str, Method]:
    """Every method by its ``/package.Service/Method``; ``ended`` gets what the access log reports.

    With ``on_response`` the ext_proc streams stay open to the end of the response, and it is told of each.
    """
    tell, observe = on_response or _untold, on_response is not None
    return {
        PROCESS_METHOD: lambda sink: _Process(
            sink, decide, ExtProcSession(observe_responses=observe), on_error, tell
        ),
        ACCESS_LOG_METHOD: lambda sink: _AccessLogs(sink, ended, on_error),
        **health_methods(health),
    }


def model_header_methods(
    decide: Decide, labels: tuple[str, ...], health: Health, *, on_error: ErrorCounter
) -> dict[str, Method]:
    """ext_proc for a filter that only sets these headers, and health; no access log is due there."""
    return {
        PROCESS_METHOD: lambda sink: _Process(sink, decide, ExtProcSession(labels=labels), on_error, _untold),
        **health_methods(health),
    }


def health_methods(health: Health) -> dict[str, Method]:
    """The health service alone, for the health port."""
    return {
        HEALTH_CHECK_METHOD: lambda sink: _Check(sink, health),
        HEALTH_WATCH_METHOD: lambda sink: _Watch(sink, health),
        HEALTH_LIST_METHOD: lambda sink: _List(sink, health),
    }


def _untold(_seen: ObservedResponse) -> None:
    pass


class _Process:
    """One ext_proc stream."""

    __slots__ = ("_decide", "_exchange", "_half_closed", "_on_error", "_sink", "_task", "_tell")

    def __init__(
        self,
        sink: Sink,
        decide: Decide,
        exchange: ExtProcSession,
        on_error: ErrorCounter,
        tell: ResponseCallback,
    ) -> None:
        self._sink = sink
        self._decide = decide
        self._exchange = exchange
        self._on_error = on_error
        self._tell = tell
        self._task: asyncio.Task[None] | DeferredResult | None = None
        self._half_closed = False

    def message(self, data: bytes) -> None:
        try:
            step = self._exchange.feed(data)
        except ProtocolError as error:
            self._on_error("ext-proc-message", 1)
            self._sink.close(_INVALID_ARGUMENT, str(error))
            return
        self._do(step)

    def half_closed(self) -> None:
        self._half_closed = True
        if self._task is None:
            self._gone()
            self._sink.close()

    def cancelled(self) -> None:
        self._gone()
        if self._task is not None:
            self._task.cancel()

    def _gone(self) -> None:
        if (seen := self._exchange.on_closed()) is not None:
            self._tell(seen)

    def _do(self, step: Step) -> None:
        for answer in step.replies:
            self._sink.send(answer)
        if step.seen is not None:
            self._tell(step.seen)
        if step.ask is not None:
            self._ask(step.ask)
        elif step.end or self._half_closed:
            self._gone()
            self._sink.close()

    def _ask(self, ask: PickRequest) -> None:
        try:
            decision = self._decide(ask)
        except PickError as error:
            decision = error
        except Exception as error:  # noqa: BLE001  a bug in the picker must cost one request, not the connection
            self._fail(error)
            return
        if isinstance(decision, (PickResult, PickError)):
            self._do(self._exchange.on_decision(decision))
        elif isinstance(decision, DeferredResult):
            self._task = decision
            decision.then(self._decided)
        else:
            self._task = asyncio.ensure_future(self._wait(decision))

    async def _wait(self, awaitable: Awaitable[Decision]) -> None:
        try:
            decision: Decision | Exception = await awaitable
        except Exception as error:  # noqa: BLE001  as above
            decision = error
        self._decided(decision)

    def _decided(self, decision: Decision | Exception) -> None:
        self._task = None
        if isinstance(decision, (PickResult, PickError)):
            self._do(self._exchange.on_decision(decision))
        else:
            self._fail(decision)

    def _fail(self, error: Exception) -> None:
        """Where it failed, without the exception's text: that may quote the prompt."""
        self._on_error("pick-failed", 1)
        where = "".join(traceback.format_tb(error.__traceback__))
        _log.error("pick failed with %s\n%s", type(error).__name__, where)
        self._sink.close(_INTERNAL, "the pick failed")


class _AccessLogs:
    """Envoy's access log: it is never answered before it ends; what cannot be read is counted and skipped."""

    __slots__ = ("_ended", "_on_error", "_sink")

    def __init__(
        self, sink: Sink, ended: Callable[[list[AccessLogEntry]], None], on_error: ErrorCounter
    ) -> None:
        self._sink = sink
        self._ended = ended
        self._on_error = on_error

    def message(self, data: bytes) -> None:
        try:
            entries = accesslog.decode(data, partial(self._on_error, "access-log-entry"))
        except ProtocolError:
            self._on_error("access-log-message", 1)
            return
        if entries:
            self._ended(entries)

    def half_closed(self) -> None:
        self._sink.send(b"")
        self._sink.close()

    def cancelled(self) -> None:
        pass


class _Unary(ABC):
    """A call that answers its one request."""

    __slots__ = ("_health", "_sink")

    def __init__(self, sink: Sink, health: Health) -> None:
        self._sink = sink
        self._health = health

    def message(self, data: bytes) -> None:
        try:
            self._answer(data)
        except ProtocolError as error:
            self._sink.close(_INVALID_ARGUMENT, str(error))

    @abstractmethod
    def _answer(self, data: bytes, /) -> None: ...

    def half_closed(self) -> None:
        self._sink.close(_INTERNAL, "ended without a request")

    def cancelled(self) -> None:  # noqa: B027  nothing is under way
        pass


class _Check(_Unary):
    __slots__ = ()

    def _answer(self, data: bytes, /) -> None:
        service = service_of(data)
        if not self._health.knows(service):
            self._sink.close(_NOT_FOUND, "unknown service")
            return
        self._sink.send(self._health.answer(service))
        self._sink.close()


class _List(_Unary):
    __slots__ = ()

    def _answer(self, _: bytes, /) -> None:
        self._sink.send(self._health.list())
        self._sink.close()


class _Watch(_Unary):
    """Stays open until the client leaves."""

    __slots__ = ("_stop",)

    def __init__(self, sink: Sink, health: Health) -> None:
        super().__init__(sink, health)
        self._stop: Callable[[], None] = lambda: None

    def _answer(self, data: bytes, /) -> None:
        self._stop()
        self._stop = self._health.watch(service_of(data), self._sink.send)

    def half_closed(self) -> None:
        pass

    def cancelled(self) -> None:
        self._stop()
