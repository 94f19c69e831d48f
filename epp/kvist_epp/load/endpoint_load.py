"""The load of one endpoint: its attempts, and the prompt tokens it still has to prefill (its backlog). Pure.

KV events of an engine say how its prompts advance, and the backlog of such an endpoint falls only when they
say so. Without events the backlog drains with time at the prefill rate. That runs ahead of every busy engine:
decoding, steps that begin late and prompts that wait for blocks are not in the rate, and estimates that ran
ahead saw no queue on any endpoint (``docs/decisions/0014``).
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from types import MappingProxyType
from typing import Final

from kvist_epp.engines.vllm.kv_events import CPU, STORAGE
from kvist_epp.load.end_reports import (
    LOOK_SECONDS,
    UNREPORTED_SECONDS,
    AssumedStays,
    EndReports,
    LateEnds,
    StayEstimate,
)
from kvist_epp.load.in_flight import Attempt
from kvist_epp.load.prefill_rate import PrefillRateEstimator
from kvist_epp.load.prefill_share import PrefillShare
from kvist_epp.load.tpot_admission import LIGHT_TOKENS, TpotAdmission

DEFAULT_RATE: Final = 15_928.0
"""Prefill tokens/s until an endpoint's own is learned: Qwen3-32B on one H100 (``kvist sim``'s default)."""
DEFAULT_TRANSFER_RATE: Final = 48_000.0
"""Tokens/s received from other endpoints until the endpoint's own rate is measured: 256 KiB a token
(Qwen3-32B) over a network of 100 Gbit/s."""
NO_RATES: Final[Mapping[str, float]] = MappingProxyType({})
STEP_TOKENS: Final = 8_192
"""The most that engines usually compute in a step (vLLM's ``--max-num-batched-tokens`` on large GPUs)."""
QUIET_SECONDS: Final = 1.0
"""Events later than one step plus this time count as lost."""
SPARE_SLOTS: Final = 0.05
"""Share of the batch that may wait in the engine besides: then a slot that becomes free is taken in the next
step, not when the end has been reported and another request sent. Without it ``rollouts`` lost 2 points of
goodput; 0.2 is as good (``docs/decisions/0021``)."""
OVERTAKEN_SECONDS: Final = 0.15
"""Two attempts further apart than this are surely computed in order, though attempts of other replicas become
known up to 0.1 s late."""


@dataclass(slots=True, eq=False)
class EndpointLoad:
    """Plain attributes that the cost reads for each pick; changed by the ``LoadTracker`` alone."""

    key: str
    rate: float = DEFAULT_RATE
    """Prefill tokens/s."""
    backlog_tokens: float = 0.0
    """As of ``at``; call ``drain`` first."""
    untracked_requests: int = 0
    """Requests the engine had at the last scrape beyond those that replicas of the picker sent."""
    slots: int | None = None
    """Sequences the engine runs at once; None: unknown, so its batch is never taken for full."""
    kv_full_at: int | None = None
    """Sequences it ran when its KV cache was full and requests waited in it; None: that was not so."""
    decode_seconds: float | None = None
    """Mean time from first to last token of a request; None: not learned."""
    tier_rates: Mapping[str, float] = field(default_factory=lambda: NO_RATES)
    """Tokens/s that the engine loads from slower media, by medium, as far as measured."""
    skipped_media: frozenset[str] = frozenset()
    """Media from which it must not load, since computing is quicker."""
    limits_loads: bool = False
    """Its engine can be kept from loading: the speed of its tiers is measured, and ``--skip-slow-tiers``."""
    loading_until: dict[str, float] = field(default_factory=dict)
    """By ``lane``: when the loads that this replica has sent will be done, at the rates of ``tier_rates``."""
    at: float = 0.0
    attempts: dict[Attempt, None] = field(default_factory=dict)
    """Under way, of all replicas, in the order they became known."""
    prefill_queue: OrderedDict[Attempt, None] = field(default_factory=OrderedDict)
    """Those with a backlog, oldest first."""
    reserved: int = 0
    """Requests that will be answered here while another endpoint computes their prompts."""
    promised_tokens: int = 0
    """Tokens of their prompts that will be transferred here."""
    places: dict[Hashable, int] = field(default_factory=dict)
    """The same by request."""
    receives_until: float = -inf
    """When the tokens that are on their way here will have arrived."""
    unseen_requests: int = 0
    """Attempts that the last scrape did not show, less those that ended since."""
    late_ends: int = 0
    """Attempts that end before the next report, since reports come late."""
    last_scrape_at: float = -inf
    """When the last scrape was sent."""
    assumed_stays: AssumedStays | None = None
    """Where its engine answers without metrics, so that no scrape shows what it has; None: it has metrics."""
    last_event_at: float = -inf
    """When events last reported work, or the first of the present queue was routed; -inf: there are none."""
    dedup_owner: dict[Hashable, Attempt] = field(default_factory=dict)
    """By content, the one of equal prompts that has their backlog."""
    rate_estimator: PrefillRateEstimator = field(default_factory=PrefillRateEstimator)
    tpot: TpotAdmission | None = None
    """Admission of prefill under a TPOT target; None: there is no target."""
    prefill_share: PrefillShare = field(default_factory=PrefillShare)
    """Share of its time for which prompts were sent there in the last seconds."""
    transfer_rate: float | None = None
    """Tokens/s that it receives from other endpoints; None: not measured."""
    stay: StayEstimate = field(default_factory=StayEstimate)
    """How long requests stay, where their ends are not reported."""
    late: LateEnds = field(default_factory=LateEnds)
    end_reports: EndReports = field(default_factory=EndReports)
    """Whether ends are reported; shared by all loads of a ``LoadTracker``."""
    changed: "set[EndpointLoad]" = field(default_factory=set, repr=False)
    """Loads with figures that have changed since the last pick; shared by all of a ``LoadTracker``."""

    @property
    def unmeasured(self) -> bool:
        """True if its engine answers without metrics."""
        return self.assumed_stays is not None

    @property
    def running(self) -> int:
        """Requests on the endpoint, untracked ones included."""
        return len(self.attempts) + self.untracked_requests + self.reserved

    @property
    def counted_requests(self) -> int:
        """Requests that take a slot, as far as known: without those that have ended by the last scrape, or
        that end before the access log reports it."""
        ended = max(self.unseen_requests, self.late_ends)
        return max(0, len(self.attempts) + self.untracked_requests + self.reserved - ended)

    @property
    def slot_limit(self) -> float:
        """Requests from which the batch and ``SPARE_SLOTS`` are full; infinite where it is unknown."""
        slots = self.slots
        return inf if slots is None else slots + int(SPARE_SLOTS * slots)

    @property
    def blind(self) -> bool:
        """True if nothing shows that a prompt has been computed: no metrics, no reports of ends, no events. A
        backlog would be a guess that holds requests back."""
        return self.unmeasured and not self.end_reports.certain and self.last_event_at == -inf

    def scrape_helps(self, grace_seconds: float) -> bool:
        """True if another scrape may show that it is not full: ends are not reported; or that is uncertain,
        and none has shown its newest requests yet, for which they must be this old."""
        if self.end_reports.certain:
            return False
        if not self.end_reports.known:
            return True
        newest = next(reversed(self.attempts), None)
        return newest is not None and self.last_scrape_at < newest.routed_at + grace_seconds

    @property
    def drains_from(self) -> float:
        """Time from which the backlog falls by itself, at ``rate``; infinite where nothing waits."""
        if not self.prefill_queue:
            return inf
        return max(self.at, self.last_event_at + QUIET_SECONDS + STEP_TOKENS / self.rate)

    @property
    def first_done_at(self) -> float:
        """Time at which its oldest prompt is computed without further events; infinite where none waits."""
        oldest = next(iter(self.prefill_queue), None)
        return inf if oldest is None else self.drains_from + oldest.backlog / self.rate

    def batch_or_backlog_full(self, max_backlog_seconds: float) -> bool:
        """True if its batch is full or its backlog is longer than this, as of the last ``drain``."""
        return (
            self.counted_requests >= self.slot_limit or self.backlog_tokens > max_backlog_seconds * self.rate
        )

    def occupy(self, medium: str, seconds: float, now: float) -> None:
        """Note a load from a slower medium, which begins when those before it are done."""
        way = lane(medium)
        self.changed.add(self)
        self.loading_until[way] = max(now, self.loading_until.get(way, now)) + seconds

    def full(self, max_backlog_seconds: float) -> bool:
        """True if no queued request may be sent there: its batch, its backlog or its KV cache is full."""
        return self.kv_cache_full or self.batch_or_backlog_full(max_backlog_seconds)

    @property
    def kv_cache_full(self) -> bool:
        """True if it runs as many sequences as when its KV cache was full and requests waited in it."""
        return self.kv_full_at is not None and self.counted_requests >= self.kv_full_at

    def admits_queued(self, tokens: int, now: float) -> bool:
        """True if a request with ``tokens`` uncached tokens that waits for this endpoint may be sent."""
        return self.tpot is None or self.tpot.admits_queued(self, tokens, now)

    def on_new_request(self, tokens: int, now: float) -> None:
        """Note a new request with ``tokens`` uncached tokens whose best endpoint is this one."""
        if self.tpot is not None and tokens > LIGHT_TOKENS:
            self.tpot.rotation.on_new_request(now)

    def seconds_until_open(self, max_backlog_seconds: float) -> float:
        """Return the seconds until time alone drains it enough; infinite if its batch or cache is full and
        the ends of requests are surely reported."""
        if self.kv_cache_full or self.batch_or_backlog_full(inf):
            return inf if self.end_reports.certain else LOOK_SECONDS
        return max(0.0, self.backlog_tokens / self.rate - max_backlog_seconds)

    def drain(self, now: float) -> float:
        """Prefill at ``rate`` for the time since the last call, except where events would have reported it.

        Returns the backlog in tokens.
        """
        queue = self.prefill_queue
        if not queue or now <= self.at:
            if now > self.at:
                self.at = now
            return self.backlog_tokens
        budget = (now - self.drains_from) * self.rate
        self.at = now
        if budget <= 0:
            return self.backlog_tokens
        while queue and budget > 0:
            head = next(iter(queue))
            if head.backlog > budget:  # no change for those who read when it will be done
                head.backlog -= budget
                self.backlog_tokens = max(head.backlog, self.backlog_tokens - budget)
                break
            budget -= head.backlog
            self.set_backlog(head, 0.0)
        return self.backlog_tokens

    def set_backlog(self, attempt: Attempt, tokens: float) -> None:
        """Set an attempt's backlog. One that has a backlog again is the engine's oldest, so it goes first."""
        if tokens > attempt.uncached:
            tokens = attempt.uncached
        elif tokens < 0.0:
            tokens = 0.0
        self.changed.add(self)
        self.backlog_tokens += tokens - attempt.backlog
        if tokens <= 0:
            self.prefill_queue.pop(attempt, None)
        elif attempt not in self.prefill_queue:
            self.prefill_queue[attempt] = None
            self.prefill_queue.move_to_end(attempt, last=False)
        attempt.backlog = tokens
        if not self.prefill_queue or self.backlog_tokens < 0:  # rounding errors of floats end here
            self.backlog_tokens = sum(one.backlog for one in self.prefill_queue)

    def on_progress(self, attempt: Attempt, tokens: float, now: float, computed: float) -> None:
        """Apply an event: ``tokens`` of the attempt are left, and ``computed`` more are done.

        Engines compute in the order of arrival. Attempts that arrived earlier and were never reported have
        therefore been computed, too: they had less than a block, or a prefix that another one had cached.
        """
        self.drain(now)
        self.set_backlog(attempt, tokens)
        for head in self._overtaken(attempt):
            self.set_backlog(head, 0.0)
        owner = self.dedup_owner.get(attempt.request.content, attempt)
        if owner is not attempt:
            self.set_backlog(owner, min(owner.backlog, tokens))
        self.rate_estimator.on_progress(computed, self.backlog_tokens, attempt.routed_at, now)
        if self.tpot is not None:
            self.tpot.on_computed(computed)
        self.last_event_at = attempt.last_event_at = now
        self.changed.add(self)
        attempt.progressed = True

    def on_reported_end(self, now: float) -> None:
        """Note that the end of a request of any replica was reported."""
        self.late.on_report(self.end_reports.interval, now)
        self.estimate_late_ends(now)

    def estimate_late_ends(self, now: float) -> None:
        """Update ``late_ends``; where reports prove nothing, ``overdue`` says what has ended."""
        self.late_ends = self.late.requests(now) if self.end_reports.certain else 0
        self.changed.add(self)

    def overdue(self, now: float) -> list[Attempt]:
        """Return attempts of this replica that have been here for so long that they must have ended; none
        where ends are reported and scrapes would show one whose report is missing."""
        known, assumed = self.end_reports.known, self.assumed_stays
        if assumed is not None:
            return assumed.overdue(now, UNREPORTED_SECONDS if known else self.stay.seconds)
        if known:
            return []
        old = takewhile(lambda one: one.routed_at < now - self.stay.seconds, self.attempts)
        return [one for one in old if not one.request.origin]

    def _overtaken(self, by: Attempt) -> list[Attempt]:
        before = takewhile(lambda head: head.routed_at < by.routed_at, self.prefill_queue)
        early = by.routed_at - OVERTAKEN_SECONDS
        return [
            head
            for head in before
            if not head.progressed and (head.backlog <= LIGHT_TOKENS or head.routed_at < early)
        ]

    def add(self, attempt: Attempt) -> None:
        """Add an attempt that was routed here, with the backlog it has."""
        self.attempts[attempt] = None
        if self.assumed_stays is not None:
            self.assumed_stays.add(attempt)
        self.changed.add(self)
        if self._is_duplicate(attempt):
            attempt.uncached = attempt.backlog = 0.0
        if attempt.transferred:
            seconds = attempt.transferred / (self.transfer_rate or DEFAULT_TRANSFER_RATE)
            self.receives_until = max(self.receives_until, attempt.routed_at) + seconds
            if self.tpot is not None:
                self.tpot.reserve(attempt.transferred)
        if self.tpot is not None:
            self.tpot.debit(attempt.backlog, self.rate, attempt.routed_at, attempt.request.origin)
        if attempt.backlog > 0:
            self.prefill_share.add(attempt.backlog / self.rate, attempt.routed_at)
            if not self.prefill_queue and self.last_event_at > -inf:
                self.last_event_at = max(self.last_event_at, attempt.routed_at)
            self.prefill_queue[attempt] = None
            self.backlog_tokens += attempt.backlog

    def keep_place(self, request: Hashable, tokens: int) -> None:
        """Keep a sequence slot, and room for so many tokens, for a request whose prompt another endpoint
        computes."""
        self.release_place(request)
        self.places[request] = tokens
        self.reserved += 1
        self.promised_tokens += tokens
        if self.tpot is not None:
            self.tpot.reserve(tokens)
        self.changed.add(self)

    def release_place(self, request: Hashable) -> None:
        """Give back what ``keep_place`` has kept; no effect if that was at an endpoint which this one has
        replaced."""
        tokens = self.places.pop(request, None)
        if tokens is None:
            return
        self.reserved -= 1
        self.promised_tokens -= tokens
        if self.tpot is not None:
            self.tpot.refund(tokens)
        self.changed.add(self)

    def set_content(self, attempt: Attempt, content: Hashable) -> None:
        """Name an attempt's prompt.

        Several replicas may send one prompt here at the same moment. The engine computes it once and finds it
        in its cache for the others, which no event reports. So only one of them has its backlog.
        """
        attempt.request.content = content
        if self._is_duplicate(attempt):
            self.set_backlog(attempt, 0.0)
            attempt.uncached = 0.0

    def _is_duplicate(self, attempt: Attempt) -> bool:
        """True if another attempt has the backlog of this prompt; if none has, this one does from now on."""
        content = attempt.request.content
        return content is not None and self.dedup_owner.setdefault(content, attempt) is not attempt

    def remove(self, attempt: Attempt) -> None:
        """Remove an attempt that has ended, with its backlog."""
        if left := attempt.backlog:
            self.set_backlog(attempt, 0.0)
        self.changed.add(self)
        del self.attempts[attempt]
        if self.assumed_stays is not None:
            self.assumed_stays.remove(attempt)
        content = attempt.request.content
        if self.dedup_owner.get(content) is attempt:
            del self.dedup_owner[content]
            if left:
                self._pass_on(content, left)
        if self.tpot is not None:
            self.tpot.refund(attempt.uncached + attempt.transferred)
        if self.unseen_requests:
            self.unseen_requests -= 1

    def _pass_on(self, content: Hashable, tokens: float) -> None:
        """Give the backlog of an ended attempt to the next one with the same prompt."""
        successor = next((one for one in self.attempts if one.request.content == content), None)
        if successor is not None:
            self.dedup_owner[content] = successor
            successor.uncached = tokens
            self.set_backlog(successor, tokens)

    def restore_waiting(self, newest: list[Attempt]) -> None:
        """Give these attempts their whole backlog again: the engine reports that it has not begun them."""
        for attempt in reversed(newest):
            if not attempt.progressed and attempt.backlog < attempt.uncached:
                self.set_backlog(attempt, attempt.uncached)
        self.prefill_queue = OrderedDict.fromkeys(sorted(self.prefill_queue, key=routed_at))


def lane(medium: str) -> str:
    """Return what the loads from a medium share: host memory has a way of its own, all others are storage,
    which engines cannot be kept from one by one."""
    return CPU if medium == CPU else STORAGE


def routed_at(attempt: Attempt) -> float:
    """Return the sort key of attempts in order of arrival."""
    return attempt.routed_at
