"""Prewarming in virtual time: our policy with it, and a world in which a router may ask by itself.

What is asked of whom, and when, is decided by the picker's own ``kvist_epp.prewarm.prewarm_planner``; here
are only its surroundings: time, answers, and block names instead of text. Every session is a tenant.
"""

from random import Random
from typing import Any, Final

from kvist_epp.prefix_stats.hot_prefixes import HotPrefix, HotPrefixes, Place
from kvist_epp.prewarm.prewarm_planner import PrewarmLimits, PrewarmPlanner
from kvist_epp.prewarm.prewarm_step import PrewarmStep
from kvist_sim.virtual.index_feed import IndexFeed
from kvist_sim.virtual.jobs import Call, Passage
from kvist_sim.virtual.ours import KVIST, Kvist
from kvist_sim.virtual.policy import Context, Pod, Request, Spec
from kvist_sim.virtual.world import World

TERMS: Final = PrewarmLimits(tokens=131_072)
SESSION: Final = "prewarm"


class NamedHotPrefixes(HotPrefixes):
    """Popularity that also keeps the block names of each prefix: engines in virtual time have no text."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[bytes, list[int]] = {}
        """Block names by text."""

    def prefix_at(self, place: Place, matches: int) -> HotPrefix | None:
        """Return a prefix, and keep the names of its blocks."""
        found = super().prefix_at(place, matches)
        if found is None:
            return None
        segment, blocks = place
        names = list(segment.hashes[:blocks])
        while segment.parent is not None:
            blocks, segment = segment.at + 1, segment.parent
            names = [*segment.hashes[:blocks], *names]
        self.names[found.text] = names
        return found


class PrewarmingKvist(Kvist):
    """``Kvist`` with prewarming."""

    def __init__(self, context: Context, terms: PrewarmLimits = TERMS) -> None:
        self.hot = self._named = NamedHotPrefixes()
        super().__init__(context)
        self.world: PrewarmingWorld | None = None
        """Set when the world is made."""
        self.planner = PrewarmPlanner(
            self.director,
            self._named,
            terms,
            name=f"{SESSION} {context.replica}",
            cache_tokens=self._cache,
        )
        self.registry.add_leaving_listener(lambda keys: self.planner.on_leaving(keys, self.now()))
        self._steps: dict[Request, PrewarmStep] = {}
        self._looking = False

    def tenant(self, request: Request) -> str:
        """Return the session: every one is a tenant."""
        return request.session

    def joined(self, pod: Pod, now: float) -> None:
        """See ``Policy``: it gets what is hot."""
        super().joined(pod, now)
        self._look()

    def left(self, pod: Pod, now: float) -> None:
        super().left(pod, now)
        self._look()

    def session(self, request: Request) -> str:
        """Return the session id of a request, or of a step."""
        step = self._steps.get(request)
        return super().session(request) if step is None else step.session

    def finished(self, request: Request, pod: Pod, now: float) -> None:
        """See ``Policy``: a step may have ended."""
        step = self._steps.pop(request, None)
        if step is None:
            super().finished(request, pod, now)
            return
        self.planner.on_ended(step, now)
        self._ask()

    def _cache(self, key: str) -> int:
        return next(p.blocks * p.block_size for p, one in self.endpoints.items() if one.key == key)

    def _look(self, _: Any = None) -> None:
        """Look now, and again for as long as something is left."""
        self._looking = False
        self._ask()
        if not self._looking and (self.planner.recovering or not self.planner.idle):
            self._looking = True
            self.context.after(self.planner.pause, self._look, None)

    def _ask(self) -> None:
        if self.world is None:
            return
        for step in self.planner.poll(self.now()):
            pod = next(pod for pod, one in self.endpoints.items() if one is step.endpoint)
            names = self._named.names[step.prefix.text][: step.blocks]
            self._steps[self.world.ask(pod, Passage(step.tokens, names, step.text), self)] = step


class PrewarmingWorld(World):
    """World whose routers may send prewarm requests of their own."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for router in self._routers:
            if isinstance(router, PrewarmingKvist):
                router.world = self

    @property
    def prewarmed_tokens(self) -> int:
        """Tokens that routers asked for by themselves."""
        return sum(one.planner.stats.tokens for one in self._routers if isinstance(one, PrewarmingKvist))

    def ask(self, pod: Pod, prompt: Passage, router: PrewarmingKvist) -> Call:
        """The pod computes it; ``router`` hears of the end."""
        call = Call(-1, SESSION, prompt, prompt.on(1, Random(0)), 1, self.agenda.now, measured=False)
        self._open_calls += 1
        self._replica[call] = router
        self._submit(self.sites[pod], call)
        return call


PREWARMING: Final = Spec(
    "kvist-prewarm",
    "kvist with prewarming",
    PrewarmingKvist,
    events=True,
    feed=IndexFeed,
    scrape_seconds=KVIST.scrape_seconds,
)
