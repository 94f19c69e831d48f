"""Requests on endpoints: which attempts each has, from being sent to its end. Pure; clocks are parameters.

``RequestBooks`` is what the ``LoadTracker`` keeps of requests; what engines and scrapes report of them is in
``tracker``.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from kvist_epp.load.end_reports import EndReports
from kvist_epp.load.endpoint_load import DEFAULT_RATE, EndpointLoad
from kvist_epp.load.in_flight import (
    Attempt,
    DecodePlace,
    InFlightRequest,
    InFlightTable,
    Leg,
    RequestListener,
    RequestState,
)
from kvist_epp.load.prefill_rate import PoolPrefillRates
from kvist_epp.load.tpot_admission import TpotAdmission

_SENT: Final = RequestState.SENT  # as in ``in_flight``
DOUBTFUL_REQUESTS: Final = 256
"""Requests sent to an endpoint of unknown size after which a scrape should look at it."""


class RequestBooks:
    """The requests on all endpoints; the ``LoadTracker`` adds what is reported of them."""

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
            load = EndpointLoad(
                endpoint,
                rate=self._rates.rate(endpoint),
                changed=self.changed,
                end_reports=self.end_reports,
            )
            if self.tpot_seconds:
                load.tpot = TpotAdmission(self.tpot_seconds, partial(self.changed.add, load))
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
        transferred: int = 0,
    ) -> Attempt:
        """Send a request to an endpoint, where ``uncached`` of its tokens have to be computed, and
        ``transferred`` ones come from another endpoint."""
        attempt = self._attempt(request, endpoint, uncached, now, hostport, leg, transferred)
        if request.reported:
            self.end_reports.on_sent(now)
        if attempt.load.unmeasured:
            self.end_reports.on_unmeasured(now)
        if not (self.end_reports.certain or attempt.load.unmeasured):  # ticks are enough for those
            self._estimate_ends(attempt.load, now)
        request.attempts.append(attempt)
        request.state = _SENT
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
        attempt = request.attempts[-1]
        if attempt.open:
            attempt.load.drain(now)
            if request.reported:
                attempt.load.on_reported_end(now)
        self._end(request)
        self._on_capacity()

    # Disaggregated requests

    def keep_place(self, request: InFlightRequest, place: DecodePlace) -> None:
        """Keep a place where a request will be answered whose prompt another endpoint computes."""
        request.decode_place, load = place, self.load(place.endpoint)
        load.keep_place(request, place.transferred)

    def release_place(self, request: InFlightRequest) -> None:
        """Give the place back; no effect if there is none."""
        place, request.decode_place = request.decode_place, None
        load = None if place is None else self._loads.get(place.endpoint)
        if load is not None:
            load.release_place(request)

    def begin_decode(
        self, request: InFlightRequest, place: DecodePlace, uncached: int, now: float, *, leg: Leg
    ) -> None:
        """Another endpoint than the one that computed the prompt answers the request.

        There ``uncached`` tokens have to be computed: 0, but where the blocks cannot be transferred. What the
        engine reports as cached there is then no hit of its index, so it is not compared.
        """
        self.release_place(request)
        old, request.state = request.attempt, RequestState.SENT
        if old.open:
            old.load.drain(now)
            old.load.remove(old)
        transferred = place.transferred if leg is Leg.DECODE else 0
        new = self._attempt(request, place.endpoint, uncached, now, place.hostport, leg, transferred)
        request.truth_known, request.content = True, None
        request.indexed_tokens, request.indexed_lower = place.indexed, place.indexed_lower
        self.table.remove(request)
        request.attempts.append(new)
        request.state = RequestState.SENT
        self.table.add(request)
        self._by_age[request] = None
        self._by_age.move_to_end(request)
        for listener in self._listeners:
            listener.on_moved(old, new)
        self._on_capacity()

    def _estimate_ends(self, load: EndpointLoad, now: float) -> None:
        for attempt in load.overdue(now):
            self._end(attempt.request)
            self._overdue.append(attempt.request)
            self._on_capacity()
        if load.stay.sent >= (load.slots or DOUBTFUL_REQUESTS) and not load.unmeasured:
            self.on_doubt(load.key)

    def _attempt(
        self,
        request: InFlightRequest,
        endpoint: str,
        uncached: int,
        now: float,
        hostport: str,
        leg: Leg,
        transferred: int = 0,
    ) -> Attempt:
        load = self.load(endpoint)
        load.drain(now)
        self._attempts += 1
        backlog = float(uncached) if uncached > 0 and not load.blind else 0.0
        attempt = Attempt(request, load, backlog, now, now, backlog, self._attempts, False, leg, hostport)
        attempt.transferred = float(transferred)
        load.add(attempt)
        load.stay.on_sent(now)
        return attempt

    def _end(self, request: InFlightRequest) -> None:
        attempt = request.attempts[-1]
        if request.decode_place is not None:
            self.release_place(request)
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
