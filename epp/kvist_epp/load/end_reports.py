"""Ends of requests where no gateway reports them: whether one does, and how long requests stay. Pure.

An access log, or an observed response, reports the end of each request. Without either (Istio as it comes,
NGINX, Envoy AI Gateway) only scrapes tell, every few seconds: an endpoint that answers
at once would be taken for full by requests that ended long ago. The time that requests stay at an endpoint
is therefore estimated by Little's law, and a request that has been there for twice that time counts as ended.
Scrapes correct the number in both directions: what they show beyond it is untracked, what they do not show
has ended. The same holds where only some ends are reported, for example by one of two gateways, which scrapes
show, too.

Reports come late: gateways gather the entries of their log for a time (Envoy for a second by default). How
many requests end between two reports follows from Little's law, too; the endpoint gets as many more.

Example: 256 requests were sent in 64 ms, and the scrape after them shows 10 in the engine. Each stays for
10 * 64 / 256 = 2.5 ms, so after 5 ms a request has ended.
"""

from collections import OrderedDict
from collections.abc import Iterable
from math import exp, inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvist_epp.load.in_flight import Attempt

SILENT_REQUESTS: Final = 100
"""Requests sent without any report, for ``SILENT_SECONDS``, after which reports have ceased."""
SILENT_SECONDS: Final = 60.0
MISSING_REQUESTS: Final = 20
MISSING_SECONDS: Final = 30.0
"""Requests, and time since the first, without any report: then it is said that no gateway reports ends."""
STAY_FACTOR: Final = 2.0
"""Multiple of the mean stay after which a request counts as ended."""
SHORTEST_STAY: Final = 0.005
"""Seconds; scrapes cannot distinguish shorter ones."""
MEMORY_SECONDS: Final = 10.0
"""Time constant of the mean stay: the load of an engine changes within as much."""
LOOK_SECONDS: Final = 0.1
"""Time between looks at a full endpoint while requests wait: estimated ends, and another scrape."""
ASSUMED_SECONDS: Final = 5.0
"""Stay of a request where neither its end nor a scrape is known. An endpoint that has just come back looks
empty, and gets all requests, for no longer than that."""
ASSUMED_SPREAD: Final = 0.5
"""Part by which an assumed stay is longer or shorter from request to request. With equal ones, endpoints that
received their requests at different times would take turns in getting all of them, without end."""
ASSUMED_STAYS: Final = 16
"""Number of different stays. Each has its attempts in order of age, so that only those due are looked at: to
look at all took 3 ms for each request at 2,000 requests/s."""
MOST_OVERDUE: Final = 1_000
"""Attempts that are ended in one turn for their assumed stay: to end those of the first ten seconds, when it
is noticed that no reports come, takes 0.1 s at 2,000 requests/s."""
GOLDEN: Final = 0.6180339887498949
"""Multiples of it are spread most evenly, modulo 1."""
UNREPORTED_SECONDS: Final = 60.0
"""Assumed stay where ends are reported, but no scrape shows whether one report is missing."""
UNMEASURED_SECONDS: Final = 10.0
"""Time in which ``MISSING_REQUESTS`` without any report show that none come, where scrapes show nothing."""
BLOCK_SECONDS: Final = 10.0
"""Reports, and requests that ended without one, are compared for so long at a time."""
LOST_REQUESTS: Final = 20
LOST_SHARE: Final = 0.02
"""Requests that ended without a report, and their share of those that ended, from which ends are
estimated."""
COMPLETE_REQUESTS: Final = 100
COMPLETE_SHARE: Final = 0.98
"""Requests sent in a block, and the share of them that was reported, from which reports are complete
again."""
LONGEST_INTERVAL: Final = 1.0
"""Seconds between two reports at most: so much work may wait in an engine."""
DELAY_WEIGHT: Final = 0.2
"""How much one measured delay moves the mean: each is one of a whole message of the log."""
RATE_SECONDS: Final = 2.0
"""Time constant of the rate of ends: two messages of a log that comes every second."""

