"""Series of endpoints on the metrics page, while endpoints come and go."""

from tests.epp.parts import Parts, ask, chat, make

from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.names import SESSION_HEADER
from kvist_epp.settings.settings import Settings

PRESENT = 10


def _endpoint(number: int) -> Endpoint:
    return Endpoint(name=f"e{number}", namespace="t", address=f"10.0.{number >> 8}.{number & 255}", port=80)


def _use(parts: Parts, registry: EndpointRegistry, number: int) -> None:
    """Have an endpoint appear in every metric that is kept by endpoint."""
    endpoint, other = _endpoint(number), _endpoint(number + 1)
    director, now = parts.director, parts.clock()
    for session in ("serves", "moves"):
        headers = {SESSION_HEADER: session}
        director.offer(ask(chat(f"{session} {number}"), headers=headers, subset=(endpoint.hostport,)), now)
    served, moved = director.table.find("serves"), director.table.find("moves")
    assert served is not None
    assert moved is not None
    director.tracker.on_cache_truth(served, 16, now)
    director.progress.on_served_elsewhere(moved, other, now)
    for request in (served, moved):
        director.progress.on_ended(request, "access-log", now)
    metrics, name = director.metrics, endpoint.hostport
    for kind in ("stored", "removed", "cleared"):
        metrics.events[name, kind] += 1
    for pairs in (metrics.predicted_loads, metrics.tier_resets):
        pairs[name, "CPU"] += 1
    for counts in (metrics.gaps, metrics.resets, metrics.undecodable):
        counts[name] += 1


async def test_only_present_endpoints_have_series() -> None:
    """After a thousand endpoints came and went, every metric with an endpoint has those of today and no
    other."""
    parts = make(0)
    registry = EndpointRegistry(Settings(), parts.director, parts.clock, scrape_interval=0.0)
    gauges = parts.director.metrics.gauges
    gauges.precise, gauges.backlog_tokens = registry.trusted, registry.backlog
    gauges.index_blocks = lambda: {state.endpoint.hostport: {"GPU": 1} for state in registry.states.values()}
    last = 1_000
    for first in range(0, last + 1, PRESENT):
        registry.follow(EndpointSet(tuple(map(_endpoint, range(first, first + PRESENT + 1)))))
        for number in range(first, first + PRESENT):
            _use(parts, registry, number)
    registry.follow(EndpointSet(tuple(map(_endpoint, range(last, last + PRESENT)))))

    present = {_endpoint(number).hostport for number in range(last, last + PRESENT)}
    page = parts.director.metrics.snapshot().collect()
    by_endpoint = [family for family in page if "endpoint" in getattr(family, "_labelnames", ())]
    found = {family.name: {sample.labels["endpoint"] for sample in family.samples} for family in by_endpoint}

    assert found == dict.fromkeys(found, present)
    assert len(found) >= 12
    assert sum(1 for family in by_endpoint for _ in family.samples) <= PRESENT * (len(found) + 2)
