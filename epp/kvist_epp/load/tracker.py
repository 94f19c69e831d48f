"""The load tracker: requests, backlog and rates of every endpoint, known rather than scraped. Pure.

Every clock is a parameter: seconds, from any monotonic origin. A request adds its uncached tokens to an
endpoint's backlog when it is routed. They go away as the engine's events show prefill advancing; without
events they drain at the endpoint's learned rate, oldest request first, as vLLM schedules (``endpoint_load``).
The request itself ends when the access log or the response says so, when nothing was heard of it for long, or
when scrapes show fewer requests than are known. Scrapes that show more reveal traffic that did not pass
through the picker.
"""

from collections.abc import Hashable, Mapping
from heapq import nlargest
from math import inf
from typing import Final

from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.load.end_reports import AssumedStays
from kvist_epp.load.endpoint_load import routed_at
from kvist_epp.load.in_flight import Attempt, InFlightRequest, Leg, RequestState
from kvist_epp.load.request_books import RequestBooks

_DECODING: Final = RequestState.DECODING  # as in ``in_flight``


class LoadTracker(RequestBooks):
    """The loads of all endpoints and the requests on them.

    Every method is O(1) per request, amortised, but ``reconcile`` (linear in the endpoint's requests).
    """

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
        """End and return the requests that must have ended since the last call; none with reports of ends and
        metrics. Full endpoints are looked at again unless ends are surely reported."""
        known = self.end_reports.known
        for load in self._loads.values():
            if load.attempts and (load.unmeasured or not known):
                self._estimate_ends(load, now)
            if load.scrape_helps(self._grace) and load.full(inf):
                self.on_doubt(load.key)
        ended, self._overdue = self._overdue, []
        return ended

    # Requests of other replicas

    def add_remote(self, attempt: Attempt, now: float) -> None:
        """Add what another replica sent. If the last scrape counted it as untracked, it no longer is."""
        load = attempt.load
        load.drain(now)
        load.add(attempt)
        load.stay.on_sent(attempt.routed_at)
        self.end_reports.on_sent_by_any(now)
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
        else:
            attempt.load.on_reported_end(now)
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
        if attempt.leg is Leg.DECODE:  # its blocks were transferred: that is no rate of prefill
            computed = 0.0
        if request in self._by_age:
            self._by_age.move_to_end(request)
        if not (backlog or computed) and self._answer_goes_on(attempt, now):
            return
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

    def _answer_goes_on(self, attempt: Attempt, now: float) -> bool:
        """Apply an event of a request whose prompt was computed before. Where no prompt waits it changes
        nothing that picks read; otherwise, and of other requests, return False and do nothing."""
        load = attempt.load
        before = attempt.progressed and attempt.request.state is _DECODING
        if not before or load.prefill_queue or load.rate_estimator.measuring:
            return False
        load.drain(now)
        load.rate_estimator.on_progress(0.0, 0.0, attempt.routed_at, now)
        load.last_event_at = attempt.last_event_at = now
        return True

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
        load.assumed_stays = None
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
        if lost := sum(not request.origin for request in ended):
            self.end_reports.on_lost(lost, now)
        load.unseen_requests = unseen - len(ended)
        load.estimate_late_ends(now)
        still_waiting = max(0, waiting - load.untracked_requests)
        kept = [one for one in arrived if one.open]
        load.restore_waiting(kept[-still_waiting:] if still_waiting else [])
        self._on_capacity()
        return [request for request in ended if not request.origin]

    def unsettled_hits(self, endpoint: str, running: int, waiting: int, *, asked_at: float) -> int:
        """Return the most tokens that the index had of those requests of this replica that an engine may not
        have looked up in its cache, when it was asked at ``asked_at`` and had so many requests.

        These are the requests on their way, those that wait, and those that came during the present step,
        which vLLM counts at its end. Which ones wait is not known: the largest hits are taken.
        """
        attempts, reached = self.load(endpoint).attempts, asked_at - self._grace
        if not attempts:
            return 0
        arrived = sum(one.routed_at <= reached for one in attempts)
        own = [one for one in attempts if not one.request.origin]
        late = sum(one.request.indexed_on_gpu for one in own if one.routed_at > reached)
        hits = (one.request.indexed_on_gpu for one in own if one.routed_at <= reached)
        return late + sum(nlargest(max(waiting, arrived - running), hits))

    def calibrate(
        self,
        endpoint: str,
        *,
        rate: float | None = None,
        decode_seconds: float | None = None,
        slots: int | None = None,
        kv_full_at: int | None = None,
        transfer_rate: float | None = None,
    ) -> None:
        """Store what scrapes show of an endpoint; None: nothing yet. Its own events know the rate better."""
        load = self.load(endpoint)
        load.decode_seconds, load.transfer_rate = decode_seconds, transfer_rate
        load.slots, load.kv_full_at = slots, kv_full_at
        self.changed.add(load)
        if rate is not None and rate > 0 and load.rate_estimator.rate is None:
            self._learn_rate(load, max(rate, load.rate_estimator.proven))
        self._on_capacity()

    def calibrate_tiers(
        self, endpoint: str, rates: Mapping[str, float], *, skipped: frozenset[str], limited: bool
    ) -> None:
        """Store what scrapes show of an endpoint's slower tiers: tokens/s by medium, those from which it must
        not load, and whether it can be kept from loading."""
        load = self.load(endpoint)
        load.tier_rates, load.skipped_media, load.limits_loads = rates, skipped, limited
        self.changed.add(load)

    def forget_scrapes(self, endpoint: str) -> None:
        """Drop what scrapes showed of an endpoint: its engine has no metrics (any more)."""
        load = self.load(endpoint)
        load.untracked_requests = load.unseen_requests = 0
        if load.assumed_stays is None:
            load.assumed_stays = AssumedStays(load.attempts)
        load.stay.forget()
        # one lost report would keep a slot for minutes, so nothing is full without metrics
        self.calibrate(endpoint, decode_seconds=load.decode_seconds, transfer_rate=load.transfer_rate)

    def on_scrape(self, endpoint: str, sample: EngineSample, now: float) -> None:
        """Update the endpoint's time per output token from a scrape."""
        load = self.load(endpoint)
        if load.tpot is not None:
            helping = sum([one.leg is Leg.PREFILL for one in load.attempts])
            load.tpot.on_scrape(sample, load.drain(now), load.rate, now, helping=helping)
            self._on_capacity()

    def remove_endpoint(self, endpoint: str) -> list[InFlightRequest]:
        """Drop an endpoint that has left; return the requests of this replica that were on it."""
        load = self._loads.pop(endpoint, None)
        if load is not None and load.tpot is not None:
            load.tpot.detach()
        if self._rates.remove(endpoint):
            self._set_rates(self._loads.values())
        attempts = [] if load is None else load.attempts
        # a request whose prompt was computed there is answered elsewhere: its leg ends by itself
        gone = [one for one in attempts if one.leg is not Leg.PREFILL or one.request.origin]
        for request in (ended := [attempt.request for attempt in gone]):
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

    def _last_sign(self, attempt: Attempt) -> float:
        """Sort key: the time of the last reported progress. Among requests with nearly the same time each
        replica ends its own first; otherwise two replicas could each wait for the other."""
        return attempt.last_event_at + (self._grace if attempt.request.origin else 0.0)
