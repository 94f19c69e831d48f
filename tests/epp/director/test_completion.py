"""Reports of gateways after a pick: backlog follows the endpoint that served, and each request ends once."""

import pytest
from tests.epp.parts import BLOCK, Parts, Truths, ask, chat, make

from kvist_epp.director.completion import CompletionHandler
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.extproc.response import ObservedResponse, Usage
from kvist_epp.kvevents.observation import Observation
from kvist_epp.load.end_reports import DELAY_WEIGHT
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.names import REQUEST_ID_HEADER, SESSION_HEADER

LONG = "The library opens at nine and closes when the last reader has left. " * 12


def _pick(parts: Parts, session: str = "s", request_id: str = "id") -> tuple[str, str]:
    """Keys of the endpoint picked for a request, and of the next in its list."""
    headers = {SESSION_HEADER: session, REQUEST_ID_HEADER: request_id} if session else {}
    picked = parts.decide(ask(chat(LONG), headers=headers))
    assert isinstance(picked, PickResult)
    keys = {endpoint.hostport: endpoint.key for endpoint in parts.endpoints}
    return keys[picked.endpoints[0]], keys[picked.endpoints[1]]


def _hostport(parts: Parts, key: str) -> str:
    return next(endpoint.hostport for endpoint in parts.endpoints if endpoint.key == key)


def _ended(
    session: str = "s",
    request_id: str = "id",
    upstream: str | None = None,
    status: int = 200,
    seconds: float | None = None,
) -> AccessLogEntry:
    return AccessLogEntry(session, request_id, upstream, status, seconds)


def _seen(usage: Usage | None = None, *, status: int = 200, whole: bool = True) -> ObservedResponse:
    return ObservedResponse("s", "id", None, status, usage or Usage(), whole)


def _running(parts: Parts) -> dict[str, int]:
    tracker = parts.director.tracker
    return {endpoint.key: tracker.running(endpoint.key) for endpoint in parts.endpoints}


def test_backlog_moves_to_the_endpoint_that_served() -> None:
    """If the response names another endpoint, backlog and cache credit leave the one that never got it."""
    parts = make(2, precise=False)
    first, second = _pick(parts)
    owed = parts.director.tracker.backlog(first)
    request = parts.director.table.find("s")
    assert request is not None

    served = next(endpoint for endpoint in parts.endpoints if endpoint.key == second)
    parts.director.progress.on_served_elsewhere(request, served, parts.clock())

    assert _running(parts) == {first: 0, second: 1}
    assert parts.director.tracker.backlog(second) == owed > 0
    assert (request.endpoint, request.attempt.hostport) == (second, served.hostport)
    [holder] = parts.director.history.match(request.root, request.prompt or b"")
    assert holder == second
    assert parts.director.metrics.served_elsewhere == {_hostport(parts, first): 1}


def test_what_the_other_endpoint_caches_adds_no_backlog_there() -> None:
    """The backlog is computed again: a prefix that the serving endpoint caches is not prefilled there."""
    parts = make(2)
    first, second = _pick(parts)
    assert parts.director.tracker.backlog(first) > 2 * BLOCK
    number = [endpoint.key for endpoint in parts.endpoints].index(second)
    parts.warm(number, chat(LONG))
    request = parts.director.table.find("s")
    assert request is not None
    parts.director.progress.on_served_elsewhere(request, parts.endpoints[number], parts.clock())

    assert 0 < parts.director.tracker.backlog(second) <= 2 * BLOCK


def test_the_access_log_names_the_endpoint_that_served() -> None:
    """A request that ended on the second endpoint of its list is counted, and leaves no backlog behind."""
    parts = make(2, precise=False)
    first, second = _pick(parts)
    CompletionHandler(parts.director, parts.clock).on_access_log([_ended(upstream=_hostport(parts, second))])

    assert _running(parts) == {first: 0, second: 0}
    assert parts.director.metrics.served_elsewhere[_hostport(parts, first)] == 1
    assert parts.director.metrics.ended["access-log"] == 1
    again, _ = _pick(parts, "t", "other")
    assert again == second, "the routing history knows where the prefix is now"


@pytest.mark.parametrize("moved", [False, True])
def test_late_entries_say_how_late_they_are(moved: bool) -> None:
    """The delay of an entry is what has passed since the pick, without the time at whichever endpoint."""
    parts = make(2, precise=False)
    upstream = _hostport(parts, _pick(parts)[moved])
    parts.clock.now += 2.4
    handler = CompletionHandler(parts.director, parts.clock)
    reports = parts.director.tracker.end_reports
    handler.on_access_log([_ended(upstream=upstream, seconds=2.0)])
    assert reports.interval == pytest.approx(DELAY_WEIGHT * 0.8)

    before = reports.interval
    _pick(parts)
    handler.on_access_log([_ended(), _ended("of another replica", seconds=0.0)])
    assert reports.interval == before, "an entry without a time, and one of an unknown request, say nothing"


def test_observed_responses_are_not_late() -> None:
    """An end that the response itself shows has no delay."""
    parts = make(2)
    reports = parts.director.tracker.end_reports
    reports.on_delay(0.5)
    before = reports.interval
    _pick(parts)
    CompletionHandler(parts.director, parts.clock).on_response(_seen())

    assert reports.interval < before


