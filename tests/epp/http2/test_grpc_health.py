"""The health service's five names."""

import pytest

from kvist_epp.errors import ProtocolError
from kvist_epp.http2.grpc_health import Health, service_of
from kvist_epp.http2.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListResponse
from kvist_epp.names import LIVENESS, READINESS

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def _status(answer: bytes) -> int:
    return HealthCheckResponse.FromString(answer).status


@pytest.mark.parametrize("service", READINESS)
def test_readiness_names(service: str) -> None:
    """Each readiness name follows readiness, which is false at first."""
    health = Health()
    seen = [_status(health.answer(service))]
    for ready in (True, False):
        health.set(ready)
        seen.append(_status(health.answer(service)))

    assert seen == [NOT_SERVING, SERVING, NOT_SERVING]


def test_liveness_serves_from_the_start() -> None:
    """Liveness is not readiness."""
    assert _status(Health().answer(LIVENESS)) == SERVING


def test_unknown_names() -> None:
    """An unknown name is SERVICE_UNKNOWN, as ``Watch`` must report it."""
    assert Health().check(HealthCheckRequest(service="nobody").SerializeToString()) is None
    assert _status(Health().answer("nobody")) == HealthCheckResponse.SERVICE_UNKNOWN


def test_list_has_all_five() -> None:
    """The list has each of the five names with its own status."""
    found = HealthListResponse.FromString(Health().list()).statuses

    assert {name: response.status for name, response in found.items()} == {
        LIVENESS: SERVING,
        **dict.fromkeys(READINESS, NOT_SERVING),
    }


def test_watchers_receive_changes_only() -> None:
    """A watcher receives the present state and each change, no repetition, and nothing after it has
    stopped."""
    health, heard = Health(), list[int]()
    stop = health.watch("readiness", lambda answer: heard.append(_status(answer)))
    for ready in (False, True, True, False):
        health.set(ready)
    stop()
    health.set(True)

    assert heard == [NOT_SERVING, SERVING, NOT_SERVING]


def test_liveness_watchers_are_answered_once() -> None:
    """Liveness never changes."""
    health, heard = Health(), list[int]()
    health.watch(LIVENESS, lambda answer: heard.append(_status(answer)))
    health.set(True)

    assert heard == [SERVING]


def test_requests() -> None:
    """A request names its service; bytes that are no request raise ``ProtocolError``."""
    assert service_of(b"") == ""
    assert service_of(b"\x0a\x08liveness") == "liveness"
    with pytest.raises(ProtocolError):
        service_of(b"\xff")
