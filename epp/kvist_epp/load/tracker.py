"""The load tracker: requests, backlog and rates of every endpoint, known rather than scraped. Pure.

Every clock is a parameter: seconds, from any monotonic origin. A request adds its uncached tokens to an
endpoint's backlog when it is routed. They go away as the engine's events show prefill advancing; without
events they drain at the endpoint's learned rate, oldest request first, as vLLM schedules (``endpoint_load``).
The request itself ends when the access log or the response says so, when nothing was heard of it for long, or
when scrapes show fewer requests than are known. Scrapes that show more reveal traffic that did not pass
through the picker.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from math import inf
from typing import Final

from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.load.end_reports import EndReports
from kvist_epp.load.endpoint_load import DEFAULT_RATE, EndpointLoad, routed_at
from kvist_epp.load.in_flight import (
    Attempt,
    InFlightRequest,
    InFlightTable,
    Leg,
    RequestListener,
    RequestState,
)
from kvist_epp.load.prefill_rate import PoolPrefillRates
from kvist_epp.load.tpot_admission import TpotAdmission

DOUBTFUL_REQUESTS: Final = 256
"""Requests sent to an endpoint of unknown size after which a scrape should look at it."""


class LoadTracker:
    """The loads of all endpoints and the requests on them.

    Every method is O(1) per request, amortised, but ``reconcile`` (linear in the endpoint's requests).
    """

    def __init__(
        self,
        *,
        default_rate: float = DEFAULT_RATE,
        expire_seconds: float = 300.0,
        grace_seconds: float = 0.5,
        max_requests: int = 100_000,
        tpot_seconds: float = 0.0,
        on_capacity: Callable[[], None] = lambda: None,
        on_doubt: Callable[[str], None] = lambda _endpoint: None,
        listeners: Iterable[RequestListener] = (),
    ) -> None:
        """Make a tracker without endpoints.

        Args:
            default_rate: Prefill tokens/s until an endpoint has learned its own.
            expire_seconds: A request that shows no sign of life for this long has ended.
            grace_seconds: A request routed this shortly before a scrape may not have reached the engine yet.
            max_requests: Bounds memory: the request with the oldest sign of life ends first.
            tpot_seconds: TPOT target of the endpoints in seconds; 0: there is none.
            on_capacity: Called whenever an endpoint may have got capacity: a request ended or advanced, or a
                scrape corrected its load.
            on_doubt: Called with the key of an endpoint to scrape now: it may only seem to be full.
            listeners: Notified of requests.
        """
        self.table = InFlightTable()
        self.expire_seconds = expire_seconds
        self.tpot_seconds = tpot_seconds
        self._rates = PoolPrefillRates(default_rate)
        self._grace = grace_seconds
        self._max_requests = max_requests
        self._on_capacity = on_capacity
        self.on_doubt = on_doubt
        self.end_reports = EndReports()
        self._listeners: list[RequestListener] = []
        self._on_routed: list[Callable[[Attempt], None]] = []
        self._on_ended: list[Callable[[Attempt], None]] = []
        self._loads: dict[str, EndpointLoad] = {}
        self.changed: set[EndpointLoad] = set()
        """Loads with figures that have changed since the last pick, which empties it."""
        self._by_age: OrderedDict[InFlightRequest, None] = OrderedDict()
        """Requests of this replica, those without reported progress for longest first."""
        self._evicted: list[InFlightRequest] = []
        self._overdue: list[InFlightRequest] = []
        self._attempts = 0
        for listener in listeners:
            self.add_listener(listener)

    def __len__(self) -> int:
        """Requests under way, of all replicas."""
        return sum(len(load.attempts) for load in self._loads.values())

    def add_listener(self, listener: RequestListener) -> None:
        """Notify it of requests, too; of routed and of ended ones only if it does something then."""
        self._listeners.append(listener)
        kind = type(listener)
        self._on_routed += [listener.on_routed] * (kind.on_routed is not RequestListener.on_routed)
        self._on_ended += [listener.on_ended] * (kind.on_ended is not RequestListener.on_ended)

    def own(self) -> list[Attempt]:
        """Return the attempts that this replica routed, those without reported progress for longest first."""
        return [request.attempt for request in self._by_age]

    def load(self, endpoint: str) -> EndpointLoad:
        """Return the load of an endpoint by its key, made if absent; the same object until it is removed."""
        load = self._loads.get(endpoint)
        if load is None:
            tpot = TpotAdmission(self.tpot_seconds) if self.tpot_seconds else None
            load = EndpointLoad(
                endpoint,
                rate=self._rates.rate(endpoint),
                tpot=tpot,
                changed=self.changed,
                end_reports=self.end_reports,
            )
            self._loads[endpoint] = load
        return load

    def loads(self, now: float) -> Mapping[str, EndpointLoad]:
        """Return all loads by endpoint key, drained to ``now``."""
        for load in self._loads.values():
            load.drain(now)
        return self._loads

    # Requests of this replica

    def add(
        self,
        request: InFlightRequest,
        endpoint: str,
        uncached: int,
        now: float,
        *,
        hostport: str = "",
        leg: Leg = Leg.SERVE,
    ) -> Attempt:
        """Send a request to an endpoint, where ``uncached`` of its tokens have to be computed."""
        attempt = self._attempt(request, endpoint, uncached, now, hostport, leg)
        self.end_reports.on_sent(now)
        if not self.end_reports.certain:
            self._estimate_ends(attempt.load, now)
        request.attempts.append(attempt)
        request.state = RequestState.SENT
        self.table.add(request)
        self._by_age[request] = None
        for on_routed in self._on_routed:
            on_routed(attempt)
        if len(self._by_age) > self._max_requests:
            oldest = next(iter(self._by_age))
            self.end(oldest, now)
            self._evicted.append(oldest)
        return attempt

    def move(
        self, request: InFlightRequest, endpoint: str, uncached: int, now: float, *, hostport: str = ""
    ) -> None:
        """Another endpoint serves the request; there ``uncached`` tokens have to be computed."""
        old = request.attempt
        old.load.drain(now)
        old.load.remove(old)
        request.content = None  # whether another one there has its backlog is asked when it is announced
        new = self._attempt(request, endpoint, uncached, now, hostport, old.leg)
        self.table.move(request, new)
        self._by_age.move_to_end(request)
        for listener in self._listeners:
            listener.on_moved(old, new)
        self._on_capacity()

    def end(self, request: InFlightRequest, now: float) -> None:
        """Remove a request that has ended, of any replica; no effect if it has ended already."""
        attempt = request.attempt
        if attempt.open:
            attempt.load.drain(now)
        self._end(request)
        self._on_capacity()

    def expire(self, now: float) -> list[InFlightRequest]:
        """End and return the requests without reported progress for ``expire_seconds``, and return those that
        newer ones have displaced since the last call."""
        expired, self._evicted = self._evicted, []
        while self._by_age:
            request = next(iter(self._by_age))
            if now - request.attempt.last_event_at < self.expire_seconds:
                break
            self._end(request)
            self._on_capacity()
            expired.append(request)
        return expired

    def end_overdue(self, now: float) -> list[InFlightRequest]:
        """End and return the requests that must have ended since the last call; none with reports of ends."""
        if not self.end_reports.known:
            for load in self._loads.values():
                if load.attempts:
                    self._estimate_ends(load, now)
                if load.full(inf):
                    self.on_doubt(load.key)
        ended, self._overdue = self._overdue, []
        return ended

    def _estimate_ends(self, load: EndpointLoad, now: float) -> None:
        for attempt in load.overdue(now):
            self._end(attempt.request)
            self._overdue.append(attempt.request)
            self._on_capacity()
        if load.stay.sent >= (load.slots or DOUBTFUL_REQUESTS):
            self.on_doubt(load.key)

    # Requests of other replicas

    def add_remote(self, attempt: Attempt, now: float) -> None:
        """Add what another replica sent. If the last scrape counted it as untracked, it no longer is."""
        load = attempt.load
        load.drain(now)
        load.add(attempt)
        load.stay.on_sent(attempt.routed_at)
        attempt.request.state = RequestState.PREFILLING if attempt.progressed else RequestState.SENT
        self.table.add(attempt.request)
        if load.untracked_requests and attempt.routed_at <= load.last_scrape_at:
            load.untracked_requests -= 1
            self.changed.add(load)

    def end_remote(self, attempt: Attempt, now: float, *, untracked: bool = False) -> None:
        """End what another replica sent; ``untracked``: the replica is silent, the request may go on."""
        if not attempt.open:
            return
        attempt.load.drain(now)
        self._end(attempt.request)
        if untracked:
            attempt.load.untracked_requests += 1
            self.changed.add(attempt.load)
        self._on_capacity()

    def set_content(self, attempt: Attempt, content: Hashable) -> None:
        """Name an attempt's prompt: one of another replica that is equal is computed with it."""
        attempt.load.set_content(attempt, content)
        self._on_capacity()

    # What engines report

    def on_progress(self, attempt: Attempt, backlog: int, now: float, *, computed: float = 0.0) -> None:
        """Apply an event: ``backlog`` tokens are left to prefill (0: it decodes), ``computed`` more are
        done."""
        request, load = attempt.request, attempt.load
        if request in self._by_age:
            self._by_age.move_to_end(request)
        if backlog:
            if request.state is RequestState.SENT:
                request.state = RequestState.PREFILLING
        else:
            self.table.on_decoding(request, now)
        load.on_progress(attempt, float(backlog), now, computed)
        estimator = load.rate_estimator
        if estimator.rate is not None:
            self._learn_rate(load, estimator.rate)
        else:
            load.rate = max(load.rate, estimator.proven)
        for listener in self._listeners:
            listener.on_progress(attempt)
        self._on_capacity()

    def on_cache_truth(self, request: InFlightRequest, cached: int, now: float) -> None:
        """Pass on how many tokens of a request its engine had cached; only the first report counts."""
        if request.truth_known:
            return
        request.truth_known, request.cached_tokens = True, cached
        for listener in self._listeners:
            listener.on_cache_truth(request, cached, now)

    def on_first_token(self, request: InFlightRequest, seconds: float, now: float) -> None:
        """Pass on that the first token of a request was seen, ``seconds`` after it had arrived."""
        for listener in self._listeners:
            listener.on_first_token(request, seconds, now)

    def reconcile(
        self, endpoint: str, running: int, waiting: int, now: float, *, asked_at: float | None = None
    ) -> list[InFlightRequest]:
        """Compare with what the engine says it has; ``asked_at``: when the scrape was sent (default: now).

        More than the replicas sent: the rest is untracked. Fewer, twice in a row: those without a sign of
        life for longest have ended unnoticed. This replica's among them end and are returned; another
        replica's are left to that replica, which sees the same. Requests that still wait in the engine have
        all of their tokens as backlog: vLLM starts the oldest first, so those are the newest.
        """
        load = self.load(endpoint)
        load.drain(now)
        reported = max(running, 0) + max(waiting, 0)
        load.stay.on_scrape(reported, now)
        load.untracked_requests = max(0, reported - len(load.attempts))
        load.last_scrape_at = now if asked_at is None else asked_at
        arrived = sorted(
            (one for one in load.attempts if one.routed_at <= load.last_scrape_at - self._grace),
            key=routed_at,
        )
        unseen = max(0, len(arrived) - reported)
        if unseen:
            self.end_reports.on_unnoticed(now)
        silent = sorted(arrived, key=self._last_sign)[: min(unseen, load.unseen_requests)]
        ended = [one.request for one in silent if one.request.orphan or not one.request.origin]
        for request in ended:
            self._end(request)
        load.unseen_requests = unseen - len(ended)
        self.changed.add(load)
        still_waiting = max(0, waiting - load.untracked_requests)
        kept = [one for one in arrived if one.open]
        load.restore_waiting(kept[-still_waiting:] if still_waiting else [])
        self._on_capacity()
        return [request for request in ended if not request.origin]

    def calibrate(
        self,
        endpoint: str,
        *,
        rate: float | None = None,
        decode_seconds: float | None = None,
        slots: int | None = None,
        kv_full_at: int | None = None,
    ) -> None:
        """Store what scrapes show of an endpoint; None: nothing yet. Its own events know the rate better."""
        load = self.load(endpoint)
        load.decode_seconds = decode_seconds
        load.slots, load.kv_full_at = slots, kv_full_at
        self.changed.add(load)
        if rate is not None and rate > 0 and load.rate_estimator.rate is None:
            self._learn_rate(load, max(rate, load.rate_estimator.proven))
        self._on_capacity()

    def forget_scrapes(self, endpoint: str, *, slots: int | None) -> None:
        """Drop what scrapes showed of an endpoint: its engine has no metrics (any more)."""
        load = self.load(endpoint)
        load.untracked_requests = load.unseen_requests = 0
        load.stay.forget()
        self.calibrate(endpoint, decode_seconds=load.decode_seconds, slots=slots)

    def on_scrape(self, endpoint: str, sample: EngineSample, now: float) -> None:
        """Update the endpoint's time per output token from a scrape."""
        load = self.load(endpoint)
        if load.tpot is not None:
            load.tpot.on_scrape(sample, load.drain(now), load.rate, now)
            self._on_capacity()

    def remove_endpoint(self, endpoint: str) -> list[InFlightRequest]:
        """Drop an endpoint that has left; return the requests of this replica that were on it."""
        load = self._loads.pop(endpoint, None)
        if self._rates.remove(endpoint):
            self._set_rates(self._loads.values())
        for request in (ended := [attempt.request for attempt in load.attempts] if load else []):
            self._end(request)
            self._on_capacity()
        return [request for request in ended if not request.origin]

    # Figures

    def backlog(self, endpoint: str, now: float | None = None) -> int:
        """Return the tokens an endpoint still has to prefill; as of the last change without ``now``."""
        load = self._loads.get(endpoint)
        return round(0 if load is None else load.backlog_tokens if now is None else load.drain(now))

    def running(self, endpoint: str) -> int:
        """Return the requests on an endpoint, untracked ones included."""
        return self._loads[endpoint].running if endpoint in self._loads else 0

    def rate(self, endpoint: str) -> float:
        """Return an endpoint's prefill rate in tokens/s: learned, else the fastest's, else the default."""
        load = self._loads.get(endpoint)
        return load.rate if load else self._rates.rate(endpoint)

    def _attempt(
        self, request: InFlightRequest, endpoint: str, uncached: int, now: float, hostport: str, leg: Leg
    ) -> Attempt:
        load = self.load(endpoint)
        load.drain(now)
        self._attempts += 1
        backlog = float(uncached) if uncached > 0 else 0.0
        attempt = Attempt(request, load, backlog, now, now, backlog, self._attempts, False, leg, hostport)
        load.add(attempt)
        load.stay.on_sent(now)
        return attempt

    def _last_sign(self, attempt: Attempt) -> float:
        """Sort key: the time of the last reported progress. Among requests with nearly the same time each
        replica ends its own first; otherwise two replicas could each wait for the other."""
        return attempt.last_event_at + (self._grace if attempt.request.origin else 0.0)

    def _end(self, request: InFlightRequest) -> None:
        attempt = request.attempt
        if attempt.open:
            attempt.load.remove(attempt)
        self.table.remove(request)
        if request in self._by_age:
            del self._by_age[request]
            for on_ended in self._on_ended:
                on_ended(attempt)

    def _learn_rate(self, load: EndpointLoad, rate: float) -> None:
        self._set_rates(self._loads.values() if self._rates.learn(load.key, rate) else (load,))

    def _set_rates(self, loads: Iterable[EndpointLoad]) -> None:
        for load in loads:
            load.rate = self._rates.rate(load.key, load.rate_estimator.proven)
            self.changed.add(load)
