"""Requests by session for tests of the load: most tests have one request a session."""

from collections.abc import Iterable

from kvist_epp.load.in_flight import Attempt, InFlightRequest
from kvist_epp.load.tracker import LoadTracker


def route(
    tracker: LoadTracker, session: str, endpoint: str, uncached: int, tokens: int, now: float
) -> Attempt:
    """Send a new request of this session to the endpoint."""
    return tracker.add(InFlightRequest(session, tokens), endpoint, uncached, now)


def end(tracker: LoadTracker, session: str, now: float, endpoint: str = "") -> InFlightRequest | None:
    """End the oldest request of the session (on the endpoint); return it, or None."""
    request = tracker.table.find(session, endpoint=endpoint)
    if request is not None:
        tracker.end(request, now)
    return request


def progress(
    tracker: LoadTracker, session: str, backlog: int, now: float, *, endpoint: str = "", computed: float = 0.0
) -> None:
    """Report progress of the session's oldest request; unknown sessions are ignored."""
    request = tracker.table.find(session, endpoint=endpoint)
    if request is not None:
        tracker.on_progress(request.attempt, backlog, now, computed=computed)


def sessions(requests: Iterable[InFlightRequest]) -> list[str]:
    """Return their sessions."""
    return [request.session for request in requests]


def remote(
    tracker: LoadTracker,
    session: str,
    endpoint: str,
    routed_at: float,
    *,
    uncached: float = 100.0,
    backlog: float = 100.0,
    tokens: int = 200,
    content: object = None,
) -> Attempt:
    """Make, without adding it, what another replica routed."""
    request = InFlightRequest(session, tokens, origin="peer", content=content)
    attempt = Attempt(request, tracker.load(endpoint), uncached, routed_at, routed_at, backlog)
    request.attempts.append(attempt)
    return attempt
