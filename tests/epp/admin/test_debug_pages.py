"""The pages /debug/held, while requests are in flight and after, and /debug/fleet."""

import asyncio
import json
from functools import partial

import msgspec
from tests.epp.parts import ask, chat, make

from kvist_epp.admin.debug_pages import endpoints_document, in_flight_document
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.endpoints.engine_state import EngineState
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.http2.port_stats import PortLoad, PortStats
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.load.tracker import LoadTracker


def zeros(page: dict[str, object]) -> bool:
    """Return whether every count but those of tasks and streams is 0."""
    return not any(value for name, value in page.items() if name not in {"tasks", "streams", "stream_bytes"})


async def test_a_request_is_held_until_it_has_ended() -> None:
    """Load, request, prompt and history note are present after the pick, and gone after the access log."""
    parts = make()
    before = in_flight_document(parts.director)
    decision = parts.decide(ask(chat("What is held for me?")))
    assert isinstance(decision, PickResult)
    during = in_flight_document(parts.director)
    parts.end(decision.session)
    after = in_flight_document(parts.director)

    assert zeros(before)
    assert (during["attempts"], during["requests_in_flight"], during["routing_history"]) == (1, 1, 1)
    assert during["prompt_bytes"] > len("What is held for me?")
    assert zeros(after)
    assert json.loads(json.dumps(after)) == after


async def test_tasks_are_counted_by_their_coroutine() -> None:
    """A task that stays can be found by its name."""

    async def waits() -> None:
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(waits()) for _ in range(2)]
    found = in_flight_document(make().director)["tasks"]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

    [name] = [name for name in found if name.endswith("waits")]
    assert found[name] == 2


async def test_streams_of_gateways_are_counted_and_those_of_replicas_are_not() -> None:
    """Streams between replicas are always open; those of gateways end."""
    director = make().director
    for port, streams in (("grpc", 3), ("grpc-health", 1), ("peer", 2)):
        director.metrics.ports[port] = PortStats(1 << 20, partial(PortLoad, 1, streams, 10, 5))
    found = in_flight_document(director, remote_requests=4)

    assert found["streams"] == {"grpc": 3, "grpc-health": 1}
    assert found["stream_bytes"] == {"grpc": 15, "grpc-health": 15}
    assert found["remote_requests"] == 4


def test_the_page_of_endpoints_joins_scrapes_and_load() -> None:
    """An endpoint has its state and its backlog, and the document can be written as JSON."""
    endpoint = Endpoint("a", "ns", "10.0.0.1", 8000, {"k": "v"}, "tcp://10.0.0.1:5557", ranks=2)
    tracker = LoadTracker(default_rate=1000.0)
    tracker.add(InFlightRequest("s", 900), "ns/a", 500, now=1.0)
    document = endpoints_document({"ns/a": EngineState(endpoint)}, tracker, now=1.1)
    read = msgspec.json.decode(msgspec.json.encode(document))["endpoints"][0]

    assert (read["state"], read["problem"], read["backlog_tokens"], read["requests"]) == (
        "new",
        "not scraped yet",
        400,
        1,
    )
    assert read["kv_events"] == ["tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"]