NO_REPORTS: Final = (
    "no gateway reports how requests end (no access log, no response passes the picker): load is estimated "
    "from scrapes, which show ends up to --scrape-interval late; send Envoy's gRPC access log "
    "to this port (docs/guides/attach-gateway.md)"
)
SOME_REPORTS: Final = (
    "gateways report how some requests end and not others (one of them, or a route, sends no access log, or "
    "entries are lost): load is estimated from scrapes, as without reports; send all entries of Envoy's gRPC "
    "access log to this port (docs/guides/attach-gateway.md)"
)


class EndReports:
    """Whether gateways report how requests end.

    They are taken to do so until a scrape shows that requests have ended of which no report came.
    """

    __slots__ = (
        "_block_at",
        "_block_lost",
        "_block_reported",
        "_block_sent",
        "_reported",
        "_sent",
        "_since",
        "certain",
        "interval",
        "known",
        "partial",
    )

    def __init__(self) -> None:
        self.known = True
        """False if the ends of requests are not reported."""
        self.certain = False
        """Reports have come, and still do."""
        self.partial = False
        """Reports come, but not of all requests, so that they prove nothing."""
        self.interval = 0.0
        """Seconds between two reports; 0 while they are not measured."""
        self._block_at = -inf
        self._block_sent = self._block_reported = self._block_lost = 0
        self._reported = False
        self._sent = 0
        self._since = inf

    def on_sent(self, now: float) -> None:
        """Note a request of this replica."""
        self._sent += 1
        if self._sent == 1:
            self._since = now
        self.on_sent_by_any(now)

    def on_sent_by_any(self, now: float) -> None:
        """Note a request of any replica."""
        self._block_sent += 1
        if now - self._block_at >= BLOCK_SECONDS:
            self._begin_block(now)

    def on_report(self) -> None:
        """Note the end of a request of any replica, as a gateway reported it."""
        self._reported = True
        self._block_reported += 1
        self._sent, self._since = 0, inf
        if not self.partial:
            self.known = self.certain = True

    def on_delay(self, seconds: float) -> None:
        """Note how late a request was reported: half of the time between reports, on average."""
        interval = min(max(2.0 * seconds, 0.0), LONGEST_INTERVAL)
        self.interval += DELAY_WEIGHT * (interval - self.interval)

    def on_lost(self, requests: int, now: float) -> None:
        """Note requests of this replica that two scrapes in a row have not shown, and that were not
        reported."""
        if now - self._block_at >= BLOCK_SECONDS:
            self._begin_block(now)
        self._block_lost += requests
        lost, ended = self._block_lost, self._block_lost + self._block_reported
        if self._reported and lost >= LOST_REQUESTS and lost > LOST_SHARE * ended and not self.partial:
            self.partial = True
            self.known = self.certain = False
            self._begin_block(now)

    def on_unmeasured(self, now: float) -> None:
        """Note a request to an engine without metrics, of which no scrape will show the end."""
        if self._sent >= MISSING_REQUESTS and now - self._since >= UNMEASURED_SECONDS:
            self.known = self.certain = False

    def _begin_block(self, now: float) -> None:
        if (
            self._block_sent >= COMPLETE_REQUESTS
            and self._block_reported >= COMPLETE_SHARE * self._block_sent
        ):
            self.partial = False
        self._block_at = now
        self._block_sent = self._block_reported = self._block_lost = 0

    def on_unnoticed(self, now: float) -> None:
        """Note that a scrape shows less requests than are known: some have ended.

        Reports come a second late where Envoy's buffer is large, and may be lost now and then.
        """
        silent = self._sent > SILENT_REQUESTS and now - self._since > SILENT_SECONDS
        if self._sent and (silent or not self._reported):
            self.known = self.certain = False

    def missing(self, now: float) -> str:
        """Return what is missing and what it costs: reports of some requests, or of all, if so many were sent
        without one that none will come; else an empty text."""
        if self.partial:
            return SOME_REPORTS
        silent = self._sent >= MISSING_REQUESTS and now - self._since >= MISSING_SECONDS
        return NO_REPORTS if silent and not self.known else ""


