"""The log of decisions: what is kept of each request, what came true, and what it forgets."""

from typing import Any

import msgspec
import pytest
from tests.epp.parts import Clock, Parts, ask, chat, make
from tests.epp.queued_director import QueuedDirector, Wait

from kvist_epp.director.completion import CompletionHandler
from kvist_epp.director.decision_log import MAX_ID, DecisionLog
from kvist_epp.errors import NoEndpoints
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.flowcontrol.flow_controller import FlowLimits, QueuedRequest
from kvist_epp.kvevents.observation import Observation
from kvist_epp.scheduling.load_columns import FEW
from kvist_epp.scheduling.pick_record import KEPT

SECRET = "a secret about the harbour "
WALL = 1_700_000_000.0


def logged(count: int = 3, limit: int = 5, **more: Any) -> tuple[Parts, DecisionLog]:
    """Return a director with a log of so many decisions."""
    clock = more.pop("clock", None) or Clock()
    log = DecisionLog(limit, "replica", clock=clock, wall=lambda: WALL + clock.now)
    return make(count, clock=clock, decisions=log, **more), log


def send(parts: Parts, name: str, text: str = "hello", **more: Any) -> str:
    """Offer a chat with this request id; return the endpoint it goes to."""
    answer = parts.decide(ask(chat(text), headers={"x-request-id": name}, **more))
    assert not isinstance(answer, QueuedRequest)
    return answer.endpoints[0]


def shown(document: dict[str, Any]) -> dict[str, Any]:
    """Return the endpoints of a page as both pages show them."""
    return {row["endpoint"]: row for row in document["endpoints"] if row["eligible"]}


@pytest.mark.parametrize("tpot", [0.0, 0.05])
def test_a_decision_shows_later_what_debug_pick_showed_before(tpot: float) -> None:
    """Each candidate's terms, as ``/debug/pick`` computed them just before the pick, though loads change."""
    parts, log = logged(4, limit=20, tpot=tpot)
    texts = [SECRET * number for number in (40, 5, 90, 40, 1, 90)]
    parts.warm(1, chat(texts[0]))
    parts.warm(2, chat(texts[2]))
    said = []
    for number, text in enumerate(texts):
        said.append(parts.explain(msgspec.json.encode(chat(text))))
        send(parts, f"id-{number}", text)
        parts.clock.now += 0.01
    parts.clock.now += 60

    for number, page in enumerate(said):
        [kept] = log.find(f"id-{number}")
        assert kept["picked"] == page["picked"]
        assert kept["endpoints"][0]["endpoint"] == page["picked"][0]
        assert shown(kept) == shown(page)
        assert (kept["mode"], kept["prompt_bytes"]) == (page["mode"], page["prompt_bytes"])
        assert kept["predicted_cached_tokens"] == shown(page)[page["picked"][0]]["matched_tokens"]
    assert len({page["picked"][0] for page in said}) > 1
    assert SECRET.strip() not in msgspec.json.encode(log.latest(20)).decode()


def test_what_came_true_is_added() -> None:
    """The engine's cache hits, the endpoint that serves, how the request ended and its status."""
    parts, log = logged(2)
    completion = CompletionHandler(parts.director, parts.clock)
    picked = send(parts, "one", SECRET * 40)
    [sent] = log.find("one")
    session = sent["session"]
    key = next(e.key for e in parts.endpoints if e.hostport == picked)
    parts.director.progress.on_observation(
        Observation(f"{key}/0", key, session, 64, 32, "prefill", 96), 100.5
    )
    [prefilling] = log.find("one")
    other = next(e.hostport for e in parts.endpoints if e.hostport != picked)
    completion.on_access_log([AccessLogEntry(session, "one", other, 200)])
    [ended] = log.find("one")

    nothing = {"cached_tokens": None, "ttft_seconds": None, "endpoint": None, "status": None, "ended": None}
    assert sent["actual"] == nothing
    assert prefilling["actual"] == nothing | {"cached_tokens": 32, "endpoint": picked}
    assert ended["actual"] == nothing | {
        "cached_tokens": 32,
        "endpoint": other,
        "status": 200,
        "ended": "access-log",
    }


def test_the_time_to_the_first_token_is_kept_while_the_request_is_open() -> None:
    """A decision has the TTFT of the observed response; a report after the end changes nothing."""
    parts, log = logged()
    send(parts, "one")
    [request] = list(parts.director.table)
    log.on_first_token(request, 0.25, 101.0)
    parts.end(request.session)
    log.on_first_token(request, 9.0, 102.0)
    log.on_cache_truth(request, 7, 102.0)

    [found] = log.find("one")
    assert (found["actual"]["ttft_seconds"], found["actual"]["cached_tokens"]) == (0.25, None)


def test_an_endpoint_that_leaves_ends_its_decisions() -> None:
    """The decision stays readable, with the endpoint that left among its candidates."""
    parts, log = logged(2)
    picked = send(parts, "one")
    [gone] = [e for e in parts.endpoints if e.hostport == picked]
    for request in parts.director.tracker.remove_endpoint(gone.key):
        parts.director.progress.on_ended(request, "left", parts.clock())
    parts.endpoints.remove(gone)
    parts.director.set_endpoints(parts.candidates(), parts.clock())
    send(parts, "two")

    first, second = log.find("one")[0], log.find("two")[0]
    assert first["actual"]["ended"] == "left"
    assert (len(first["endpoints"]), len(second["endpoints"])) == (2, 1)
    assert first["picked"][0] == gone.hostport


