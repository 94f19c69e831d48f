import json
from typing import Any

import pytest
from tests.epp.parts import BLOCK, CHAT, MODEL, Truths, ask, chat, make

from kvist_epp.errors import BadRequest, NoEndpoints
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.kvevents.observation import Observation
from kvist_epp.names import DATA_PARALLEL_RANK_HEADER, REQUEST_ID_HEADER, SESSION_HEADER

LONG = "The library opens at nine and closes when the last reader has left. " * 12


def picked(decision: object) -> PickResult:
    """The decision, which must be a pick."""
    assert isinstance(decision, PickResult)
    return decision


def observed(
    session: str, key: str, cached: int | None, *, depth: int, phase: str = "prefill"
) -> Observation:
    """An engine's event about a request."""
    return Observation(f"{key}/0", key, session, BLOCK, cached, phase, depth)  # type: ignore[arg-type]


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_a_request_goes_where_its_prefix_is(holder: int) -> None:
    """The endpoint that caches the longest prefix is picked, and the log says how much it caches."""
    parts = make(3)
    held = parts.warm(holder, chat(LONG))

    answer = picked(parts.decide(ask(chat(LONG, "fine", "and then?"))))

    assert answer.endpoints[0] == parts.endpoints[holder].hostport
    [line] = parts.log.lines
    assert held - 2 * BLOCK <= line.matched_tokens <= held
    assert line.mode == "precise"


def test_a_session_is_given_and_kept() -> None:
    """Every request carries a session id: its own header's, its body's, or one of ours."""
    parts = make()
    ours = picked(parts.decide(ask(chat("a"))))
    theirs = picked(parts.decide(ask(chat("a"), headers={SESSION_HEADER: "s"})))
    inside = picked(parts.decide(ask(chat("a", session_id="t"))))

    [own, *_] = [value for name, value in ours.headers if name == SESSION_HEADER]
    assert ours.session == own
    assert (theirs.session, inside.session) == ("s", "t")
    assert SESSION_HEADER not in dict(theirs.headers) | dict(inside.headers)
    assert [line.session for line in parts.log.lines][1:] == ["s", "t"]


def test_a_missing_request_id_is_given() -> None:
    """A request without ``x-request-id`` gets one, equal to its session id; an existing one is kept."""
    parts = make()
    ours = dict(picked(parts.decide(ask(chat("a")))).headers)
    theirs = dict(picked(parts.decide(ask(chat("a"), headers={REQUEST_ID_HEADER: "r"}))).headers)

    assert ours[REQUEST_ID_HEADER] == ours[SESSION_HEADER]
    assert REQUEST_ID_HEADER not in theirs
    assert [line.id for line in parts.log.lines] == [ours[REQUEST_ID_HEADER], "r"]


def test_credit_on_the_way_counts_until_events_arrive() -> None:
    """A second request with the same prefix follows the first before any event; then the index rules."""
    parts = make(4)
    first = picked(parts.decide(ask(chat(LONG), headers={SESSION_HEADER: "s"})))
    second = picked(parts.decide(ask(chat(LONG, "ok", "more"))))
    assert second.endpoints[0] == first.endpoints[0]
    assert parts.log.lines[1].matched_tokens > 0

    key = next(e.key for e in parts.endpoints if e.hostport == first.endpoints[0])
    parts.end(*[line.session for line in parts.log.lines[1:]])
    parts.director.progress.on_observation(observed("s", key, 0, depth=10_000), parts.clock())
    parts.director.on_tick(parts.clock())
    parts.decide(ask(chat(LONG, "ok", "other")))
    assert parts.log.lines[2].matched_tokens > 0

    parts.end(parts.log.lines[2].session)
    parts.clock.now += 3
    parts.director.on_tick(parts.clock())
    parts.decide(ask(chat(LONG, "ok", "third")))
    assert parts.log.lines[3].matched_tokens == 0


