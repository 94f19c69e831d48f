"""Whether the picker may be asked, under the five names that gateways and probes use.

Source: gRPC health checking protocol (``grpc.health.v1``); the names are the Endpoint Picker Protocol's, the
llm-d chart's and Envoy's (``kvist_epp.names``). ``liveness`` always serves: a picker that is not ready must
not be restarted for it.
"""

from collections.abc import Callable

from google.protobuf.message import DecodeError

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListResponse
from kvist_epp.names import LIVENESS, READINESS

Watcher = Callable[[bytes], None]


class Health:
    """The health service's state; not ready at first."""

    def __init__(self) -> None:
        self._ready = False
        self._watchers: dict[object, tuple[str, Watcher]] = {}

    @property
    def ready(self) -> bool:
        """Whether requests may be sent here."""
        return self._ready

    def set(self, ready: bool) -> None:
        """Change readiness; those who watch it are told when it differs."""
        if ready == self._ready:
            return
        self._ready = ready
        for service, watcher in list(self._watchers.values()):
            if service in READINESS:
                watcher(self.answer(service))

    def knows(self, service: str) -> bool:
        """Whether the name is one of the five."""
        return service == LIVENESS or service in READINESS

    def answer(self, service: str) -> bytes:
        """A serialised ``HealthCheckResponse``; SERVICE_UNKNOWN for a name that is none of the five."""
        return self._response(service).SerializeToString()

    def list(self) -> bytes:
        """A serialised ``HealthListResponse`` of all five names."""
        names = (LIVENESS, *READINESS)
        return HealthListResponse(statuses={n: self._response(n) for n in names}).SerializeToString()

    def watch(self, service: str, watcher: Watcher) -> Callable[[], None]:
        """Tell ``watcher`` the answer now and after every change; returns what ends the watch."""
        watch = object()
        self._watchers[watch] = (service, watcher)
        watcher(self.answer(service))

        def stop() -> None:
            self._watchers.pop(watch, None)

        return stop

    def _response(self, service: str) -> HealthCheckResponse:
        if not self.knows(service):
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        serving = self._ready or service == LIVENESS
        status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=status)


def service_of(message: bytes) -> str:
    """The name that a serialised ``HealthCheckRequest`` asks about; raises `ProtocolError`."""
    try:
        return HealthCheckRequest.FromString(message).service
    except DecodeError as error:
        raise ProtocolError(f"health request of {len(message)} bytes cannot be decoded") from error
