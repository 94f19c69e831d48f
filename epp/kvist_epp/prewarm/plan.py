"""What is handed over to whom, and when: the deciding half of warm hand-over. Pure.

A pod that joins gets the hottest beginnings of prompts; when pods cannot be picked any more, the hot ones
that end in blocks only they hold go to the others, each where the policy would send it. All of it in short
steps, each of which goes on from the last: one at a time on a pod, and only while the pod owes hardly any
work to requests. A step is in the ledger like a request, so that the cost sees it.

For a while after a pod went, hot beginnings that one pod alone holds are asked for again and again
(``rounds``), so that engines evict something else.

What is hot, and what is never told, is decided by ``cache.hot``.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol

import msgspec

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.index.byte_index import Index
from kvist_epp.index.lookup import Found, Lookup
from kvist_epp.load.ledger import Ledger
from kvist_epp.prefix_stats.hot_prefixes import Beginning, Hot, Masks
from kvist_epp.prewarm.prewarm_stats import PrewarmStats
from kvist_epp.prewarm.rounds import Rounds
from kvist_epp.scheduling.pick import Candidate, Demand, choose

LOOK_SECONDS: Final = 0.02
"""Between two looks while something is left to be given: pods are able to take a step for moments only."""
REST_SECONDS: Final = 0.25
"""The same while nothing is: how late a pod that joined is seen."""
PATIENCE_SECONDS: Final = 120.0
"""What could not be given by then is dropped: requests have asked for it themselves, or it is not hot any
more. And so long after a pod went what is hot is kept: it takes time until another one holds as much."""
FAILURES: Final = 3
"""In a row, after which a pod is given nothing more until it joins again."""
BACKOFF_SECONDS: Final = 1.0
"""After a failure; twice as long after each further one in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How much, and how gently."""

    tokens: int
    """At most for a pod that joins, and of what pods that go leave behind; 0: nothing."""
    step_tokens: int = 256
    """Of a beginning that are asked for at once. A pass over the weights takes as long as computing about so
    many (``kvist_sim.engine.timing``: 286), so that requests hardly feel them. Of the TTFT p90 that a rollout
    added, 47 % was gone with 256 and 36 % with 512 (``groups``, seeds 2 to 4, before anything was kept)."""
    owed_seconds: float = 0.02
    """A pod that owes requests more prefill than this gets no step: about one pass over the weights."""


MOST_STEPS: Final = 64
"""Of one beginning: each is sent and tokenised from its first byte on, so many short ones would cost the
engine's front end more than they spare."""


class Pool(Protocol):
    """What of a picker is needed; the picker itself, or its twin in virtual time."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The fleet."""

    @property
    def index(self) -> Index:
        """Who holds what."""

    @property
    def lookup(self) -> Lookup:
        """The same by endpoint."""

    @property
    def ledger(self) -> Ledger:
        """What each pod owes."""


class Step(msgspec.Struct, frozen=True, eq=False):
    """What one engine is asked for."""

    session: str
    """In the ledger, and in the engine's events."""
    endpoint: Endpoint
    beginning: Beginning
    blocks: int
    """Of the beginning, from its first on."""
    tokens: int
    """In these blocks."""
    held: int
    """Tokens of them that the endpoint has."""

    @property
    def uncached(self) -> int:
        """Tokens to compute."""
        return self.tokens - self.held

    @property
    def text(self) -> bytes:
        """The prompt."""
        return self.beginning.text[: sum(self.beginning.sizes[: self.blocks])]


@dataclass(slots=True, eq=False)
class _Pod:
    """A pod that may be picked."""

    candidate: Candidate
    left: deque[Beginning] = field(default_factory=deque)
    """What it is to get because it joined."""
    until: float = 0.0
    """When the rest of that is dropped."""
    current: Beginning | None = None
    """Whose steps it is asked for."""
    done: int = 0
    """Tokens of the current one that were asked for: the engine's events come a little later."""
    under_way: Step | None = None
    failures: int = 0
    """In a row."""
    not_before: float = 0.0

    @property
    def endpoint(self) -> Endpoint:
        return self.candidate.endpoint


