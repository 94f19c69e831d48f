"""Warm hand-over in virtual time: our policy with it, and a world in which a router may ask by itself.

What is asked of whom, and when, is decided by the picker's own ``kvist_epp.prewarm.prewarm_planner``; here
are only its surroundings: time, answers, and block names instead of text. Every session is a tenant.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, Final

from kvist_epp.index.byte_index import Index
from kvist_epp.prefix_stats.hot_prefixes import Beginning, Hot, Place
from kvist_epp.prewarm.prewarm_planner import PrewarmLimits, PrewarmPlanner, PrewarmStep
from kvist_epp.scheduling.pick import Candidate
from kvist_sim.virtual.jobs import Call
from kvist_sim.virtual.ours import KVIST, IndexFeed, Kvist
from kvist_sim.virtual.passage import Passage
from kvist_sim.virtual.policy import Context, Pod, Request, Spec
from kvist_sim.virtual.world import World

TERMS: Final = PrewarmLimits(tokens=131_072)
SESSION: Final = "hand-over"


class NamedHot(Hot):
    """Remembers the names of the blocks of what it told: engines in virtual time know no text."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[bytes, list[int]] = {}
        """By text."""

    def beginning(self, place: Place, matches: int) -> Beginning:
        """As ``Hot``."""
        told = super().beginning(place, matches)
        segment, blocks = place
        names = list(segment.hashes[:blocks])
        while segment.parent is not None:
            blocks, segment = segment.at + 1, segment.parent
            names = [*segment.hashes[:blocks], *names]
        self.names[told.text] = names
        return told


class WarmKvist(Kvist):
    """``Kvist`` with hand-over; it is the ``Pool`` that ``PrewarmPlanner`` looks at."""

    def __init__(self, context: Context, terms: PrewarmLimits = TERMS) -> None:
        super().__init__(context)
        self.world: WarmWorld | None = None
        """Set when the world is made."""
        self._hot = NamedHot()
        self.planner = PrewarmPlanner(
            self, self._hot, terms, name=f"{SESSION} {id(self)}", cache_tokens=self._cache
        )
        self._steps: dict[Request, PrewarmStep] = {}
        self._looking = False

    @property
    def candidates(self) -> Sequence[Candidate]:
        """Of all pods that take requests."""
        return tuple(self._candidates.values())

    @property
    def index(self) -> Index:
        """All replicas have the same."""
        return self._feed.index

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int | None:
        """Heat is noted where the longest match ends, whoever holds it."""
        position = super().choose(request, pods, now)
        assert self._chosen is not None, "just chosen"
        for place in self._chosen[1].ends():
            self._hot.note(place, request.session, now)
        return position

    def joined(self, pod: Pod, now: float) -> None:
        """It gets what is hot."""
        super().joined(pod, now)
        self._look()

    def left(self, pod: Pod, now: float) -> None:
        """Others get what is hot and only it holds."""
        self.planner.on_leaving([self._candidates[pod].endpoint.key], now)
        super().left(pod, now)
        self._look()

    def progressed(self, call: Call, left: int, computed: int, now: float) -> None:
        """Events tell of steps, too."""
        step = self._steps.get(call)
        if step is None:
            super().progressed(call, left, computed, now)
        else:
            self.ledger.progress(step.session, left, now, computed=computed)

    def finished(self, request: Request, pod: Pod, now: float) -> None:
        """A step may have ended."""
        step = self._steps.pop(request, None)
        if step is None:
            super().finished(request, pod, now)
            return
        self.planner.on_ended(step, now)
        self._ask()

    def _cache(self, key: str) -> int:
        return next(p.blocks * p.block_size for p, c in self._candidates.items() if c.endpoint.key == key)

    def _look(self, _: Any = None) -> None:
        """Now, and again for as long as something is left."""
        self._looking = False
        self._ask()
        if not self._looking and (self.planner.recovering or not self.planner.idle):
            self._looking = True
            self._context.after(self.planner.pause, self._look, None)

    def _ask(self) -> None:
        if self.world is None:
            return
        for step in self.planner.poll(self._now()):
            pod = next(pod for pod, one in self._candidates.items() if one.endpoint is step.endpoint)
            names = self._hot.names[step.prefix.text][: step.blocks]
            self._steps[self.world.ask(pod, Passage(step.tokens, names, step.text), self)] = step


class WarmWorld(World):
    """Its routers may ask engines for beginnings; nobody waits for the answer."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """As ``World``."""
        super().__init__(*given, **named)
        for router in self._routers:
            if isinstance(router, WarmKvist):
                router.world = self

    @property
    def given(self) -> int:
        """Tokens that routers asked for by themselves."""
        return sum(one.planner.stats.tokens for one in self._routers if isinstance(one, WarmKvist))

    def ask(self, pod: Pod, prompt: Passage, router: WarmKvist) -> Call:
        """The pod computes it; ``router`` hears of the end."""
        call = Call(-1, SESSION, prompt, prompt.on(1, Random(0)), 1, self.agenda.now, measured=False)
        self._open_calls += 1
        self._replica[call] = router
        self._submit(self.sites[pod], call)
        return call


WARM: Final = Spec(
    "kvist-warm",
    "kvist with warm hand-over",
    WarmKvist,
    events=True,
    feed=IndexFeed,
    scrape_seconds=KVIST.scrape_seconds,
)
