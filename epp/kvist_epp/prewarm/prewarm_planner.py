"""Which prefix is requested from which endpoint, and when: the deciding part of prewarming. Pure.

An endpoint that joins gets the hottest prefixes. When endpoints cannot be picked any longer, the hot prefixes
that end in blocks which only they hold go to the other endpoints, each where the policy would send it.
Prefixes are requested in short steps, each of which continues the last: one at a time per endpoint, and only
while the endpoint has hardly any backlog. A step is in flight like a request, so that the cost includes it.

Where some endpoints compute prompts for others, these are the ones that are prewarmed, and those that only
answer are not: what they lack of a prompt comes with its transfer.

For a while after an endpoint left, hot prefixes that only one endpoint holds are requested again and again
(``refresh_schedule``), so that engines evict something else.

``prefix_stats.hot_prefixes`` decides what is hot, and what is never requested.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol

from kvist_epp.index.byte_index import Index
from kvist_epp.index.lookup import Lookup
from kvist_epp.load.in_flight import InFlightRequest, Leg
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.prefix_stats.hot_prefixes import HotPrefix, HotPrefixes, Masks
from kvist_epp.prewarm.prewarm_step import PrewarmStep
from kvist_epp.prewarm.refresh_schedule import RefreshSchedule
from kvist_epp.scheduling.pick import Candidate, Demand, choose, ready_helpers, unrefused
from kvist_epp.telemetry.counters import PrewarmStats
from kvist_kube.backoff import backoff_seconds

BUSY_POLL_SECONDS: Final = 0.02
"""Interval of ``poll`` while prefixes are pending: endpoints have capacity for a step for moments only."""
IDLE_POLL_SECONDS: Final = 0.25
"""Interval of ``poll`` otherwise: the delay until a new endpoint is noticed."""
EXPIRY_SECONDS: Final = 120.0
"""Time after which pending prefixes are dropped: requests have brought them, or they are not hot any longer.
Also the time for which hot prefixes are refreshed after an endpoint left, until another one holds as much."""
MAX_FAILURES: Final = 3
"""Consecutive failures after which an endpoint is not prewarmed until it joins again."""
BACKOFF_SECONDS: Final = 1.0
"""Delay after a failure; doubled by each further one in a row."""
MAX_STEPS: Final = 64
"""Maximum number of steps of one prefix: each is sent and tokenised from the first byte, so that many short
ones would cost the engine's front end more than they save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmLimits:
    """Limits on the amount of prewarming, and the size of its portions."""

    tokens: int
    """Maximum number of tokens for an endpoint that joins, and of the prefixes that leaving ones held; 0:
    none."""
    step_tokens: int = 256
    """Tokens of a prefix requested at once. A pass over the weights takes as long as computing about this
    many (``kvist_sim.engine.timing``: 286), so that requests hardly notice them. Of the TTFT p90 that a
    rollout added, 47 % was gone with 256 and 36 % with 512 (``groups``, seeds 2 to 4, before anything was
    refreshed)."""
    backlog_seconds: float = 0.02
    """Backlog above which an endpoint gets no step: about one pass over the weights."""


class PrewarmPool(Protocol):
    """The part of a picker that the planner reads: the director's, or the simulator's."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """All endpoints of the pool."""

    @property
    def index(self) -> Index:
        """The prefix index."""

    @property
    def lookup(self) -> Lookup:
        """The look-up by endpoint in the same index."""

    @property
    def tracker(self) -> LoadTracker:
        """The backlog of each endpoint."""


@dataclass(slots=True, eq=False)
class _Target:
    """An endpoint on which prompts are computed, and what it is to get."""

    candidate: Candidate
    pending: deque[HotPrefix] = field(default_factory=deque)
    """Prefixes that it gets because it joined."""
    expires_at: float = 0.0
    """Time at which the pending prefixes are dropped."""
    current: HotPrefix | None = None
    """Prefix whose steps are requested now."""
    requested: int = 0
    """Tokens of the current prefix requested so far; the engine's events come a little later."""
    step: PrewarmStep | None = None
    """The step in flight."""
    failures: int = 0
    """Consecutive failures."""
    retry_at: float = 0.0