def test_backlog_falls_as_prefill_advances_and_ends_with_the_request() -> None:
    """A pick adds to the endpoint's backlog, events lower it, and the access log's entry ends it."""
    parts = make(1)
    parts.decide(ask(chat(LONG), headers={SESSION_HEADER: "s"}))
    key = parts.endpoints[0].key
    owed = parts.director.tracker.backlog(key)
    assert owed > 0

    parts.director.progress.on_observation(observed("s", key, 0, depth=owed // 2), parts.clock())
    half = parts.director.tracker.backlog(key)
    assert 0 < half < owed

    parts.end("s")
    assert (parts.director.tracker.backlog(key), parts.director.tracker.running(key)) == (0, 0)
    assert len(parts.director.table) == 0


def test_the_truth_is_reported_once_per_request() -> None:
    """The first event of a request says what was cached; later ones of the same session do not."""
    parts = make(1)
    truths = Truths(parts.director)
    parts.decide(ask(chat(LONG), headers={SESSION_HEADER: "s"}))
    key = parts.endpoints[0].key
    for cached in (32, None, 64):
        parts.director.progress.on_observation(observed("s", key, cached, depth=64), parts.clock())
    parts.director.progress.on_observation(observed("another session", key, 16, depth=64), parts.clock())

    assert truths.by_session == [("s", 32)]


@pytest.mark.parametrize("body", [b"{", b'{"messages": []}', b"\xff\xfe", b""])
def test_bad_bodies_of_known_paths_are_refused(body: bytes) -> None:
    """A known path with a body that is no JSON or names no model is a 400, counted and logged."""
    parts = make()
    with pytest.raises(BadRequest):
        parts.decide(ask(body))
    [line] = parts.log.lines
    assert line.outcome.startswith("bad-")
    assert parts.director.metrics.requests == {"picked": 0, line.outcome: 1}


@pytest.mark.parametrize(
    ("body", "path", "more"),
    [
        (b"GIF89a", "/upload", {}),
        (b"", "/v1/models", {}),
        (b'{"x": 1}', "/v2/unknown", {}),
        (b'{"model": "m", "mess', CHAT, {"partial": True}),
    ],
)
def test_what_is_not_understood_is_routed_by_load(body: bytes, path: str, more: dict[str, Any]) -> None:
    """Unknown paths, bodies that are not JSON and bodies seen in part are routed, never refused."""
    parts = make()
    answer = picked(parts.decide(ask(body, path, **more)))
    assert len(answer.endpoints) == 2
    assert parts.log.lines[0].mode == "load"


def test_a_websocket_is_picked_for_and_not_counted() -> None:
    """A socket may stay open for hours and compute nothing, so it takes no slot; the log has its pick."""
    parts = make(2)
    for _ in range(3):
        decision = picked(parts.decide(ask(b"", "/v1/realtime", websocket=True)))
        assert decision.endpoints
    assert picked(parts.decide(ask(chat("a")))).endpoints

    assert [parts.director.tracker.running(each.key) for each in parts.endpoints].count(1) == 1
    assert [line.outcome for line in parts.log.lines] == ["picked"] * 4
    assert [line.path for line in parts.log.lines][:3] == ["/v1/realtime"] * 3
    assert parts.director.metrics.ended["websocket"] == 3


def test_sockets_say_nothing_of_the_reports_of_ends() -> None:
    """Their ends are not waited for, so that any number of them leaves the reports of a gateway complete."""
    parts = make(2)
    parts.decide(ask(chat("a"), headers={SESSION_HEADER: "s"}))
    parts.end("s")
    reports = parts.director.tracker.end_reports
    before = reports._sent
    for _ in range(500):
        parts.decide(ask(b"", "/v1/realtime", websocket=True))

    assert reports._sent == before


def unrenderable(*turns: str) -> dict[str, Any]:
    """A chat that the engine may know how to render, but no template here."""
    body = chat(LONG, *turns)
    body["messages"][0]["content"] = [{"type": "a part of next year", "text": LONG}]
    return body


def test_a_prompt_that_cannot_be_rendered_is_matched_by_its_plain_text() -> None:
    """A chat that cannot be rendered goes where the turn before it went, also after the events of others."""
    parts = make(4)
    first = picked(parts.decide(ask(unrenderable(), headers={SESSION_HEADER: "s"})))
    key = next(e.key for e in parts.endpoints if e.hostport == first.endpoints[0])
    parts.director.progress.on_observation(observed("s", key, 0, depth=10_000), parts.clock())
    parts.end("s")
    parts.clock.now += 3
    parts.director.on_tick(parts.clock())
    second = picked(parts.decide(ask(unrenderable("fine", "and then?"))))

    assert second.endpoints[0] == first.endpoints[0]
    assert [line.mode for line in parts.log.lines] == ["approximate", "approximate"]
    assert parts.log.lines[0].matched_tokens == 0 < parts.log.lines[1].matched_tokens
    assert parts.director.metrics.template_failures == {"content": 2}


def test_a_text_that_the_engine_refused_is_not_remembered() -> None:
    """A chat that its engine answers with 400 has left nothing in the cache."""
    parts = make(4)
    parts.decide(ask(unrenderable(), headers={SESSION_HEADER: "s"}))
    [request] = parts.director.table
    parts.director.progress.on_ended(request, "response", parts.clock(), without_prefill=True)
    parts.decide(ask(unrenderable("fine", "and then?")))

    assert parts.log.lines[1].matched_tokens == 0


def test_a_plain_text_says_nothing_of_the_index() -> None:
    """The hits of a prompt that was not rendered are counted, but not compared."""
    parts = make(1)
    truths = Truths(parts.director)
    parts.decide(ask(unrenderable(), headers={SESSION_HEADER: "s"}))
    [request] = parts.director.table
    key = parts.endpoints[0].key
    parts.director.progress.on_prefill_started(f"{key}/0", key, "s", parts.clock())
    parts.director.progress.on_observation(observed("s", key, 640, depth=660), parts.clock())

    assert truths.by_session == [("s", 640)]
    assert request.unindexed
    assert not request.index_compared


def test_no_eligible_endpoint_is_reported() -> None:
    """An empty fleet, or a subset without any of ours, is NoEndpoints."""
    parts = make(1)
    with pytest.raises(NoEndpoints):
        parts.decide(ask(chat("x"), subset=("192.0.2.1",)))
    parts.director.set_endpoints((), parts.clock())
    with pytest.raises(NoEndpoints):
        parts.decide(ask(chat("x")))


def test_explain_changes_nothing() -> None:
    """/debug/pick answers as a pick would and changes neither backlog nor history nor the table of
    requests."""
    parts = make()
    held = parts.warm(1, chat(LONG))
    page = parts.explain(json.dumps(chat(LONG, "ok", "more")).encode())

    assert set(page) >= {"mode", "prompt_bytes", "endpoints", "picked"}
    rows = page["endpoints"]
    assert isinstance(rows, list)
    assert {
        "endpoint",
        "eligible",
        "matched_tokens",
        "matched_bytes",
        "uncached_tokens",
        "owed_tokens",
        "predicted_ttft_seconds",
        "reason",
    } <= set(rows[0])
    assert page["picked"] == [parts.endpoints[1].hostport, parts.endpoints[0].hostport]
    assert held - 2 * BLOCK <= rows[0]["matched_tokens"] <= held
    assert (len(parts.director.table), parts.director.metrics.requests, parts.log.lines) == (
        0,
        {"picked": 0},
        [],
    )
    assert parts.director.tracker.backlog(parts.endpoints[1].key) == 0


def test_salts_do_not_meet() -> None:
    """A prefix stored without a salt is no match for a request with one (indexers.md 5.9)."""
    parts = make()
    parts.warm(1, chat(LONG))
    parts.decide(ask(chat(LONG, cache_salt="tenant")))
    assert parts.log.lines[0].matched_tokens == 0


def test_adapters_do_not_meet() -> None:
    """A LoRA adapter's request does not match the base model's blocks."""
    parts = make()
    parts.warm(1, chat(LONG))
    parts.director.adapters = frozenset({"poet"})
    parts.decide(ask(chat(LONG, model="poet")))
    assert parts.log.lines[0].matched_tokens == 0


def test_token_ids_match_as_text_does() -> None:
    """A completion given as token ids matches the blocks of the same text (indexers.md 5.18)."""
    parts = make()
    text = {"model": "m", "prompt": LONG}
    held = parts.warm(1, text, path="/v1/completions")
    ids = {"model": "m", "prompt": MODEL.encode(LONG)}
    answer = picked(parts.decide(ask(ids, "/v1/completions")))
    assert answer.endpoints[0] == parts.endpoints[1].hostport
    assert parts.log.lines[0].matched_tokens >= held - BLOCK


def test_the_rank_that_holds_the_prefix_is_named() -> None:
    """Among several data-parallel ranks, the request goes to the one that holds its prefix."""
    parts = make(1, ranks=2)
    parts.warm(0, chat(LONG))
    index = parts.director.index
    assert index.blocks(index.publisher("t/e0/0"))
    answer = picked(parts.decide(ask(chat(LONG, "ok", "x"))))
    assert dict(answer.headers)[DATA_PARALLEL_RANK_HEADER] == "0"


def test_new_conversations_spread_over_the_ranks() -> None:
    """The rank that had the system prompt first does not get all requests that run; another computes it, and
    once all have it none is named, since the engine knows their queues."""
    parts = make(1, ranks=2)
    parts.warm(0, chat(LONG))
    named: list[str | None] = []
    while "1" not in named:
        parts.clock.now += 1.0
        answer = picked(parts.decide(ask(chat(LONG, "ok", f"question {len(named)}"))))
        named.append(dict(answer.headers).get(DATA_PARALLEL_RANK_HEADER))
    assert 3 <= len(named) <= 40
    attempts = list(parts.director.tracker.load("t/e0").attempts)
    assert [one.rank for one in attempts] == [int(rank or 9) for rank in named]
    first, *_, last = parts.log.lines
    assert first.matched_tokens > 0 == last.matched_tokens
    assert attempts[-1].uncached >= attempts[0].uncached + first.matched_tokens
    assert attempts[0].request.indexed_tokens > 0 == attempts[-1].request.indexed_tokens

    parts.warm(0, chat(LONG), rank=1)
    answer = picked(parts.decide(ask(chat(LONG, "ok", "new"))))
    assert DATA_PARALLEL_RANK_HEADER not in dict(answer.headers)


def test_a_rank_that_the_client_names_is_kept() -> None:
    """No second header is added, and the holder is not named."""
    parts = make(1, ranks=2)
    parts.warm(0, chat(LONG), rank=1)
    answer = picked(parts.decide(ask(chat(LONG), headers={DATA_PARALLEL_RANK_HEADER: "0"})))
    assert DATA_PARALLEL_RANK_HEADER not in dict(answer.headers)


@pytest.mark.parametrize("model", [MODEL, None])
def test_approximate_endpoints_are_picked_by_history(model: object) -> None:
    """Without trusted events, or without model files, requests follow their prefix by the routing history."""
    parts = make(3, precise=False, model=model)  # type: ignore[arg-type]
    first = picked(parts.decide(ask(chat(LONG), headers={SESSION_HEADER: "s"})))
    parts.end("s")
    parts.director.request_count += 1
    second = picked(parts.decide(ask(chat(LONG, "ok", "more"))))

    assert second.endpoints[0] == first.endpoints[0]
    assert parts.log.lines[1].matched_bytes > len(LONG) * 0.9


def test_a_short_prompt_stays_with_its_holder() -> None:
    """A few requests more on the endpoint that holds the prefix are no reason to copy it elsewhere."""
    parts = make(2)
    parts.warm(1, chat(LONG))
    answers = [picked(parts.decide(ask(chat(LONG, "ok", f"question {n}")))) for n in range(6)]
    assert [answer.endpoints[0] for answer in answers] == [parts.endpoints[1].hostport] * 6


def test_a_hot_prefix_is_copied_in_the_end() -> None:
    """With enough requests, a hot prefix is copied to another endpoint; one endpoint is not overloaded for
    ever."""
    parts = make(2)
    parts.warm(1, chat(LONG))
    answers = [picked(parts.decide(ask(chat(LONG, "ok", f"question {n}")))) for n in range(40)]
    assert {answer.endpoints[0] for answer in answers} == {e.hostport for e in parts.endpoints}


def test_explaining_teaches_nothing() -> None:
    """However often /debug/pick is asked, estimates and counters stay as they were."""
    parts = make()
    parts.warm(1, chat(LONG))
    before = parts.director.lookup.bytes_per_token
    for _ in range(20):
        parts.explain(json.dumps(chat(LONG, "ok", "more")).encode())
    parts.explain(b'{"model": "m", "messages": 3}')
    assert parts.director.lookup.bytes_per_token == before
    assert parts.director.metrics.template_failures == {}


def test_a_refused_request_leaves_no_prefix_behind() -> None:
    """In approximate mode too, a prompt that the engine answered with an error is not taken for cached."""
    parts = make(2, precise=False)
    parts.decide(ask(chat(LONG), headers={SESSION_HEADER: "s"}))
    parts.end("s", without_prefill=True)
    parts.decide(ask(chat(LONG)))
    assert parts.log.lines[1].matched_bytes == 0


def test_a_picker_without_prefixes_routes_chats_by_load() -> None:
    """``--prefix-matching=false``: a chat goes to the idle endpoint, although another one caches its prefix,
    and no prompt is rendered or kept."""
    parts = make(2, by_prefix=False)
    parts.warm(0, chat(LONG))
    first = picked(parts.decide(ask(chat(LONG)))).endpoints[0]
    second = picked(parts.decide(ask(chat(LONG)))).endpoints[0]

    assert {first, second} == {endpoint.hostport for endpoint in parts.endpoints}
    assert [(line.kind, line.mode, line.prompt_bytes) for line in parts.log.lines] == [
        ("chat", "load", 0)
    ] * 2
    assert parts.explain(json.dumps(chat(LONG)).encode())["mode"] == "load"
    assert len(parts.director.history) == 0


def test_embeddings_are_routed_by_the_text_to_compute() -> None:
    """A rerank request weighs its query with each document, and goes where its model is served."""
    parts = make(2)
    body = {"model": "m", "query": "q" * 400, "documents": ["d"] * 50}
    heavy = picked(parts.decide(ask(body, path="/v1/rerank"))).endpoints[0]
    light = [
        picked(parts.decide(ask({"model": "m", "input": "x"}, path="/v1/embeddings"))).endpoints[0]
        for _ in range(3)
    ]

    assert heavy not in light
    assert {(line.kind, line.mode, line.model) for line in parts.log.lines} == {("pooling", "load", "m")}
    parts.director.set_models(frozenset(), {"m": (heavy,)})
    again = picked(parts.decide(ask({"model": "m", "input": "x"}, path="/v1/embeddings")))
    assert again.endpoints == (heavy,)
