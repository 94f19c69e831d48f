"""What caches are worth, against an oracle that remembers every pick and looks at every block."""

import random
from collections.abc import Mapping, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvist_epp.index.byte_index import Index
from kvist_epp.index.lookup import Lookup, Member
from kvist_epp.index.routing_history import History
from kvist_epp.prefix_stats.cache_value import PLACES, CacheValue, EndpointCacheValue

PLAIN = (None, None)
SIZE = 16
KEYS = ("a", "b", "c")
Chain = tuple[bytes, ...]


def hashes(chain: Sequence[bytes]) -> list[int]:
    """What every engine calls the blocks of a prompt."""
    return [hash((b"name", *chain[: n + 1])) & (1 << 64) - 1 for n in range(len(chain))]


class World:
    """Endpoints, one of them with two ranks; what they hold, and what was picked."""

    def __init__(self, *, precise: bool = True) -> None:
        self.index = Index()
        self.history = History()
        self.lookup = Lookup(self.index, self.history)
        self.savings = CacheValue(random.Random(1).random)
        self.publishers: dict[str, tuple[int, ...]] = {}
        for key in KEYS:
            names = [f"{key}/{rank}" for rank in range(2 if key == "b" else 1)]
            self.publishers[key] = tuple(map(self.index.publisher, names))
            self.lookup.join(key, Member(self.publishers[key], precise=precise, block_size=SIZE))

    def store(self, publisher: int, *chain: bytes, medium: str = "GPU") -> None:
        """An engine's event."""
        self.index.stored(publisher, PLAIN, None, hashes(chain), chain, block_size=SIZE, medium=medium)

    def pick(self, key: str, prompt: bytes, now: float = 0.0) -> None:
        """A request goes to this endpoint."""
        found = self.lookup.look(PLAIN, [prompt])
        self.savings.record(key, found, self.lookup.members[key], now)

    def worth(self, now: float = 0.0) -> Mapping[str, EndpointCacheValue]:
        """All steps at once."""
        steps = self.savings.compute(self.index, self.publishers, now)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: Mapping[str, EndpointCacheValue] = end.value
                return found

    def tokens(self, now: float = 0.0) -> list[int]:
        """Worth of a, b and c."""
        return [worth.tokens for worth in self.worth(now).values()]


