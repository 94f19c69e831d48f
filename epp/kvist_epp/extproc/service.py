"""The gRPC methods of the picker's ports, free of any transport: ext_proc, the access log, health.

Both servers (``http2.server``, ``http2.grpc_server``) run them. A method starts a ``Call`` on a ``Sink``
(``http2.call``). The decision is usually made at once; a `PendingResult`, for a request that waits in the
queue, is cancelled with its call.
"""

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from kvist_epp.errors import PickError, ProtocolError, traceback_without_text
from kvist_epp.extproc.access_log import AccessLogCall, AccessLogEntry
from kvist_epp.extproc.pick_request import (
    NOTHING,
    Decision,
    PendingResult,
    PickRequest,
    PickResult,
    SessionStep,
)
from kvist_epp.extproc.protocol_errors import ErrorCounter
from kvist_epp.extproc.response import FirstToken, ObservedResponse
from kvist_epp.extproc.session import ExtProcSession
from kvist_epp.http2.call import Call, Method, Sink
from kvist_epp.http2.grpc_health import Health, health_methods
from kvist_epp.names import ACCESS_LOG_METHOD, PROCESS_METHOD

Decide = Callable[[PickRequest], Decision | PendingResult]
"""Makes the decision, or raises `PickError`."""

_INVALID_ARGUMENT: Final = 3
_INTERNAL: Final = 13

_OTHER_GATEWAY: Final = (
    "a gateway other than Envoy calls from %s: each pick names one endpoint, and streams stay open until the"
    " response has ended (docs/guides/attach-gateway.md)"
)

_log = logging.getLogger(__name__)


def ext_proc_methods(
    decide: Decide,
    on_access_log: Callable[[list[AccessLogEntry]], None],
    health: Health,
    *,
    from_envoy: bool | None = None,
    observe_responses: bool = False,
    on_response: Callable[[ObservedResponse], None] = lambda _response: None,
    on_first_token: Callable[[FirstToken], None] = lambda _first: None,
    on_error: ErrorCounter = lambda _kind, _count, _problem: None,
) -> dict[str, Method]:
    """Return every method of the picker by its ``/package.Service/Method``.

    ``from_envoy``: whether an Envoy makes the calls; None: as their metadata says.
    With ``observe_responses``, and for gateways other than Envoy, ext_proc streams stay open to the end of
    the response. ``on_response`` gets the report on each; ``on_first_token`` gets the first output of those
    that are streamed, when it passes.
    """
    is_envoys = _Callers(from_envoy).is_envoys

    def process(sink: Sink) -> Call:
        session = ExtProcSession(
            observe_responses=observe_responses,
            from_envoy=is_envoys(sink),
            trace_headers=sink.trace_headers,
        )
        return _ProcessCall(sink, decide, session, on_error, on_response, on_first_token)

    return {
        PROCESS_METHOD: process,
        ACCESS_LOG_METHOD: lambda sink: AccessLogCall(sink, on_access_log, on_error),
        **health_methods(health),
    }


def model_header_methods(
    decide: Decide,
    labels: tuple[str, ...],
    health: Health,
    *,
    on_error: ErrorCounter,
    from_envoy: bool | None = None,
) -> dict[str, Method]:
    """Return ext_proc for a filter that sets the headers ``labels`` and nothing else, and health.

    ``from_envoy``: as for ``ext_proc_methods``.
    """
    is_envoys = _Callers(from_envoy).is_envoys
    return {
        PROCESS_METHOD: lambda sink: _ProcessCall(
            sink,
            decide,
            ExtProcSession(labels=labels, from_envoy=is_envoys(sink)),
            on_error,
            lambda _response: None,
        ),
        **health_methods(health),
    }


class _Callers:
    """Tells calls of Envoys from others, and says in the log that there are others, once."""

    def __init__(self, from_envoy: bool | None) -> None:
        self._from_envoy = from_envoy
        self._said = False

    def is_envoys(self, sink: Sink) -> bool:
        found = sink.from_envoy if self._from_envoy is None else self._from_envoy
        if not (found or self._said):
            self._said = True
            _log.info(_OTHER_GATEWAY, sink.peer)
        return found


class _ProcessCall(msgspec.Struct, eq=False):
    """The gRPC call of one ext_proc stream: passes messages to the session and its requests to the picker."""

    _sink: Sink
    _decide: Decide
    _session: ExtProcSession
    _on_error: ErrorCounter
    _on_response: Callable[[ObservedResponse], None]
    _on_first_token: Callable[[FirstToken], None] = lambda _first: None
    _pending: PendingResult | None = None
    _half_closed: bool = False

    def on_message(self, data: bytes) -> None:
        try:
            step = self._session.feed(data)
        except ProtocolError as error:
            self._on_error("ext-proc-message", 1, f"from {self._sink.peer}: {error}")
            self._sink.close(_INVALID_ARGUMENT, str(error))
            return
        if step is not NOTHING or self._half_closed:
            self._perform(step)

    def on_half_closed(self) -> None:
        self._half_closed = True
        if self._pending is None:
            self._end()
        elif not (self._session.asks_only or self._session.from_envoy):
            # agentgateway ends its side when it has what it wants, or when its client has gone
            self._pending.cancel()
            self._sink.close()

    def on_cancelled(self) -> None:
        self._report_unfinished()
        if self._pending is not None:
            self._pending.cancel()

    def _end(self) -> None:
        self._report_unfinished()
        self._sink.close()

    def _report_unfinished(self) -> None:
        if (observed := self._session.on_closed()) is not None:
            self._on_response(observed)

    def _perform(self, step: SessionStep) -> None:
        for reply in step.replies:
            if type(reply) is bytes:
                self._sink.send(reply)
            else:
                self._sink.send(*reply)
        if step.first_token is not None:
            self._on_first_token(step.first_token)
        if step.observed is not None:
            self._on_response(step.observed)
        if step.request is not None:
            self._pick(step.request)
        elif step.end or self._half_closed:
            self._end()

    def _pick(self, request: PickRequest) -> None:
        try:
            decision = self._decide(request)
        except PickError as error:
            decision = error
        except Exception as error:  # noqa: BLE001  a bug in the picker must cost one request, not the connection
            self._fail(error)
            return
        if isinstance(decision, PendingResult):
            self._pending = decision
            decision.then(self._on_decision)
        else:
            self._perform(self._session.on_decision(decision))

    def _on_decision(self, decision: Decision | Exception) -> None:
        self._pending = None
        if isinstance(decision, (PickResult, PickError)):
            self._perform(self._session.on_decision(decision))
        else:
            self._fail(decision)

    def _fail(self, error: Exception) -> None:
        self._on_error("pick-failed", 1, "")
        _log.error("a pick failed with %s", traceback_without_text(error))
        self._sink.close(_INTERNAL, "the pick failed")