def test_the_oldest_decision_goes_first() -> None:
    """A full log forgets in order, also of requests that are still open, and finds only what it keeps."""
    parts, log = logged(limit=3)
    for number in range(5):
        send(parts, f"id-{number}")
    parts.end(*[request.session for request in list(parts.director.table)])

    assert [one["id"] for one in log.latest(10)] == ["id-4", "id-3", "id-2"]
    assert [one["id"] for one in log.latest(1)] == ["id-4"]
    assert (log.find("id-1"), len(log.find("id-2"))) == ([], 1)
    assert log.kept() == {"limit": 3, "decisions": 3, "oldest_at": WALL + 100.0}
    assert {one["actual"]["ended"] for one in log.latest(10)} == {"access-log"}
    assert log._open == {}


def test_an_id_that_is_used_again_has_all_its_decisions() -> None:
    """Newest first, each with what came true of it, until the log has forgotten them one by one."""
    parts, log = logged(limit=3)
    for text in ("first", "second", "third"):
        send(parts, "same", text)
        parts.clock.now += 1
    before = [one["at"] for one in log.find("same")]
    send(parts, "other")
    after = [one["at"] for one in log.find("same")]
    for number in range(3):
        send(parts, f"more-{number}")

    assert before == [WALL + 102, WALL + 101, WALL + 100]
    assert after == before[:2]
    assert log.find("same") == []


def test_a_session_id_finds_its_requests_where_no_request_has_this_id() -> None:
    """Users know the session more often than the id; ids and sessions are kept up to a length."""
    parts, log = logged()
    long = "s" * 300
    for name in ("one", "two"):
        parts.decide(ask(chat("hello"), headers={"x-request-id": name, "x-session-id": long}))

    assert [one["id"] for one in log.find(long)] == ["two", "one"]
    assert {one["session"] for one in log.find(long)} == {"s" * MAX_ID}
    assert log.find("unknown") == []


def test_rejected_requests_are_kept_with_the_reason() -> None:
    """A request that went nowhere has its outcome and message, and no endpoints."""
    parts, log = logged(2)
    with pytest.raises(NoEndpoints):
        parts.decide(ask(chat("hello"), headers={"x-request-id": "lost"}, subset=("10.9.9.9",)))

    [found] = log.find("lost")
    assert (found["outcome"], found["picked"], found["endpoints"]) == ("rejected-no-endpoints", [], [])
    assert found["message"] == "none of the 2 known endpoints is in the gateway's subset of 1"
    assert (found["predicted_ttft_seconds"], found["actual"]["ended"]) == (None, None)


def test_endpoints_that_could_not_be_picked_are_shown_with_the_obstacle() -> None:
    """Outside of the gateway's subset, or not ready: without figures, after those that could."""
    parts, log = logged(4)
    candidates = parts.candidates()
    candidates[0].update(parts.endpoints[0], ready=False, reason="unreachable")
    parts.director.set_endpoints(candidates, parts.clock())
    send(parts, "one", subset=("10.0.0.1", "10.0.0.2", "10.0.0.3"))

    [found] = log.find("one")
    assert [(row["name"], row["eligible"]) for row in found["endpoints"]] == [
        (found["endpoints"][0]["name"], True),
        (found["endpoints"][1]["name"], True),
        ("t/e0", False),
        ("t/e3", False),
    ]
    assert [row["reason"] for row in found["endpoints"][2:]] == [
        "unreachable",
        "not in the gateway's subset, or does not serve the model",
    ]
    assert (found["candidates"], found["ineligible"], found["not_shown"]) == (2, 2, 0)


def test_of_a_large_pool_the_best_and_the_holders_are_shown() -> None:
    """The others are counted; what is shown equals ``/debug/pick`` of that moment."""
    count = FEW + 60
    parts, log = logged(count)
    body = chat(SECRET * 40)
    parts.warm(70, body)
    for _ in range(30):
        send(parts, "load", "other " * 200)
    page = parts.explain(msgspec.json.encode(body))
    send(parts, "one", SECRET * 40)

    [found] = log.find("one")
    assert KEPT <= len(found["endpoints"]) < count
    assert len(found["endpoints"]) + found["not_shown"] == found["candidates"] == count
    assert "t/e70" in {row["name"] for row in found["endpoints"]}
    assert shown(found).items() <= shown(page).items()
    assert found["picked"] == page["picked"]


async def test_a_request_that_waited_has_its_wait_and_the_candidates_of_its_dispatch() -> None:
    """The record is of the pick after the wait, not of the one when the request came."""
    clock = Clock()
    log = DecisionLog(5, "replica", clock=clock, wall=lambda: WALL)
    queued = QueuedDirector(1, 1, clock, decisions=log)
    queued.ask("first")
    waiting = queued.ask("second")
    assert isinstance(waiting, Wait)
    clock.now += 2.5
    queued.parts.end("first")
    await waiting

    [found] = log.find("second")
    assert (found["waited_seconds"], found["outcome"], len(found["endpoints"])) == (2.5, "picked", 1)


async def test_a_request_cancelled_in_the_queue_is_kept_as_such() -> None:
    """The outcome says that the client cancelled it, and the wait how long that took."""
    parts, log = logged(1, limits=FlowLimits())
    parts.director.tracker.calibrate("t/e0", slots=1)
    send(parts, "first")
    waiting = parts.decide(ask(chat("hello"), headers={"x-request-id": "second"}))
    assert isinstance(waiting, QueuedRequest)
    assert parts.director.flow is not None
    parts.director.flow.cancel(waiting, parts.clock() + 1.5)

    [found] = log.find("second")
    assert (found["outcome"], found["waited_seconds"]) == ("rejected-context-cancelled", 1.5)


def test_names_that_clients_choose_are_encodable() -> None:
    """A lone surrogate in a model's name does not break the page."""
    parts, log = logged()
    parts.decide(ask(b'{"model":"\\ud800","messages":[{"role":"user","content":"x"}]}'))

    assert msgspec.json.encode(log.latest(1))
