"""A pool of endpoints that exist by name only, with a block per letter, and a clock that the test moves."""

from dataclasses import replace
from itertools import count

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.index.byte_index import Index, Root
from kvist_epp.index.cached_part import Member
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.names import LABEL_ROLES
from kvist_epp.prefix_stats.hot_prefixes import HotPrefixes
from kvist_epp.prewarm.prewarm_planner import PrewarmLimits, PrewarmPlanner
from kvist_epp.prewarm.prewarm_step import PrewarmStep
from kvist_epp.prewarm.prewarmer import PrewarmLog
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.telemetry.counters import PrewarmStats

SIZE = 16
"""Tokens a block."""
PLAIN: Root = (None, None)


class Pool:
    """The pool that the planner reads, and the engines that answer it."""

    def __init__(
        self,
        *names: str,
        tokens: int = 100 * SIZE,
        step: int = 2 * SIZE,
        start: float = 0.0,
        splits: bool = False,
    ) -> None:
        self.index, self.tracker, self.hot = Index(), LoadTracker(default_rate=16_000.0), HotPrefixes()
        self.lookup = Lookup(self.index, RoutingHistory())
        self.candidates: tuple[Candidate, ...] = ()
        self.now = 100.0
        self.cache_tokens: dict[str, int] = {}
        limits = PrewarmLimits(tokens=tokens, step_tokens=step)
        self.stats = PrewarmStats()
        self.log = PrewarmLog(self.stats, lambda: self.now)
        self.planner = PrewarmPlanner(
            self,
            self.hot,
            limits,
            stats=self.stats,
            start=start,
            splits=splits,
            cache_tokens=self.cache_tokens.get,
            on_selected=self.log.on_selected,
        )
        self._numbers = count()
        for name in names:
            self.join(name)
        assert self.poll() == []

    def join(self, name: str, *, ranks: int = 1, precise: bool = True, role: str = "both") -> None:
        """Add an endpoint with an empty cache that may be picked, unless its role forbids that."""
        labels = {LABEL_ROLES[0]: role}
        endpoint = Endpoint(name, "t", f"10.0.0.{next(self._numbers) + 1}", 80, labels)
        numbers = tuple(self.index.publisher(f"{endpoint.key}/{rank}") for rank in range(ranks))
        self.lookup.join(endpoint.key, Member(numbers, precise=precise, block_size=SIZE))
        self.candidates += (Candidate(endpoint, self.tracker.load(endpoint.key)),)

    def refuse(self, name: str, why: str = "terminating") -> None:
        """Make an endpoint one that may not be picked; an empty reason makes it eligible again."""
        self.candidates = tuple(
            Candidate(replace(c.endpoint, refusal=why), c.load, ready=not why, reason=why)
            if c.endpoint.name == name
            else c
            for c in self.candidates
        )

    def leave(self, name: str) -> None:
        """Remove an endpoint, and what the index knows of it."""
        self.planner.on_leaving([f"t/{name}"], self.now)
        self.candidates = tuple(c for c in self.candidates if c.endpoint.name != name)
        self.lookup.leave(f"t/{name}")
        self.tracker.remove_endpoint(f"t/{name}")
        self.index.leave(self.index.publisher(f"t/{name}/0"))
        self.index.sweep(1_000)

    def hold(self, name: str, word: str, root: Root = PLAIN) -> None:
        """Record that an endpoint's engine has computed a word."""
        hashes = [hash((root, word[: end + 1])) % 2**64 for end in range(len(word))]
        who = self.index.publisher(f"t/{name}/0")
        self.index.stored(who, root, None, hashes, [c.encode() for c in word], block_size=SIZE)

    def holds(self, name: str, word: str) -> int:
        """Return how many letters of a word the endpoint holds."""
        found = self.index.match(PLAIN, f"{word}?".encode())
        return found.of(self.index.publisher(f"t/{name}/0")).tokens // SIZE

    def heat(self, word: str, *tenants: str, root: Root = PLAIN) -> None:
        """Let each of the tenants request a word."""
        for tenant in tenants or ("one", "two"):
            for place in self.lookup.look(root, [f"{word}?".encode()]).ends():
                self.hot.record(place, tenant, self.now)

    def poll(self) -> list[tuple[str, str]]:
        """Return (endpoint, prompt) of the steps to request now; the steps themselves are in ``steps``."""
        self.steps = self.planner.poll(self.now)
        return [(step.endpoint.name, step.text.decode()) for step in self.steps]

    def answer(self, step: PrewarmStep, *, good: bool = True) -> None:
        """Answer a step; what the engine has computed is in the index."""
        if good:
            self.hold(step.endpoint.name, step.text.decode())
        self.planner.on_ended(step, self.now, good=good)

    def play(self) -> list[tuple[str, str]]:
        """Poll and answer until nothing is left; return all (endpoint, prompt)."""
        asked = []
        while steps := self.poll():
            asked += steps
            for step in self.steps:
                self.answer(step)
        return asked
