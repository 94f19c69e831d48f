"""A picker's books over pods that exist by name, a block a letter, and time that moves by hand."""

from dataclasses import replace
from itertools import count

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.index.byte_index import Index, Root
from kvist_epp.index.lookup import Lookup, Member
from kvist_epp.index.routing_history import History
from kvist_epp.load.ledger import Ledger
from kvist_epp.prefix_stats.hot_prefixes import Hot
from kvist_epp.prewarm.plan import HandOver, Step, Terms
from kvist_epp.scheduling.pick import Candidate

SIZE = 16
"""Tokens a block."""
PLAIN: Root = (None, None)


class Pool:
    """What ``HandOver`` looks at, and the engines that answer it."""

    def __init__(
        self, *names: str, tokens: int = 100 * SIZE, step: int = 2 * SIZE, start: float = 0.0
    ) -> None:
        self.index, self.ledger, self.hot = Index(), Ledger(default_rate=16_000.0), Hot()
        self.lookup = Lookup(self.index, History())
        self.candidates: tuple[Candidate, ...] = ()
        self.now = 100.0
        self.plan = HandOver(self, self.hot, Terms(tokens=tokens, step_tokens=step), start=start)
        self._numbers = count()
        for name in names:
            self.join(name)
        assert self.due() == []

    def join(self, name: str, *, ranks: int = 1, precise: bool = True) -> None:
        """A pod with an empty cache may be picked."""
        endpoint = Endpoint(name, "t", f"10.0.0.{next(self._numbers) + 1}", 80)
        numbers = tuple(self.index.publisher(f"{endpoint.key}/{rank}") for rank in range(ranks))
        self.lookup.join(endpoint.key, Member(numbers, precise=precise, block_size=SIZE))
        self.candidates += (Candidate(endpoint, self.ledger.load(endpoint.key)),)

    def objects_to(self, name: str, why: str = "terminating") -> None:
        """It may not be picked; empty: it may again."""
        self.candidates = tuple(
            Candidate(replace(c.endpoint, refusal=why), c.load, ready=not why, reason=why)
            if c.endpoint.name == name
            else c
            for c in self.candidates
        )

    def leave(self, name: str) -> None:
        """It is gone, and what was known of it."""
        self.plan.going([f"t/{name}"], self.now)
        self.candidates = tuple(c for c in self.candidates if c.endpoint.name != name)
        self.lookup.leave(f"t/{name}")
        self.ledger.forget(f"t/{name}")
        self.index.leave(self.index.publisher(f"t/{name}/0"))
        self.index.sweep(1_000)

    def hold(self, name: str, word: str, root: Root = PLAIN) -> None:
        """Its engine has computed it."""
        hashes = [hash((root, word[: end + 1])) % 2**64 for end in range(len(word))]
        who = self.index.publisher(f"t/{name}/0")
        self.index.stored(who, root, None, hashes, [c.encode() for c in word], block_size=SIZE)

    def holds(self, name: str, word: str) -> int:
        """How many letters of it."""
        found = self.index.match(PLAIN, f"{word}?".encode())
        return found.of(self.index.publisher(f"t/{name}/0")).tokens // SIZE

    def heat(self, word: str, *tenants: str, root: Root = PLAIN) -> None:
        """Each of them asks for it."""
        for tenant in tenants or ("one", "two"):
            for place in self.lookup.look(root, [f"{word}?".encode()]).ends():
                self.hot.note(place, tenant, self.now)

    def due(self) -> list[tuple[str, str]]:
        """Pods and prompts of what is to be asked for; the steps are in ``steps``."""
        self.steps = self.plan.due(self.now)
        return [(step.endpoint.name, step.text.decode()) for step in self.steps]

    def answer(self, step: Step, *, good: bool = True) -> None:
        """The engine does; what it has computed is in the index."""
        if good:
            self.hold(step.endpoint.name, step.text.decode())
        self.plan.ended(step, self.now, good=good)

    def play(self) -> list[tuple[str, str]]:
        """All of it, everything answered."""
        asked = []
        while due := self.due():
            asked += due
            for step in self.steps:
                self.answer(step)
        return asked
