"""Replication in a picker: whose events and ends are whose, the page and the metrics."""

from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from msgspec import structs
from tests.epp.parts import MODEL, Parts, ask, chat, make

from kvist_epp.admin.debug_pages import in_flight_document
from kvist_epp.app.process import Shutdown
from kvist_epp.director.completion import CompletionHandler
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.kvevents.observation import Observation
from kvist_epp.replicas.messages import LoadUpdate, RemoteRequest
from kvist_epp.replicas.prompt_digests import PromptDigests
from kvist_epp.replicas.replication import Replication, fingerprint
from kvist_epp.settings.settings import Settings

SETTINGS = Settings(endpoints_file="x", replicas="127.0.0.1:9004", host="127.0.0.1")


def joined(parts: Parts) -> Replication:
    """Give the picker a replica, called ``other``, that has just connected."""
    registry = EndpointRegistry(SETTINGS, parts.director, parts.clock, scrape_interval=0.0)
    replication = Replication(SETTINGS, registry)
    replication.attach()
    replication.remote_load.on_connected("other", parts.clock.now)
    return replication


def completion(parts: Parts, replication: Replication) -> CompletionHandler:
    """Return what takes in the access log of the picker's gateways."""
    return CompletionHandler(parts.director, parts.clock, replication.forward_end)


def tell(replication: Replication, seq: int, *entries: RemoteRequest, leaving: bool = False) -> None:
    """Apply an update of the other replica."""
    first = seq == 1
    update = LoadUpdate(seq, full_begins=first, full_ends=first, requests=entries, leaving=leaving)
    replication.remote_load.apply("other", update, replication._clock())


def entry(session: str, endpoint: str = "t/e0", tokens: int = 1000) -> RemoteRequest:
    """Return a request that was just routed."""
    return RemoteRequest(1, session, endpoint, tokens, tokens, tokens, 0.0, 0.0, progressed=False)


def ended(session: str, status: int = 200, request_id: str | None = None) -> AccessLogEntry:
    """Return an entry of the access log."""
    return AccessLogEntry(session, request_id, None, status)


def test_an_announced_prompt_counts_until_events_show_that_it_is_computed() -> None:
    """From then on the index says what its engine has of it; the end of the request changes nothing more."""
    parts = make()
    replication = joined(parts)
    text = b"announced " * 1000
    digests = PromptDigests.compute((None, None), text)
    tell(replication, 1, structs.replace(entry("other.1"), digests=digests))
    cached: list[int] = []
    for depth in (500, 1000):
        seen = Observation("t/e0/0", "t/e0", "other.1", 500, None, "prefill", depth)
        parts.director.progress.on_observation(seen, parts.clock())
        hits = parts.director.lookup.look((None, None), [text]).hits
        cached.append(hits["t/e0"].bytes if hits else 0)
    replication.remote_load.apply("other", LoadUpdate(2, ended_numbers=(1,)), parts.clock())

    assert cached == [len(text), 0]
    assert len(replication.remote_load) == 0


def test_events_advance_the_requests_of_other_replicas() -> None:
    """Every replica receives the events of every engine: remote prefills advance and end without an
    update."""
    parts = make()
    replication = joined(parts)
    tell(replication, 1, entry("other.1"))
    load = parts.director.tracker.load("t/e0")
    seen = Observation("t/e0/0", "t/e0", "other.1", 400, 0, "prefill", 400)
    parts.director.progress.on_observation(seen, parts.clock())
    part_way = load.backlog_tokens
    parts.director.progress.on_observation(
        Observation("t/e0/0", "t/e0", "other.1", 16, None, "decode", 1016), parts.clock()
    )

    assert (part_way, load.backlog_tokens, load.running) == (600, 0, 1)
    parts.director.progress.on_observation(
        Observation("t/e1/0", "t/e1", "stranger", 16, None, "decode", 16), parts.clock()
    )


def test_the_end_of_a_request_goes_to_the_replica_that_routed_it() -> None:
    """An own request ends here, a remote one is forwarded, and a forwarded entry ends an own request."""
    parts = make()
    replication = joined(parts)
    tell(replication, 1, entry("other.1"))
    picked = parts.decide(ask(chat("handshake")))
    assert isinstance(picked, PickResult)
    session = dict(picked.headers)["x-session-id"]
    completion(parts, replication).on_access_log([ended("other.1"), ended("")])
    outbox = [one.session for one in replication.remote_load.outbox("other")]
    replication._on_forwarded_entries([ended(session), ended("other.1")])

    assert (outbox, len(parts.director.table)) == (["other.1"], 0)
    assert parts.director.metrics.ended["access-log"] == 1
    assert replication.stats.forwarded["sent"] == 1
    assert parts.director.tracker.running("t/e0") + parts.director.tracker.running("t/e1") == 1