class Histories(RuleBasedStateMachine):
    """Stores, copies, evictions and picks, while time goes on.

    A block that nobody holds any more does not come back here, nor does another one take its place: from then
    on the notes and the oracle count differently (see the module).
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.held: dict[int, set[Chain]] = {n: set() for n in range(4)}
        self.owner = {n: key for key, numbers in self.world.publishers.items() for n in numbers}
        self.picks: list[tuple[float, str, Chain]] = []
        self.gone: set[Chain] = set()
        self.now = 0.0

    def _anybody(self, chain: Chain) -> bool:
        return any(chain in held for held in self.held.values())

    @rule(publisher=st.integers(0, 3), text=st.text("xyz", min_size=1, max_size=70), medium=st.booleans())
    def store(self, publisher: int, text: str, medium: bool) -> None:
        """A whole prompt is cached, or copied from somebody."""
        chain = tuple(letter.encode() for letter in text)
        prefixes = [chain[: n + 1] for n in range(len(chain))]
        new = [prefix for prefix in prefixes if not self._anybody(prefix)]
        if any(old[:-1] == prefix[:-1] for prefix in new for old in self.gone):
            return
        self.world.store(publisher, *chain, medium="CPU" if medium else "GPU")
        self.held[publisher].update(prefixes)

    @rule(publisher=st.integers(0, 3), data=st.data())
    def evict(self, publisher: int, data: st.DataObject) -> None:
        """One block goes from every medium, wherever it is."""
        if not self.held[publisher]:
            return
        chain = data.draw(st.sampled_from(sorted(self.held[publisher])))
        for medium in ("GPU", "CPU"):
            while self.world.index.removed(publisher, hashes(chain)[-1:], medium=medium):
                pass
        self.held[publisher].discard(chain)
        if not self._anybody(chain):
            self.gone.add(chain)

    @rule(publisher=st.integers(0, 3))
    def restart(self, publisher: int) -> None:
        """An engine loses all it has."""
        self.world.index.forget(publisher)
        self.world.index.sweep(10_000)
        lost, self.held[publisher] = self.held[publisher], set()
        self.gone |= {chain for chain in lost if not self._anybody(chain)}

    @rule(key=st.sampled_from(KEYS), text=st.text("xyz", max_size=72), wait=st.floats(0, 100))
    def pick(self, key: str, text: str, wait: float) -> None:
        """A request, some time later."""
        self.now += wait
        self.world.pick(key, text.encode() + b"!", self.now)
        chain = tuple(letter.encode() for letter in text)
        runs = [self._run(chain, self.held[n]) for n in self.world.publishers[key]]
        self.picks.append((self.now, key, chain[: max(runs)]))

    def _run(self, chain: Chain, held: set[Chain]) -> int:
        return next((n for n in range(len(chain)) if chain[: n + 1] not in held), len(chain))

    def _only(self, key: str) -> set[Chain]:
        own = {c for n, held in self.held.items() if self.owner[n] == key for c in held}
        return own - {c for n, held in self.held.items() if self.owner[n] != key for c in held}

    @invariant()
    def as_the_oracle_says(self) -> None:
        """Worth and exclusive blocks of every endpoint, now and some minutes later."""
        for later in (0, 300, 600):
            then = self.now + later
            for key, worth in self.world.worth(then).items():
                only = self._only(key)
                live = [c for at, to, c in self.picks if to == key and then // 30 - at // 30 < 20]
                blocks = sum(chain[: n + 1] in only for chain in live for n in range(len(chain)))
                assert worth == EndpointCacheValue(blocks * SIZE, len(only))


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_copy_makes_the_original_worth_nothing() -> None:
    """Matches count as long as only one endpoint holds the blocks; what it holds beyond still counts."""
    world = World()
    world.store(0, b"s", b"t", b"u")
    for _ in range(3):
        world.pick("a", b"stuv")
    assert world.tokens() == [9 * SIZE, 0, 0]

    world.store(2, b"s", b"t")
    assert world.tokens() == [3 * SIZE, 0, 0]
    world.index.forget(2)
    assert world.tokens() == [9 * SIZE, 0, 0]


def test_ranks_of_one_endpoint_are_no_copies() -> None:
    """Blocks that two ranks of an endpoint hold are its own, and counted once."""
    world = World()
    for publisher in world.publishers["b"]:
        world.store(publisher, b"s", b"t")
    world.pick("b", b"st!")
    assert world.worth()["b"] == EndpointCacheValue(2 * SIZE, 2)


def test_in_approximate_mode_a_pick_says_what_only_one_had() -> None:
    """Without events the routing history counts, as it stood at the pick; it fades, and goes with the pod."""
    world = World(precise=False)
    text = b"x" * 4000
    world.history.note("a", PLAIN, text)
    world.history.note("b", PLAIN, text[:2000])
    world.pick("a", text)
    alone = world.tokens()[0]
    assert 400 < alone < 520  # half of a thousand tokens of four bytes
    assert world.tokens(599.0)[0] == alone
    assert world.tokens(600.0)[0] == 0

    world.savings.forget("a")
    assert world.tokens()[0] == 0


def test_notes_are_bounded_and_still_tell() -> None:
    """Ten times more places than are kept: what they tell together is right within a few percent, and so is
    what one hot place tells."""
    world = World()
    hot = b"hot!"
    world.store(0, b"hot")
    prompts = [b"%05d" % n for n in range(10 * PLACES)]
    for prompt in prompts:
        world.store(2, prompt)
    for prompt in prompts:
        world.pick("b", prompt + b"!")
        world.pick("a", hot)
    assert len(world.savings) <= PLACES
    hot_tokens, cold_tokens, _ = world.tokens()
    assert abs(cold_tokens / (SIZE * len(prompts)) - 1) < 0.05
    assert abs(hot_tokens / (SIZE * len(prompts)) - 1) < 0.05


def test_notes_keep_no_text_of_blocks_that_have_gone() -> None:
    """A segment that nobody holds any more is empty, whoever still refers to it."""
    world = World()
    world.store(0, b"long text " * 1000)
    found = world.lookup.look(PLAIN, [b"long text " * 1000 + b"!"])
    world.savings.record("a", found, world.lookup.members["a"], 0.0)
    [(segment, _)] = world.index.exclusive([0])
    world.index.removed(0, hashes([b"long text " * 1000]))
    assert (segment.text, segment.hashes, world.tokens()[0]) == (b"", (), 0)
