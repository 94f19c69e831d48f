"""Tests of the value of caches against an oracle that remembers every pick and every block."""

import random
from collections.abc import Mapping, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvist_epp.index.byte_index import Index
from kvist_epp.index.cached_part import Member
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.prefix_stats.cache_value import PLACES, CacheValue, EndpointCacheValue

PLAIN = (None, None)
SIZE = 16
KEYS = ("a", "b", "c")
Chain = tuple[bytes, ...]


def hashes(chain: Sequence[bytes]) -> list[int]:
    """Return the block hashes of a prompt; all engines compute the same."""
    return [hash((b"name", *chain[: n + 1])) & (1 << 64) - 1 for n in range(len(chain))]


class World:
    """Three endpoints, one of them with two ranks, their blocks, and the picks."""

    def __init__(self, *, precise: bool = True) -> None:
        self.index = Index()
        self.history = RoutingHistory()
        self.lookup = Lookup(self.index, self.history)
        self.value = CacheValue(random.Random(1).random)
        self.publishers: dict[str, tuple[int, ...]] = {}
        for key in KEYS:
            names = [f"{key}/{rank}" for rank in range(2 if key == "b" else 1)]
            self.publishers[key] = tuple(map(self.index.publisher, names))
            self.lookup.join(key, Member(self.publishers[key], precise=precise, block_size=SIZE))

    def store(self, publisher: int, *chain: bytes, medium: str = "GPU") -> None:
        """Apply an event that stores a prompt's blocks."""
        self.index.stored(publisher, PLAIN, None, hashes(chain), chain, block_size=SIZE, medium=medium)

    def pick(self, key: str, prompt: bytes, now: float = 0.0) -> None:
        """Route a request to this endpoint."""
        found = self.lookup.look(PLAIN, [prompt])
        self.value.record(key, found, self.lookup.members[key], now)

    def compute(self, now: float = 0.0) -> Mapping[str, EndpointCacheValue]:
        """Run all steps of the computation."""
        steps = self.value.compute(self.index, self.publishers, now)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: Mapping[str, EndpointCacheValue] = end.value
                return found

    def tokens(self, now: float = 0.0) -> list[int]:
        """Return the tokens saved by a, b and c."""
        return [value.tokens for value in self.compute(now).values()]


class Histories(RuleBasedStateMachine):
    """Stores, copies, evictions and picks, while time goes on.

    A block that no endpoint holds any more is never stored again here, nor is another one stored in its
    place, because the product and the oracle would then count differently (see the module).
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.held: dict[int, set[Chain]] = {n: set() for n in range(4)}
        self.owner = {n: key for key, numbers in self.world.publishers.items() for n in numbers}
        self.picks: list[tuple[float, str, Chain]] = []
        self.gone: set[Chain] = set()
        self.now = 0.0

    def _is_held(self, chain: Chain) -> bool:
        return any(chain in held for held in self.held.values())

    @rule(publisher=st.integers(0, 3), text=st.text("xyz", min_size=1, max_size=70), medium=st.booleans())
    def store(self, publisher: int, text: str, medium: bool) -> None:
        """Store a whole prompt, new or copied."""
        chain = tuple(letter.encode() for letter in text)
        prefixes = [chain[: n + 1] for n in range(len(chain))]
        new = [prefix for prefix in prefixes if not self._is_held(prefix)]
        if any(old[:-1] == prefix[:-1] for prefix in new for old in self.gone):
            return
        self.world.store(publisher, *chain, medium="CPU" if medium else "GPU")
        self.held[publisher].update(prefixes)

    @rule(publisher=st.integers(0, 3), data=st.data())
    def evict(self, publisher: int, data: st.DataObject) -> None:
        """Remove one block, anywhere in a prompt, from every medium."""
        if not self.held[publisher]:
            return
        chain = data.draw(st.sampled_from(sorted(self.held[publisher])))
        for medium in ("GPU", "CPU"):
            while self.world.index.removed(publisher, hashes(chain)[-1:], medium=medium):
                pass
        self.held[publisher].discard(chain)
        if not self._is_held(chain):
            self.gone.add(chain)

    @rule(publisher=st.integers(0, 3))
    def restart(self, publisher: int) -> None:
        """Restart an engine, which loses all its blocks."""
        self.world.index.forget(publisher)
        self.world.index.sweep(10_000)
        lost, self.held[publisher] = self.held[publisher], set()
        self.gone |= {chain for chain in lost if not self._is_held(chain)}

    @rule(key=st.sampled_from(KEYS), text=st.text("xyz", max_size=72), wait=st.floats(0, 100))
    def pick(self, key: str, text: str, wait: float) -> None:
        """Route a request after a while."""
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
        """Saved tokens and exclusive blocks of every endpoint are right, now and some minutes later."""
        for later in (0, 300, 600):
            then = self.now + later
            for key, value in self.world.compute(then).items():
                only = self._only(key)
                live = [c for at, to, c in self.picks if to == key and then // 30 - at // 30 < 20]
                blocks = sum(chain[: n + 1] in only for chain in live for n in range(len(chain)))
                assert value == EndpointCacheValue(blocks * SIZE, len(only))


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_copied_block_saves_nothing() -> None:
    """Matches count while one endpoint alone holds the blocks; blocks behind a copied prefix still count."""
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
    """Blocks that two ranks of one endpoint hold are exclusive to it, and counted once."""
    world = World()
    for publisher in world.publishers["b"]:
        world.store(publisher, b"s", b"t")
    world.pick("b", b"st!")
    assert world.compute()["b"] == EndpointCacheValue(2 * SIZE, 2)


def test_in_approximate_mode_values_are_computed_at_the_pick() -> None:
    """Without events the routing history at the pick counts; values expire, and go with their endpoint."""
    world = World(precise=False)
    text = b"x" * 4000
    world.history.note("a", PLAIN, text)
    world.history.note("b", PLAIN, text[:2000])
    world.pick("a", text)
    alone = world.tokens()[0]
    assert 400 < alone < 520  # half of a thousand tokens of four bytes
    assert world.tokens(599.0)[0] == alone
    assert world.tokens(600.0)[0] == 0

    world.value.remove("a")
    assert world.tokens()[0] == 0


def test_memory_is_bounded_and_values_stay_right() -> None:
    """With ten times more places than are kept, the sum over them is right within a few percent, and so is
    the value of one hot place."""
    world = World()
    hot = b"hot!"
    world.store(0, b"hot")
    prompts = [b"%05d" % n for n in range(10 * PLACES)]
    for prompt in prompts:
        world.store(2, prompt)
    for prompt in prompts:
        world.pick("b", prompt + b"!")
        world.pick("a", hot)
    assert len(world.value) <= PLACES
    hot_tokens, cold_tokens, _ = world.tokens()
    assert abs(cold_tokens / (SIZE * len(prompts)) - 1) < 0.05
    assert abs(hot_tokens / (SIZE * len(prompts)) - 1) < 0.05


def test_recorded_matches_keep_no_text_of_removed_blocks() -> None:
    """A segment that no endpoint holds any more is emptied, even while recorded matches refer to it."""
    world = World()
    world.store(0, b"long text " * 1000)
    found = world.lookup.look(PLAIN, [b"long text " * 1000 + b"!"])
    world.value.record("a", found, world.lookup.members["a"], 0.0)
    [(segment, _)] = world.index.exclusive([0])
    world.index.removed(0, hashes([b"long text " * 1000]))
    assert (segment.text, segment.hashes, world.tokens()[0]) == (b"", (), 0)