class LateEnds:
    """The number of requests of an endpoint that end between two reports: ends a second * interval.

    Example: an engine of 8 slots can answer 40 requests/s, and the log comes once a second. If it were sent 8
    requests after each report, it would be idle for four fifths of the time. It gets 48: 8 run, and 40 end
    until the next report.
    """

    __slots__ = ("_at", "_seconds")

    def __init__(self) -> None:
        self._at = 0.0
        self._seconds = 0.0
        """Sum of the intervals of the reports, faded."""

    def on_report(self, interval: float, now: float) -> None:
        """Note the report of an end, where reports come every ``interval`` seconds."""
        self._fade(now)
        self._seconds += interval

    def requests(self, now: float) -> int:
        """Return the expected number, rounded down."""
        self._fade(now)
        return int(self._seconds / RATE_SECONDS)

    def _fade(self, now: float) -> None:
        if now > self._at:
            self._seconds *= exp((self._at - now) / RATE_SECONDS)
            self._at = now


class StayEstimate:
    """Seconds that requests stay at an endpoint, by Little's law: request seconds / arrivals."""

    __slots__ = ("_arrived", "_busy_since", "_request_seconds", "_sent", "_there", "assumed")

    def __init__(self) -> None:
        self.assumed = inf
        """Seconds where nothing is learned."""
        self._sent = 0
        self._there = 0
        """Requests that the last scrape showed."""
        self._busy_since = 0.0
        """Time of the last scrape, or of the first request after it if it showed none."""
        self._request_seconds = 0.0
        self._arrived = 0.0

    @property
    def sent(self) -> int:
        """Requests sent since the last scrape."""
        return self._sent

    @property
    def seconds(self) -> float:
        """Time after which a request counts as ended; infinite while nothing is learned."""
        if not self._arrived:
            return self.assumed
        return max(SHORTEST_STAY, STAY_FACTOR * self._request_seconds / self._arrived)

    def on_sent(self, now: float) -> None:
        """Note a request of any replica that was sent there."""
        if not (self._sent or self._there):
            self._busy_since = now
        self._sent += 1

    def on_scrape(self, there: int, now: float) -> None:
        """Learn from a scrape that shows so many requests, running and waiting."""
        if self._sent or self._there:
            seconds = max(now - self._busy_since, 0.0)
            fade = exp(-seconds / MEMORY_SECONDS)
            self._request_seconds = fade * self._request_seconds + there * seconds
            self._arrived = fade * self._arrived + self._sent
        self._busy_since, self._there, self._sent = now, there, 0

    def forget(self) -> None:
        """Assume ``ASSUMED_SECONDS``: the engine has no metrics."""
        self._request_seconds = self._arrived = 0.0
        self._sent = self._there = 0
        self.assumed = ASSUMED_SECONDS


class AssumedStays:
    """The attempts of this replica at an endpoint of which nothing shows the end, by the stay assumed."""

    __slots__ = ("_by_stay",)

    def __init__(self, attempts: Iterable["Attempt"] = ()) -> None:
        self._by_stay: list[OrderedDict[Attempt, None]] = [OrderedDict() for _ in range(ASSUMED_STAYS)]
        for attempt in attempts:
            self.add(attempt)

    def add(self, attempt: "Attempt") -> None:
        """Add the newest attempt; no effect for one of another replica, which ends it."""
        if not attempt.request.origin:
            self._by_stay[_stay(attempt)][attempt] = None

    def remove(self, attempt: "Attempt") -> None:
        """Remove an attempt that has ended or left; no effect if it is not there."""
        self._by_stay[_stay(attempt)].pop(attempt, None)

    def overdue(self, now: float, seconds: float) -> list["Attempt"]:
        """Return those that have stayed for longer than assumed (``seconds``, give or take
        ``ASSUMED_SPREAD``), ``MOST_OVERDUE`` at most."""
        found: list[Attempt] = []
        for number, attempts in enumerate(self._by_stay):
            spread = ASSUMED_SPREAD * ((2 * number + 1) / ASSUMED_STAYS - 1)
            since = now - seconds * (1 + spread)
            for attempt in attempts:
                if attempt.routed_at >= since or len(found) == MOST_OVERDUE:
                    break
                found.append(attempt)
        return found


def _stay(attempt: "Attempt") -> int:
    return int(attempt.number * GOLDEN % 1.0 * ASSUMED_STAYS)
