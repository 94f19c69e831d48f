"""Warm hand-over in virtual time: our policy with it, and a world in which a router may ask by itself.

When a pod joins, the hottest beginnings of prompts are computed there, one after another and each in short
steps, within a budget of tokens; when a pod is about to go, the hot ones that end in blocks only it holds go
to the others, each to the pod that the policy picks for it. What is asked so is in the ledger like any
request, so that traffic shifts as the work is done. ``kvist_epp.cache.hot`` says what is hot and what must
not be told; here every session is a tenant.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from kvist_epp.cache.hot import Hot, Place
from kvist_epp.cache.index import Index
from kvist_epp.fleet.endpoints import Endpoint
from kvist_epp.schedule.pick import Demand, choose
from kvist_sim.virtual.jobs import Call
from kvist_sim.virtual.ours import KVIST, ROOT, IndexFeed, Kvist
from kvist_sim.virtual.passage import BLOCK, BLOCK_BYTES, Passage
from kvist_sim.virtual.policy import Context, Pod, Request, Spec
from kvist_sim.virtual.world import World

BUDGET_TOKENS: Final = 65_536
"""For one pod: four seconds of prefill, a quarter of the cache of the usual engine."""
STEP_TOKENS: Final = 1_024
"""Of a beginning that are asked for at once: 64 ms of prefill, so that nobody waits longer behind them."""
SESSION: Final = "hand-over"


@dataclass(slots=True, eq=False)
class _Gift:
    """Beginnings on their way, the next step of one when the last has arrived."""

    pod: Pod | None
    """To which all go; None: each goes where the policy sends it."""
    left: deque[Passage]
    steps: deque[Passage] = field(default_factory=deque)
    """Of the beginning whose turn it is."""
    target: Pod | None = None
    """Where that one goes."""
    done: int = 0
    """Tokens of it that were asked for: the engine's events come a little later."""


class WarmKvist(Kvist):
    """``Kvist`` with hand-over."""

    def __init__(self, context: Context, budget: int = BUDGET_TOKENS) -> None:
        super().__init__(context)
        self.world: WarmWorld | None = None
        """Set when the world is made."""
        self.given = 0
        """Tokens of prompts that were asked for."""
        self._budget = budget
        self._hot = Hot()
        self._gifts: dict[Request, _Gift] = {}

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        """Heat is noted where the longest match ends, whoever holds it."""
        position = super().choose(request, pods, now)
        assert self._chosen is not None, "just chosen"
        for matches in self._chosen[1].matches:
            if matches.groups:
                _, tokens, _, _, segment = matches.groups[0]
                place = segment, tokens // segment.tree.block_size - segment.base
                self._hot.note(place, request.session, now)
        return position

    def joined(self, pod: Pod, now: float) -> None:
        """It gets what is hot."""
        super().joined(pod, now)
        hot = self._hot.places(self._budget, now)
        self._give(_Gift(pod, deque(passage(place) for place, _ in hot)), now)

    def left(self, pod: Pod, now: float) -> None:
        """Others get what is hot and only it holds."""
        masks = dict(self._index().exclusive([self._feed.numbers[pod]]))
        only = [passage(place) for place, _ in self._hot.places(self._budget, now, masks)]
        super().left(pod, now)
        self._give(_Gift(None, deque(only)), now)

    def finished(self, request: Request, pod: Pod, now: float) -> None:
        """One beginning has arrived."""
        gift = self._gifts.pop(request, None)
        if gift is None:
            super().finished(request, pod, now)
        else:
            self.ledger.settled(f"{SESSION} {id(request)}", now)
            self._give(gift, now)

    def _give(self, gift: _Gift, now: float) -> None:
        while (following := self._next(gift, now)) is not None and self.world is not None:
            target, step = following
            uncached = step.tokens - max(gift.done, self._held(step, target))
            if uncached < BLOCK or (call := self.world.ask(target, step, self)) is None:
                continue
            self._gifts[call], gift.done = gift, step.tokens
            self.given += uncached
            key = self._candidates[target].endpoint.key
            self.ledger.routed(f"{SESSION} {id(call)}", key, uncached, step.tokens, now)
            return

    def _next(self, gift: _Gift, now: float) -> tuple[Pod, Passage] | None:
        """The next step of a beginning and its pod, or the first one of the next beginning."""
        target = gift.target
        while target not in self._candidates or not gift.steps:
            if not gift.left:
                return None
            one = gift.left.popleft()
            target = gift.target = gift.pod or self._picked(one, now)
            gift.steps, gift.done = deque(steps(one)), 0
        assert target is not None, "None is no candidate"
        return target, gift.steps.popleft()

    def _held(self, one: Passage, pod: Pod) -> int:
        return self._index().match(ROOT, one.text).of(self._feed.numbers[pod]).tokens

    def _picked(self, one: Passage, now: float) -> Pod | None:
        if not self._candidates:
            return None
        found = self.lookup.look(ROOT, [one.text], learn=False)
        candidates = list(self._candidates.values())
        [best] = choose(candidates, Demand(found.tokens, found.hits), now=now, limit=1)
        return self._pod(best.endpoint)

    def _pod(self, endpoint: Endpoint) -> Pod:
        return next(pod for pod, one in self._candidates.items() if one.endpoint is endpoint)

    def _index(self) -> Index:
        return self._feed.index


class WarmWorld(World):
    """Its routers may ask engines for beginnings; nobody waits for the answer."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """As ``World``."""
        super().__init__(*given, **named)
        for router in self._routers:
            if isinstance(router, WarmKvist):
                router.world = self

    def ask(self, pod: Pod, prompt: Passage, router: WarmKvist) -> Call | None:
        """The pod computes it; ``router`` hears of the end. None: the pod takes no requests."""
        site = self.sites.get(pod)
        if site is None or not site.open:
            return None
        call = Call(-1, SESSION, prompt, prompt.on(1, Random(0)), 1, self.agenda.now, measured=False)
        self._open_calls += 1
        self._replica[call] = router
        self._submit(site, call)
        return call


def steps(one: Passage) -> list[Passage]:
    """Beginnings of it, each ``STEP_TOKENS`` longer than the one before; the last is all of it."""
    size = STEP_TOKENS // BLOCK
    cuts = [*range(size, len(one.blocks), size), len(one.blocks)]
    return [Passage(cut * BLOCK, one.blocks[:cut], one.text[: cut * BLOCK_BYTES]) for cut in cuts]


def passage(place: Place) -> Passage:
    """A place as what can be asked for: names and text of all blocks before it."""
    segment, blocks = place
    names, text = list(segment.hashes[:blocks]), segment.text[: segment.offset(blocks)]
    while segment.parent is not None:
        blocks, segment = segment.at + 1, segment.parent
        names = [*segment.hashes[:blocks], *names]
        text = segment.text[: segment.offset(blocks)] + text
    return Passage(len(names) * place[0].tree.block_size, names, text)


WARM: Final = Spec(
    "kvist-warm",
    "kvist with warm hand-over",
    WarmKvist,
    events=True,
    feed=IndexFeed,
    scrape_seconds=KVIST.scrape_seconds,
)
