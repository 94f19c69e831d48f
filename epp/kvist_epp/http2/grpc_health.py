"""The gRPC health service (``grpc.health.v1``): whether the picker may be asked, under its five names.

The names are the Endpoint Picker Protocol's, the llm-d chart's and Envoy's (``kvist_epp.names``).
``liveness`` always serves: a picker that is not ready must not be restarted for it.
"""

from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from kvist_epp.errors import ProtocolError
from kvist_epp.http2.call import Method, Sink
from kvist_epp.http2.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListResponse
from kvist_epp.names import (
    HEALTH_CHECK_METHOD,
    HEALTH_LIST_METHOD,
    HEALTH_WATCH_METHOD,
    LIVENESS,
    READINESS,
)

Watcher = Callable[[bytes], None]

_INVALID_ARGUMENT: Final = 3
_NOT_FOUND: Final = 5
_INTERNAL: Final = 13


class Health:
    """State of the health service; not ready at first."""

    def __init__(self) -> None:
        self.ready = False
        """Whether requests may be sent here; changed by ``set``."""
        self._watchers: dict[object, tuple[str, Watcher]] = {}

    def set(self, ready: bool) -> None:
        """Change readiness; watchers of the readiness names are called if it differs."""
        if ready == self.ready:
            return
        self.ready = ready
        for service, watcher in list(self._watchers.values()):
            if service in READINESS:
                watcher(self.answer(service))

    def check(self, request: bytes) -> bytes | None:
        """Answer a serialised ``HealthCheckRequest``; return None for any other name than the five.

        Raises `ProtocolError`.
        """
        service = service_of(request)
        return self.answer(service) if service == LIVENESS or service in READINESS else None

    def answer(self, service: str) -> bytes:
        """Return a serialised ``HealthCheckResponse``, SERVICE_UNKNOWN for any other name than the five."""
        return self._response(service).SerializeToString()

    def list(self) -> bytes:
        """Return a serialised ``HealthListResponse`` of all five names."""
        names = (LIVENESS, *READINESS)
        return HealthListResponse(statuses={n: self._response(n) for n in names}).SerializeToString()

    def watch(self, service: str, watcher: Watcher) -> Callable[[], object]:
        """Call ``watcher`` with the answer now and after every change; return a function that stops this."""
        watch = object()
        self._watchers[watch] = (service, watcher)
        watcher(self.answer(service))
        return lambda: self._watchers.pop(watch, None)

    def _response(self, service: str) -> HealthCheckResponse:
        if service != LIVENESS and service not in READINESS:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        serving = self.ready or service == LIVENESS
        status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=status)


def health_methods(health: Health) -> dict[str, Method]:
    """Return the methods of the health service by their ``/package.Service/Method``."""
    return {
        HEALTH_CHECK_METHOD: lambda sink: _UnaryCall(sink, health.check),
        HEALTH_WATCH_METHOD: lambda sink: _WatchCall(sink, health),
        HEALTH_LIST_METHOD: lambda sink: _UnaryCall(sink, lambda _: health.list()),
    }


def service_of(message: bytes) -> str:
    """Return the name that a serialised ``HealthCheckRequest`` asks about; raises `ProtocolError`."""
    try:
        return HealthCheckRequest.FromString(message).service
    except DecodeError as error:
        raise ProtocolError(f"health request of {len(message)} bytes cannot be decoded") from error


class _UnaryCall:
    """A call that answers its one request; ``answer`` returns None for an unknown service."""

    __slots__ = ("_answer", "_sink")

    def __init__(self, sink: Sink, answer: Callable[[bytes], bytes | None]) -> None:
        self._sink = sink
        self._answer = answer

    def on_message(self, data: bytes) -> None:
        try:
            answer = self._answer(data)
        except ProtocolError as error:
            self._sink.close(_INVALID_ARGUMENT, str(error))
            return
        if answer is None:
            self._sink.close(_NOT_FOUND, "unknown service")
        else:
            self._sink.send(answer)
            self._sink.close()

    def on_half_closed(self) -> None:
        self._sink.close(_INTERNAL, "ended without a request")

    def on_cancelled(self) -> None:
        pass


class _WatchCall:
    """A call that stays open until the client leaves."""

    __slots__ = ("_health", "_sink", "_stop")

    def __init__(self, sink: Sink, health: Health) -> None:
        self._sink = sink
        self._health = health
        self._stop: Callable[[], object] = lambda: None

    def on_message(self, data: bytes) -> None:
        self._stop()
        try:
            self._stop = self._health.watch(service_of(data), self._sink.send)
        except ProtocolError as error:
            self._sink.close(_INVALID_ARGUMENT, str(error))

    def on_half_closed(self) -> None:
        pass

    def on_cancelled(self) -> None:
        self._stop()
