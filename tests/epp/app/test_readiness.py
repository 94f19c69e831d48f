"""When the picker may be asked, and what it says until then."""

import pytest
from tests.epp.parts import make

from kvist_epp.app.readiness import Gate
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.http2.grpc_health import Health
from kvist_epp.settings.settings import Settings

ONE = EndpointSet((Endpoint(name="e", namespace="t", address="10.0.0.1", port=80),))


class Cold(EndpointRegistry):
    """Whose index lags behind as long as it is told to."""

    behind: tuple[str, ...] = ()

    def cold(self) -> list[str]:
        """Which endpoints are."""
        return list(self.behind)


@pytest.fixture
async def registry() -> Cold:
    """Return the registry of a picker without I/O."""
    parts = make(0)
    return Cold(Settings(), parts.director, parts.clock, scrape=False)


@pytest.mark.parametrize("fleet", [EndpointSet(()), ONE], ids=["empty", "one"])
async def test_it_opens_when_the_fleet_is_listed(registry: Cold, fleet: EndpointSet) -> None:
    """A listed fleet is enough, also an empty one; until then it says that it waits, and why it must."""
    health = Health()
    gate = Gate(registry, health, 20)
    gate.look()
    assert not health.ready
    assert gate.not_ready("") == "the fleet is not listed yet"
    assert gate.not_ready("no such file") == "the fleet is not listed yet: no such file"

    registry.follow(fleet)
    gate.look()
    assert (health.ready, gate.why_shut, gate.not_ready("gone again")) == (True, "", "")


async def test_it_waits_for_the_index_but_not_for_ever(registry: Cold) -> None:
    """What lags behind is named; when patience is over it opens all the same."""
    health, clock = Health(), registry.clock
    gate = Gate(registry, health, 20, conditions=[lambda: "peers"])
    registry.behind = ("t/e",)
    registry.follow(ONE)
    gate.look()
    assert gate.why_shut == "events of t/e are not caught up with, peers"
    clock.now += 20  # type: ignore[attr-defined]
    gate.look()
    assert (health.ready, gate.why_shut) == (True, "")


@pytest.mark.parametrize("opened", [True, False])
async def test_once_shut_it_stays_shut(registry: Cold, opened: bool) -> None:
    """A picker that ends never becomes ready again, and says that it drains, whatever else is wrong."""
    health = Health()
    gate = Gate(registry, health, 20)
    if opened:
        registry.follow(ONE)
        gate.look()
    gate.shut("draining")
    registry.follow(EndpointSet(()))
    gate.look()
    assert (health.ready, gate.why_shut, gate.not_ready("no file")) == (False, "draining", "draining")