class PrewarmPlanner:
    """Plans steps from what it sees of the pool. ``poll`` must be called often, ``on_ended`` for each
    step."""

    def __init__(
        self,
        pool: PrewarmPool,
        hot: HotPrefixes,
        limits: PrewarmLimits,
        *,
        stats: PrewarmStats | None = None,
        name: str = "prewarm",
        start: float = 0.0,
        splits: bool = False,
        cache_tokens: Callable[[str], int | None] = lambda _key: None,
        on_selected: Callable[[str, int], None] = lambda _reason, _tokens: None,
    ) -> None:
        """``name`` is the prefix of session ids. ``start`` is the position, from 0 (the hottest) to 1, where
        each list of prefixes begins: with different positions replicas do not compute the same at the same
        time. ``splits``: endpoints may compute prompts for others, by their roles. ``cache_tokens`` returns
        the size of an endpoint's cache, if known; an endpoint gets no more than half of it. ``on_selected``
        is called with a description and the tokens of each selection of prefixes."""
        self.stats = stats or PrewarmStats()
        self.recovering = False
        """Whether endpoints left a short while ago."""
        self._pool, self._hot, self._limits, self._name = pool, hot, limits, name
        self._start, self._cache_tokens, self._on_selected = start, cache_tokens, on_selected
        self._splits = splits
        self._numbers = count(1)
        self._targets: dict[str, _Target] = {}
        """Endpoints on which prompts are computed, by key."""
        self._leaving: set[str] = set()
        """Endpoints on which no prompt is computed any longer but that still exist."""
        self._answering: set[str] = set()
        """Ready endpoints for which others compute the prompts."""
        self._lost: deque[HotPrefix] = deque()
        """Prefixes that leaving endpoints held, hottest first."""
        self._expires_at = 0.0
        """Time at which lost prefixes are dropped and the pool counts as recovered."""
        self._schedule = RefreshSchedule(hot)
        self._refreshes: dict[str, deque[HotPrefix]] = {}
        """Prefixes to refresh, by the endpoint that holds them."""

    @property
    def pause(self) -> float:
        """Seconds until the next call of ``poll``."""
        return IDLE_POLL_SECONDS if self.idle and not self.recovering else BUSY_POLL_SECONDS

    @property
    def idle(self) -> bool:
        """Whether no prefix is pending."""
        return not self._lost and not any(t.pending or t.current for t in self._targets.values())

    def on_leaving(self, keys: Iterable[str], now: float) -> None:
        """Handle endpoints that are about to be removed, while the index still knows what they hold."""
        self._remove_targets([key for key in keys if key in self._targets], now)

    def poll(self, now: float) -> list[PrewarmStep]:
        """Return the steps to request now."""
        if not self._limits.tokens:
            return []
        self._update_targets(now)
        self._drop_expired(now)
        steps = []
        for target in self._able(now):
            if target.current is None and target.pending:
                target.current, target.requested = target.pending.popleft(), 0
            if (step := self._next_step(target, now)) is not None:
                steps.append(step)
        return steps + self._place_lost(now) + self._refresh(now)

    def is_wanted(self, step: PrewarmStep) -> bool:
        """Return False for a step whose endpoint cannot be picked any longer: its answer is not needed."""
        target = self._targets.get(step.endpoint.key)
        return target is not None and target.step is step

    def on_ended(self, step: PrewarmStep, now: float, *, good: bool = True, seconds: float = 0.0) -> None:
        """Handle the end of a step: its answer, or (not ``good``) its failure, after ``seconds``."""
        self.stats.seconds += seconds
        self._pool.tracker.end(step.request, now)
        if good:
            self.stats.steps += 1
            self.stats.tokens += step.uncached
        else:
            self.stats.failed += 1
        target = self._targets.get(step.endpoint.key)
        if target is None or target.step is not step:
            return
        target.step = None
        if good:
            target.failures = 0
            return
        target.requested = 0
        target.failures += 1
        target.retry_at = now + backoff_seconds(target.failures, first=BACKOFF_SECONDS)
        if target.failures >= MAX_FAILURES:
            self._give_up(target)

    def drop(self, step: PrewarmStep) -> None:
        """Drop the prefix of a step, since no engine would accept it."""
        target = self._targets.get(step.endpoint.key)
        if target is not None and target.current is step.prefix:
            target.current = None
            self.stats.dropped += 1

    def _update_targets(self, now: float) -> None:
        """Compare the targets with the endpoints that compute prompts now.

        One that only answers, since another one computes prompts for it, has not left; nor has it joined when
        that ends.
        """
        able, answered = self._computing(), self._answering
        ready = {c.endpoint.key for c in self._pool.candidates if c.ready}
        self._answering = ready - able.keys() if self._splits else set()
        for key in self._answering & self._targets.keys():
            del self._targets[key]
        self._leaving &= {c.endpoint.key for c in self._pool.candidates}
        self._remove_targets([key for key in self._targets if key not in able], now)
        self._leaving -= able.keys()
        for key, candidate in able.items():
            if key in self._targets:
                self._targets[key].candidate = candidate
            elif self._is_precise(key):
                target = self._targets[key] = _Target(candidate, expires_at=now + EXPIRY_SECONDS)
                if key not in answered:
                    most = self._limits.tokens
                    budget = min(most, (self._cache_tokens(key) or 2 * most) // 2)
                    target.pending = self._select(budget, now)
                if target.pending:
                    self._announce(f"of {key}", target.pending)

    def _computing(self) -> dict[str, Candidate]:
        """Return the endpoints on which prompts are computed, by key: by their roles, where some compute them
        for others."""
        candidates = self._pool.candidates
        by_role = self._splits and any(self._is_precise(c.endpoint.key) for c in ready_helpers(candidates))
        able = [c for c in candidates if (c.ready and c.endpoint.can_prefill if by_role else not c.refusal)]
        return {c.endpoint.key: c for c in able}

    def _remove_targets(self, keys: Sequence[str], now: float) -> None:
        """Remove endpoints; prefixes that no other endpoint holds on which prompts are computed are lost."""
        if not keys:
            return
        for key in keys:
            del self._targets[key]
            self._leaving.add(key)
        others = self._leaving | self._answering  # what was transferred there helps no other endpoint
        numbers = [number for key in others if (number := self._publisher(key)) is not None]
        exclusive = {s: mask for s, mask in self._pool.index.exclusive(numbers) if mask}
        found = self._select(self._limits.tokens, now, exclusive)
        texts = {one.text for one in found}
        self._lost = found + deque(one for one in self._lost if one.text not in texts)
        self._expires_at = now + EXPIRY_SECONDS
        if found and self._targets:
            self._announce(f"after the loss of {', '.join(sorted(keys))}", found)

    def _select(self, budget: int, now: float, masks: Masks | None = None) -> deque[HotPrefix]:
        """Return hot prefixes of the base model; an adapter may be loaded on some endpoints only."""
        hottest = self._hot.hottest(budget, now, masks)
        found = deque(one for one in hottest if one.root == (None, None))
        found.rotate(-int(self._start * len(found)))
        return found

    def _announce(self, reason: str, found: Sequence[HotPrefix]) -> None:
        self.stats.begun += len(found)
        self._on_selected(reason, sum(one.tokens for one in found))

    def _publisher(self, key: str) -> int | None:
        """Return an endpoint's number in the index; None if it publishes no events or is several engines."""
        member = self._pool.lookup.members.get(key)
        return member.publishers[0] if member is not None and len(member.publishers) == 1 else None

    def _is_precise(self, key: str) -> bool:
        member = self._pool.lookup.members.get(key)
        return member is not None and member.precise and len(member.publishers) == 1

    def _able(self, now: float) -> Iterator[_Target]:
        """Yield the endpoints that can take a step now: none in flight, and hardly any backlog."""
        for target in self._targets.values():
            may = target.step is None and now >= target.retry_at and target.failures < MAX_FAILURES
            if may and self._is_precise(target.candidate.endpoint.key):
                load = target.candidate.load
                # a full KV cache would evict the prefix at once
                if load.kv_full_at is None and load.drain(now) <= self._limits.backlog_seconds * load.rate:
                    yield target

    def _place_lost(self, now: float) -> list[PrewarmStep]:
        """Return steps of lost prefixes, for endpoints that have none of their own, as the policy picks
        them."""
        if not self._lost:
            return []
        steps = []
        able = [t for t in self._able(now) if t.current is None and not t.pending]
        while self._lost and able:
            prefix = self._lost.popleft()
            found = self._pool.lookup.look(prefix.root, [prefix.text], learn=False)
            demand, turn = Demand(found.tokens, found.hits), next(self._numbers)
            [best] = choose([unrefused(t.candidate) for t in able], demand, now=now, turn=turn, limit=1)
            target = self._targets[best.endpoint.key]
            target.current, target.requested = prefix, 0
            if (step := self._next_step(target, now)) is not None:
                steps.append(step)
                able.remove(target)
        return steps

    def _refresh(self, now: float) -> list[PrewarmStep]:
        """Return steps of hot prefixes that one idle endpoint alone holds, so that its engine keeps them."""
        self.recovering = now < self._expires_at
        if not self.recovering:
            self._schedule.reset()
            self._refreshes.clear()
            return []
        for prefix in self._schedule.poll(self._limits.tokens * len(self._targets), now):
            if prefix.root == (None, None) and (key := self._only_holder(prefix)) is not None:
                self._refreshes.setdefault(key, deque()).append(prefix)
        steps = []
        able = [
            t for t in self._able(now) if t.current is None and self._refreshes.get(t.candidate.endpoint.key)
        ]
        for target in able:
            prefix = self._refreshes[target.candidate.endpoint.key].popleft()
            blocks = len(prefix.sizes)
            steps.append(
                self._make_step(target, prefix, blocks, prefix.tokens - prefix.tokens // blocks, now)
            )
        self.stats.kept += len(steps)
        return steps

    def _only_holder(self, prefix: HotPrefix) -> str | None:
        """Return the one endpoint that holds the whole prefix; None if there is none, or several."""
        matches = self._pool.index.match(prefix.root, prefix.text + b"?")
        there = {n for n in matches.publishers() if matches.of(n).tokens >= prefix.tokens}
        keys = [key for key in self._targets if self._publisher(key) in there]
        return keys[0] if len(keys) == 1 else None

    def _next_step(self, target: _Target, now: float) -> PrewarmStep | None:
        """Return the next step of a target, without what it holds by now; None if nothing is left."""
        while (prefix := target.current) is not None:
            size = prefix.tokens // len(prefix.sizes)
            number = self._publisher(target.candidate.endpoint.key)
            there = 0
            if number is not None:
                there = self._pool.index.match(prefix.root, prefix.text).of(number).tokens
            held = max(target.requested, there)
            if prefix.tokens - held > size:
                tokens = max(self._limits.step_tokens, size, prefix.tokens // MAX_STEPS)
                blocks = min(len(prefix.sizes), (held + tokens) // size)
                target.requested = blocks * size
                return self._make_step(target, prefix, blocks, held, now)
            target.current = None
            if target.pending:
                target.current, target.requested = target.pending.popleft(), 0
        return None

    def _make_step(
        self, target: _Target, prefix: HotPrefix, blocks: int, held: int, now: float
    ) -> PrewarmStep:
        """Create a step, in flight from now on."""
        endpoint, session = target.candidate.endpoint, f"{self._name}.{next(self._numbers)}"
        tokens = blocks * (prefix.tokens // len(prefix.sizes))
        request = InFlightRequest(session, tokens, session, indexed_tokens=held, truth_known=True)
        step = target.step = PrewarmStep(request, session, endpoint, prefix, blocks, tokens, held)
        self._pool.tracker.add(
            request, endpoint.key, step.uncached, now, hostport=endpoint.hostport, leg=Leg.PREWARM
        )
        return step

    def _drop_expired(self, now: float) -> None:
        if self._lost and now >= self._expires_at:
            self.stats.dropped += len(self._lost)
            self._lost.clear()
        for target in self._targets.values():
            if (target.pending or target.current) and now >= max(target.expires_at, self._expires_at):
                self._give_up(target)

    def _give_up(self, target: _Target) -> None:
        self.stats.dropped += len(target.pending) + (target.current is not None)
        target.pending.clear()
        target.current = None
