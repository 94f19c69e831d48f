"""Tests of readiness: when the picker becomes ready, and the reason it gives until then."""

import pytest
from tests.epp.parts import make

from kvist_epp.app.readiness import Readiness
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.http2.grpc_health import Health
from kvist_epp.settings.settings import Settings

ONE = EndpointSet((Endpoint(name="e", namespace="t", address="10.0.0.1", port=80),))


class Cold(EndpointRegistry):
    """Registry of which a test sets the endpoints with an index that has not caught up."""

    behind: tuple[str, ...] = ()

    def cold(self) -> list[str]:
        """Return the names that the test has set."""
        return list(self.behind)


@pytest.fixture
async def registry() -> Cold:
    """Return the registry of a picker without I/O."""
    parts = make(0)
    return Cold(Settings(), parts.director, parts.clock, scrape_interval=0.0)


@pytest.mark.parametrize("fleet", [EndpointSet(()), ONE], ids=["empty", "one"])
async def test_it_is_ready_when_the_endpoints_are_listed(registry: Cold, fleet: EndpointSet) -> None:
    """An empty list of endpoints is enough; until then the reason says what is waited for and why."""
    health = Health()
    readiness = Readiness(registry, health, 20)
    readiness.update()
    assert not health.ready
    assert readiness.not_ready_reason("") == "the endpoints are not listed yet"
    assert readiness.not_ready_reason("no such file") == "the endpoints are not listed yet: no such file"

    registry.follow(fleet)
    readiness.update()
    assert (health.ready, readiness.not_ready_reason(), readiness.not_ready_reason("gone again")) == (
        True,
        "",
        "",
    )


async def test_it_waits_for_the_index_until_the_timeout(registry: Cold) -> None:
    """The reason names what has not caught up; after the time-out the picker is ready all the same."""
    health, clock = Health(), registry.clock
    readiness = Readiness(registry, health, 20, conditions=[lambda: "peers"])
    registry.behind = ("t/e",)
    registry.follow(ONE)
    readiness.update()
    assert readiness.not_ready_reason() == "the index has not caught up with the KV events of t/e, peers"
    clock.now += 20  # type: ignore[attr-defined]
    readiness.update()
    assert (health.ready, readiness.not_ready_reason()) == (True, "")


@pytest.mark.parametrize("reached", [True, False])
async def test_once_stopped_it_is_never_ready_again(registry: Cold, reached: bool) -> None:
    """A draining picker never becomes ready again, and its reason is the drain whatever else is wrong."""
    health = Health()
    readiness = Readiness(registry, health, 20)
    if reached:
        registry.follow(ONE)
        readiness.update()
    readiness.stop("draining")
    registry.follow(EndpointSet(()))
    readiness.update()
    assert (health.ready, readiness.not_ready_reason(), readiness.not_ready_reason("no file")) == (
        False,
        "draining",
        "draining",
    )