def test_requests_of_one_session_are_distinguished_by_the_request_id() -> None:
    """If two replicas route requests of one session, each end reaches its own request."""
    parts = make()
    replication = joined(parts)
    headers = {"x-session-id": "client", "x-request-id": "mine"}
    parts.decide(ask(chat("handshake"), headers=headers))
    tell(replication, 1, entry("client"))
    completion(parts, replication).on_access_log([ended("client", request_id="theirs")])

    assert (
        [one.request_id for one in replication.remote_load.outbox("other")],
        len(parts.director.table),
    ) == (
        ["theirs"],
        1,
    )
    completion(parts, replication).on_access_log([ended("client", request_id="mine")])
    assert (len(replication.remote_load.outbox("other")), len(parts.director.table)) == (1, 0)


def test_an_orphan_ends_with_an_access_log_entry_at_any_replica() -> None:
    """The replica said farewell, so that entries here or at another replica are the only source."""
    parts = make()
    replication = joined(parts)
    tell(replication, 1, entry("other.1"), replace_number(entry("other.2"), 2))
    tell(replication, 2, leaving=True)
    completion(parts, replication).on_access_log([ended("other.1")])
    replication._on_forwarded_entries([ended("other.2")])

    assert parts.director.tracker.running("t/e0") == 0


def replace_number(one: RemoteRequest, number: int) -> RemoteRequest:
    """Return the same request with another number."""
    return RemoteRequest(number, one.session, one.endpoint, 1, 1, 1, 0.0, 0.0, progressed=False)


def test_requests_on_endpoints_that_are_not_known_yet_wait_for_them() -> None:
    """Replicas learn of a new endpoint at different times; requests on unknown endpoints wait for it."""
    parts = make()
    replication = joined(parts)
    tell(replication, 1, entry("other.1", "t/e9"))
    waiting = (len(replication.remote_load), replication.document()["replicas"][0]["on_unknown_endpoints"])
    member = parts.director.lookup.members["t/e0"]
    parts.director.lookup.members["t/e9"] = replace(member, publishers=())
    parts.clock.now += 1.0
    replication.remote_load.poll(parts.clock.now)

    assert (waiting, len(replication.remote_load), parts.director.tracker.running("t/e9")) == ((0, 1), 1, 1)


def test_the_page_and_the_metrics_show_the_other_replicas() -> None:
    """Both show the ids of the other replicas, their states and how many requests they routed."""
    parts = make()
    replication = joined(parts)
    tell(replication, 1, entry("other.1"))
    page, _ = parts.director.metrics.snapshot().format("")
    lines = page.decode().splitlines()

    assert 'kvist_epp_peers{state="heard"} 1.0' in lines
    assert "kvist_epp_peer_requests 1.0" in lines
    document = replication.document()
    assert document["replica"] == parts.director.replica
    assert [(one["replica"], one["requests"]) for one in document["replicas"]] == [("other", 1)]


async def test_the_port_of_the_replicas_has_its_documented_name() -> None:
    """Metrics call the port for replicas ``peer``, and ``/debug/held`` leaves out its streams."""
    parts = make()
    settings = replace(SETTINGS, replica_port=0)
    registry = EndpointRegistry(settings, parts.director, parts.clock, scrape_interval=0.0)
    async with AsyncExitStack() as stack:
        await Replication(settings, registry).start(Shutdown(), stack, 9090)
        page, _ = parts.director.metrics.snapshot().format("")
        streams = in_flight_document(parts.director)["streams"]

    assert 'kvist_epp_http2_connections{port="peer"} 0.0' in page.decode().splitlines()
    assert streams == {}


def test_without_events_there_is_no_index_to_copy() -> None:
    """In approximate mode load is exchanged, and the picker waits for nothing."""
    replication = joined(make(model=None))

    assert (replication.waiting(), len(replication.methods()), fingerprint(None)) == ("", 1, b"")


def test_fingerprints_of_different_vocabularies_differ() -> None:
    """Indexes are compared by bytes, so the bytes of each token count."""
    pieces = [MODEL.pieces[1], MODEL.pieces[0], *MODEL.pieces[2:]]
    other: Any = SimpleNamespace(faithful=True, pieces=pieces)

    assert fingerprint(MODEL) == fingerprint(MODEL) != fingerprint(other)