class HandOver:
    """Told of time and of answers; everything else it sees for itself. ``due`` has to be asked often."""

    def __init__(
        self, pool: Pool, hot: Hot, terms: Terms, *, name: str = "hand-over", start: float = 0.0
    ) -> None:
        """``name``: how sessions of steps begin. ``start``: where in its lists it begins, 0 the hottest, up
        to 1: replicas that begin at different places do not compute the same at the same time."""
        self.given = PrewarmStats()
        self.cache: Callable[[str], int | None] = lambda _key: None
        """Tokens that the cache of an endpoint holds, if known: a pod is given no more than half of it."""
        self.opened: Callable[[str, int], None] = lambda _why, _tokens: None
        """Told of each gift: for whom, and how many tokens."""
        self._pool, self._hot, self._terms, self._name = pool, hot, terms, name
        self._start = start
        self._numbers = count(1)
        self._pods: dict[str, _Pod] = {}
        """Those that may be picked, by key."""
        self._gone: set[str] = set()
        """Those that may not, but are still there."""
        self._orphans: deque[Beginning] = deque()
        """What pods that went leave behind, hottest first."""
        self._until = 0.0
        """When the rest of it is dropped, and the pool has got over it."""
        self.short = False
        """Pods went a short while ago."""
        self._rounds = Rounds(hot)
        self._turns: dict[str, deque[Beginning]] = {}
        """Whose turn it is in the round, by the pod that holds it."""

    @property
    def pause(self) -> float:
        """Seconds to the next look."""
        return REST_SECONDS if self.idle and not self.short else LOOK_SECONDS

    @property
    def idle(self) -> bool:
        """Nothing is left to be given."""
        return not self._orphans and not any(pod.left or pod.current for pod in self._pods.values())

    def going(self, keys: Iterable[str], now: float) -> None:
        """These are about to leave, and what they hold with them."""
        self._lost([key for key in keys if key in self._pods], now)

    def due(self, now: float) -> list[Step]:
        """What is to be asked for now; ``ended`` has to follow for each."""
        if not self._terms.tokens:
            return []
        self._follow(now)
        self._forget_old(now)
        steps = []
        for pod in self._able(now):
            if pod.current is None and pod.left:
                self._begin(pod, pod.left.popleft())
            if (step := self._step(pod, now)) is not None:
                steps.append(step)
        return steps + self._for_orphans(now) + self._again(now)

    def wants(self, step: Step) -> bool:
        """Whether its answer is still waited for: not when its pod cannot be picked any more."""
        pod = self._pods.get(step.endpoint.key)
        return pod is not None and pod.under_way is step

    def ended(self, step: Step, now: float, *, good: bool = True, seconds: float = 0.0) -> None:
        """The engine has answered, or failed to, after so many seconds."""
        self.given.seconds += seconds
        self._pool.ledger.settled(step.session, now, step.endpoint.key)
        pod = self._pods.get(step.endpoint.key)
        if good:
            self.given.steps += 1
            self.given.tokens += step.uncached
        else:
            self.given.failed += 1
        if pod is not None and pod.under_way is step:
            pod.under_way = None
            self._judge(pod, now, good=good)

    def drop(self, step: Step) -> None:
        """Nothing more of its beginning: no engine would take it."""
        pod = self._pods.get(step.endpoint.key)
        if pod is not None and pod.current is step.beginning:
            pod.current = None
            self.given.dropped += 1

    # Who is there

    def _follow(self, now: float) -> None:
        """Who has joined, and who cannot be picked any more."""
        there = {c.endpoint.key: c for c in self._pool.candidates}
        self._gone &= there.keys()
        self._lost([key for key in self._pods if key not in there or there[key].refusal], now)
        self._gone -= {key for key, candidate in there.items() if not candidate.refusal}
        for key, candidate in there.items():
            if candidate.refusal:
                continue
            if key in self._pods:
                self._pods[key].candidate = candidate
            elif self._believed(key):
                self._joined(key, candidate, now)

    def _joined(self, key: str, candidate: Candidate, now: float) -> None:
        budget = min(self._terms.tokens, (self.cache(key) or 2 * self._terms.tokens) // 2)
        pod = self._pods[key] = _Pod(candidate, self._found(budget, now))
        pod.until = now + PATIENCE_SECONDS
        if pod.left:
            self._open(f"to {key}", pod.left)

    def _lost(self, keys: Sequence[str], now: float) -> None:
        """These cannot be picked any more: what only they, and others like them, hold goes to the rest."""
        if not keys:
            return
        for key in keys:
            del self._pods[key]
            self._gone.add(key)
        numbers = [number for key in self._gone if (number := self._publisher(key)) is not None]
        found = self._found(
            self._terms.tokens, now, {s: mask for s, mask in self._pool.index.exclusive(numbers) if mask}
        )
        texts = {one.text for one in found}
        self._orphans = found + deque(one for one in self._orphans if one.text not in texts)
        self._until = now + PATIENCE_SECONDS
        if found and self._pods:
            self._open(f"from {', '.join(sorted(keys))}", found)

    def _found(self, budget: int, now: float, masks: Masks | None = None) -> deque[Beginning]:
        """What is hot, of the base model alone: an adapter may be loaded on some pods only."""
        told = self._hot.beginnings(budget, now, masks)
        found = deque(one for one in told if one.root == (None, None))
        found.rotate(-int(self._start * len(found)))
        return found

    def _open(self, who: str, found: Sequence[Beginning]) -> None:
        self.given.begun += len(found)
        self.opened(who, sum(one.tokens for one in found))

    def _publisher(self, key: str) -> int | None:
        """Its number in the index; None: it tells nothing of its cache, or is several engines."""
        member = self._pool.lookup.members.get(key)
        return member.publishers[0] if member is not None and len(member.publishers) == 1 else None

    def _believed(self, key: str) -> bool:
        """Whether what it holds is known."""
        member = self._pool.lookup.members.get(key)
        return member is not None and member.precise and len(member.publishers) == 1

    # What is next

    def _able(self, now: float) -> Iterator[_Pod]:
        """Pods that can take a step now: nothing is under way, and requests hardly wait."""
        for pod in self._pods.values():
            may = pod.under_way is None and now >= pod.not_before and pod.failures < FAILURES
            if may and self._believed(pod.endpoint.key) and self._rests(pod, now):
                yield pod

    def _rests(self, pod: _Pod, now: float) -> bool:
        load = pod.candidate.load
        # a full KV cache would evict at once what it is given
        return load.crowd is None and load.drain(now) <= self._terms.owed_seconds * load.rate

    def _for_orphans(self, now: float) -> list[Step]:
        """Steps of what nobody holds any more, as far as pods are able that have nothing else to do."""
        steps = []
        able = [pod for pod in self._able(now) if pod.current is None and not pod.left]
        while self._orphans and able:
            one = self._orphans.popleft()
            pod = self._pods[self._picked(one, able, now)]
            self._begin(pod, one)
            if (step := self._step(pod, now)) is not None:
                steps.append(step)
                able.remove(pod)
        return steps

    def _again(self, now: float) -> list[Step]:
        """What is to be kept: hot, on one pod alone, and that pod has nothing else to do."""
        self.short = now < self._until
        if not self.short:
            self._rounds.stop()
            self._turns.clear()
            return []
        for one in self._rounds.due(self._terms.tokens * len(self._pods), now):
            if one.root == (None, None) and (key := self._only(one)) is not None:
                self._turns.setdefault(key, deque()).append(one)
        able = [pod for pod in self._able(now) if pod.current is None and self._turns.get(pod.endpoint.key)]
        self.given.kept += len(able)
        return [self._kept(pod, self._turns[pod.endpoint.key].popleft(), now) for pod in able]

    def _kept(self, pod: _Pod, one: Beginning, now: float) -> Step:
        return self._ask(pod, one, len(one.sizes), one.tokens - one.tokens // len(one.sizes), now)

    def _only(self, one: Beginning) -> str | None:
        """The one pod that holds all of it."""
        matches = self._pool.index.match(one.root, one.text + b"?")
        there = {n for n in matches.publishers() if matches.of(n).tokens >= one.tokens}
        keys = [key for key in self._pods if self._publisher(key) in there]
        return keys[0] if len(keys) == 1 else None

    def _picked(self, one: Beginning, able: Sequence[_Pod], now: float) -> str:
        """Where the policy would send it, among those that are able."""
        found = self._look(one)
        demand = Demand(found.tokens, found.hits)
        turn = next(self._numbers)
        [best] = choose([pod.candidate for pod in able], demand, now=now, turn=turn, limit=1)
        return best.endpoint.key

    def _look(self, one: Beginning) -> Found:
        return self._pool.lookup.look(one.root, [one.text], learn=False)

    def _begin(self, pod: _Pod, one: Beginning) -> None:
        pod.current, pod.done = one, 0

    def _step(self, pod: _Pod, now: float) -> Step | None:
        """The next step of what this pod is asked for; what it holds by now is passed over."""
        while (one := pod.current) is not None:
            size = one.tokens // len(one.sizes)
            number = self._publisher(pod.endpoint.key)
            there = 0 if number is None else self._pool.index.match(one.root, one.text).of(number).tokens
            held = max(pod.done, there)
            if one.tokens - held > size:
                return self._further(pod, one, held, size, now)
            pod.current = None
            if pod.left:
                self._begin(pod, pod.left.popleft())
        return None

    def _further(self, pod: _Pod, one: Beginning, held: int, size: int, now: float) -> Step:
        tokens = max(self._terms.step_tokens, size, one.tokens // MOST_STEPS)
        blocks = min(len(one.sizes), (held + tokens) // size)
        pod.done = blocks * size
        return self._ask(pod, one, blocks, held, now)

    def _ask(self, pod: _Pod, one: Beginning, blocks: int, held: int, now: float) -> Step:
        session = f"{self._name}.{next(self._numbers)}"
        size = one.tokens // len(one.sizes)
        step = pod.under_way = Step(session, pod.endpoint, one, blocks, blocks * size, held)
        self._pool.ledger.routed(session, pod.endpoint.key, step.uncached, step.tokens, now)
        return step

    def _judge(self, pod: _Pod, now: float, *, good: bool) -> None:
        if good:
            pod.failures = 0
            return
        pod.done = 0
        pod.failures += 1
        pod.not_before = now + BACKOFF_SECONDS * 2 ** (pod.failures - 1)
        if pod.failures >= FAILURES:
            self._give_up(pod)

    def _forget_old(self, now: float) -> None:
        if self._orphans and now >= self._until:
            self.given.dropped += len(self._orphans)
            self._orphans.clear()
        for pod in self._pods.values():
            if (pod.left or pod.current) and now >= max(pod.until, self._until):
                self._give_up(pod)

    def _give_up(self, pod: _Pod) -> None:
        self.given.dropped += len(pod.left) + (pod.current is not None)
        pod.left.clear()
        pod.current = None