@pytest.mark.parametrize("upstream", [None, "192.0.2.9:80", "name:80", "picked"])
def test_other_upstreams_change_nothing(upstream: str | None) -> None:
    """No upstream, one that is none of ours (a proxy on the way), and the picked one itself."""
    parts = make(2)
    first, _ = _pick(parts)
    upstream = _hostport(parts, first) if upstream == "picked" else upstream
    CompletionHandler(parts.director, parts.clock).on_access_log([_ended(upstream=upstream)])

    assert parts.director.metrics.served_elsewhere == {}
    assert len(parts.director.table) == 0


def test_the_served_endpoint_may_be_spelled_freely() -> None:
    """An IPv6 address in another spelling is the same endpoint."""
    parts = make(2)
    parts.endpoints[:] = [Endpoint(f"e{n}", "t", f"fd00::{n}", 8000) for n in (1, 2)]
    for candidate, endpoint in zip(parts.director.candidates, parts.endpoints, strict=True):
        candidate.endpoint = endpoint
    first, second = _pick(parts)
    spelled = {"t/e1": "[FD00:0::0001]:8000", "t/e2": "[fd00:0:0:0:0:0:0:2]:8000"}
    CompletionHandler(parts.director, parts.clock).on_access_log([_ended(upstream=spelled[second])])

    assert parts.director.metrics.served_elsewhere == {_hostport(parts, first): 1}


def test_an_end_that_is_reported_twice_counts_once() -> None:
    """Response and access log both tell; a later request of the same session is not ended by it."""
    parts = make(2)
    after = CompletionHandler(parts.director, parts.clock)
    _pick(parts, "s", "first")
    _pick(parts, "s", "second")
    after.on_response(ObservedResponse("s", "first", None, 200, Usage(), complete=True))
    after.on_access_log([_ended("s", "first")])

    assert len(parts.director.table) == 1
    assert sum(_running(parts).values()) == 1
    assert (parts.director.metrics.ended["response"], parts.director.metrics.ended["access-log"]) == (1, 0)
    after.on_access_log([_ended("s", "second")])
    assert sum(_running(parts).values()) == 0


def test_usage_is_counted() -> None:
    """Tokens are counted by kind, and responses by whether they reported their tokens."""
    parts = make(1)
    after = CompletionHandler(parts.director, parts.clock)
    for seen in (
        _seen(Usage(10, 3, 8)),
        _seen(Usage(5, None, None)),
        _seen(),
        _seen(whole=False, status=0),
    ):
        after.on_response(seen)

    assert parts.director.metrics.usage == {"prompt": 15, "completion": 3, "cached": 8}
    assert parts.director.metrics.responses == {"usage": 2, "none": 1, "cut": 1}


def test_usage_gives_the_truth_where_events_do_not() -> None:
    """Cached tokens of a response are the truth once, unless the engine's event was first."""
    parts = make(1)
    truths = Truths(parts.director)
    after = CompletionHandler(parts.director, parts.clock)
    after.on_response(_seen(Usage(10, 3, 8)))
    _decide(parts, "s", "id")
    after.on_response(_seen(Usage(10, 3, 8)))
    _decide(parts, "s", "id")
    key = parts.endpoints[0].key
    parts.director.progress.on_observation(
        Observation(f"{key}/0", key, "s", BLOCK, 16, "prefill", 64), parts.clock()
    )
    after.on_response(_seen(Usage(10, 3, 8)))

    assert truths.by_session == [("s", 8), ("s", 16)]


def _decide(parts: Parts, session: str, request_id: str) -> None:
    parts.decide(ask(chat(LONG), headers={SESSION_HEADER: session, REQUEST_ID_HEADER: request_id}))


def test_a_failed_response_leaves_no_credit() -> None:
    """A 500 was no prefill; a response that was not seen at all says nothing against it."""
    for status, kept in ((500, False), (0, True)):
        parts = make(1, precise=False)
        _decide(parts, "s", "id")
        request = parts.director.table.find("s")
        assert request is not None
        CompletionHandler(parts.director, parts.clock).on_response(_seen(status=status))
        assert bool(parts.director.history.match(request.root, b"<|im_start|>user\nThe")) is kept


def _event(session: str, key: str) -> Observation:
    return Observation(f"{key}/0", key, session, BLOCK, 0, "prefill", 64)


def _only_request(parts: Parts) -> InFlightRequest:
    [request] = parts.director.table
    return request


def test_events_name_the_endpoint_that_serves_while_it_runs() -> None:
    """An event with a known session id from another endpoint moves the request's backlog there at once."""
    parts = make(2)
    first, second = _pick(parts, session="")
    session = _only_request(parts).session
    parts.director.progress.on_prefill_started(f"{second}/0", second, session, parts.clock())
    parts.director.progress.on_observation(_event(session, second), parts.clock())

    assert _only_request(parts).endpoint == second
    assert _running(parts) == {first: 0, second: 1}
    assert parts.director.metrics.served_elsewhere[_hostport(parts, first)] == 1


def test_a_clients_session_is_not_believed() -> None:
    """Clients use their session ids again and again: an old request's event moves no new one."""
    parts = make(2)
    first, second = _pick(parts, session="theirs")
    parts.director.progress.on_observation(_event("theirs", second), parts.clock())

    assert _running(parts) == {first: 1, second: 0}


def test_a_prefill_endpoint_does_not_serve_the_request() -> None:
    """The prefill endpoint of a request has its session in its events too."""
    parts = make(2)
    first, second = _pick(parts, session="")
    helper = next(endpoint for endpoint in parts.endpoints if endpoint.key == second)
    object.__setattr__(helper, "role", "prefill")
    parts.director.progress.on_observation(_event(_only_request(parts).session, second), parts.clock())

    assert _running(parts) == {first: 1, second: 0}
