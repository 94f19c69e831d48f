"""Tests of the block pool against a naive model, and of its events against its content."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.sim.naive_pool import NaivePool, Subscriber

from kvist_epp.engines.vllm.kv_events import Cleared, Removed, Stored
from kvist_sim.engine.blocks import BlockPool, Digest, Hasher, short

SIZE = 2
BLOCKS = 9
HASHER = Hasher(SIZE)


def chain(tokens: list[int]) -> list[Digest]:
    """Digests of the full blocks of `tokens`."""
    digests: list[Digest] = []
    HASHER.extend(digests, tokens, None, None)
    return digests


@dataclass
class Held:
    """Blocks held by a sequence."""

    blocks: list[int]


class Pools(RuleBasedStateMachine):
    """Prompts over three tokens come and go in any order on both pools at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.naive = NaivePool(BLOCKS, SIZE)
        self.subscriber = Subscriber()
        self.holders: list[Held] = []

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def admit(self, tokens: list[int]) -> None:
        """Admit a sequence as the scheduler does: hit, hold, allocate the rest, store full blocks."""
        digests = chain(tokens)
        hit = self.pool.hit(digests, len(tokens))
        assert self.naive.hit(digests, len(tokens)) == hit
        missing = -(-len(tokens) // SIZE) - len(hit)
        if missing + self.pool.evictable(hit) > self.pool.free_blocks:
            return
        for pool in (self.pool, self.naive):
            pool.hold(hit)
        new = self.pool.allocate(missing)
        assert self.naive.allocate(missing) == new
        blocks, full = hit + new, len(tokens) // SIZE
        self.pool.store(
            blocks[len(hit) : full],
            digests[len(hit) : full],
            tokens[len(hit) * SIZE : full * SIZE],
            parent=digests[len(hit) - 1] if hit else None,
        )
        self.naive.store(blocks[len(hit) : full], digests[len(hit) : full])
        self.holders.append(Held(blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Tail first, as the scheduler releases."""
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        for pool in (self.pool, self.naive):
            pool.release(reversed(holder.blocks))

    @rule()
    def reset(self) -> None:
        """Reset the pool, which must be idle."""
        done = self.pool.reset()
        assert done == (not self.holders)
        if done:
            self.naive.digest = dict.fromkeys(self.naive.digest)
            self.naive.seen.clear()

    @invariant()
    def same(self) -> None:
        """Content, free blocks and what a subscriber knows agree."""
        self.subscriber.apply(self.pool.take_events())
        assert self.pool.cached() == self.naive.cached()
        assert self.subscriber.content() == self.naive.cached()
        assert self.pool.free_blocks == len(self.naive.order)


def test_pool_behaves_as_the_naive_pool() -> None:
    """Any history of prompts gives the content, free blocks and hits of the naive model, and matching
    events."""
    run_state_machine_as_test(
        Pools, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


def stored(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks of a prompt, cached and held."""
    blocks = pool.allocate(-(-len(tokens) // SIZE))
    full = len(tokens) // SIZE
    pool.store(blocks[:full], chain(tokens), tokens[: full * SIZE], parent=None, salt="s", session="r.1")
    return blocks


def test_tail_of_a_chain_goes_first_and_lazily() -> None:
    """Freed blocks stay cached until others need them; then the end of the chain goes before its
    beginning."""
    pool = BlockPool(4, SIZE)
    pool.release(reversed(stored(pool, [1, 2, 3, 4, 5, 6])))
    first, second, third = map(short, chain([1, 2, 3, 4, 5, 6]))
    pool.take_events()

    assert pool.cached() == {first: 1, second: 1, third: 1}

    pool.allocate(2)

    assert pool.take_events() == [Removed(hashes=[third], group=0), Removed(hashes=[second], group=0)]
    assert pool.cached() == {first: 1}


def test_a_hit_ends_before_the_last_token() -> None:
    """The last token of a prompt is computed again, so a prompt of whole blocks misses its last block."""
    pool = BlockPool(9, SIZE)
    blocks = stored(pool, [1, 2, 3, 4])

    assert pool.hit(chain([1, 2, 3, 4]), 4) == blocks[:1]
    assert pool.hit(chain([1, 2, 3, 4, 5]), 5) == blocks


def test_nothing_is_merged() -> None:
    """Two requests that compute the same prompt at once store it twice, and it is removed twice."""
    pool = BlockPool(5, SIZE)
    twice = stored(pool, [1, 2, 3]) + stored(pool, [1, 2, 3])
    digest = short(chain([1, 2])[0])

    assert pool.cached() == {digest: 2}

    pool.release(twice)
    pool.take_events()
    pool.allocate(4)

    assert pool.take_events() == [Removed(hashes=[digest], group=0)] * 2


def test_stored_event_says_all() -> None:
    """Hashes, parent, tokens, salt of the root block and the session are what vLLM publishes."""
    pool = BlockPool(9, SIZE)
    stored(pool, [1, 2, 3, 4])

    assert pool.take_events() == [
        Stored(
            hashes=list(map(short, chain([1, 2, 3, 4]))),
            parent=None,
            token_ids=[1, 2, 3, 4],
            block_size=SIZE,
            group=0,
            kind="full_attention",
            salt="s",
            session="r.1",
        )
    ]


def test_reset_needs_an_idle_pool() -> None:
    """AllBlocksCleared is published only when no block is held."""
    pool = BlockPool(4, SIZE)
    blocks = stored(pool, [1, 2, 3])
    pool.take_events()

    assert not pool.reset()

    pool.release(blocks)

    assert pool.reset()
    assert pool.take_events() == [Cleared()]
    assert pool.cached() == {}


def test_without_caching_nothing_is_announced() -> None:
    """--no-enable-prefix-caching: no hits and no events."""
    pool = BlockPool(4, SIZE, caching=False)
    pool.release(stored(pool, [1, 2]))

    assert pool.take_events() == []
    assert pool.cached() == {}
