"""Engines with windows or states that compute the last block of each hit again."""

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.index.byte_index import Index
from kvist_epp.index.cached_part import CachedPart, Member, with_shorter_credit
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory

ROOT = (None, None)
SIZE = 4
BLOCKS = [bytes([64 + number]) * SIZE for number in range(1, 9)]


def longest(blocks: int, needed: int, held: Collection[int]) -> int:
    """Tokens of the longest hit of so many blocks at whose end the other group has what it needs."""
    ends = (end for end in range(blocks, -1, -1) if held >= set(range(max(0, end - needed), end)))  # type: ignore[operator]
    return SIZE * next(ends)


@given(
    st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.frozensets(st.integers(0, 7)), st.booleans()
)
def test_the_block_is_left_out_before_the_windows_end_a_hit(
    stored: int, asked: int, needed: int, held: frozenset[int], drops: bool
) -> None:
    """A match ends where the other group allows it, up to the block that is computed again; the other habit
    gives what it would be, and changes nothing."""
    index = Index()
    publisher = index.publisher("e/0")
    index.stored(publisher, ROOT, None, range(stored), BLOCKS[:stored], block_size=SIZE)
    index.window_stored(publisher, 1, [*held, 99], needed=needed, block_size=SIZE)
    prompt, blocks = b"".join(BLOCKS[:asked]) + b"?", min(stored, asked)
    index.drops_last_block(publisher, drops)
    lookup = Lookup(index, RoutingHistory())
    for _ in range(2):
        found = index.match(ROOT, prompt).of(publisher).tokens
        other = lookup.other_hit(publisher, ROOT, prompt)
        assert found == longest(blocks - drops, needed, held)
        assert other == longest(blocks - (not drops), needed, held)


def test_the_habit_outlives_a_reset() -> None:
    """An engine whose events were lost for a while is still the same engine."""
    index = Index()
    publisher = index.publisher("e/0")
    index.drops_last_block(publisher, True)
    index.forget(publisher)
    index.stored(publisher, ROOT, None, range(3), BLOCKS[:3], block_size=SIZE)
    index.window_stored(publisher, 1, range(3), needed=1, block_size=SIZE)
    assert index.match(ROOT, b"".join(BLOCKS[:3]) + b"?").of(publisher).tokens == 2 * SIZE


def test_a_look_up_leaves_one_block_out_once() -> None:
    """Hits by the index have no last block already; what was just sent there is a block shorter."""
    index, history = Index(), RoutingHistory()
    lookup = Lookup(index, history, bytes_per_token=1.0)
    publisher = index.publisher("e/0")
    index.stored(publisher, ROOT, None, range(4), BLOCKS[:4], block_size=SIZE)
    index.window_stored(publisher, 1, range(4), needed=1, block_size=SIZE)
    lookup.join("e", Member((publisher,), block_size=SIZE, drops_last_block=True))
    lookup.drops_last_block = True
    index.drops_last_block(publisher, True)
    prompt = b"".join(BLOCKS) + b"?"
    assert lookup.look(ROOT, [prompt]).hits["e"].tokens == 3 * SIZE
    history.note("e", ROOT, b"".join(BLOCKS[:6]))
    assert lookup.look(ROOT, [prompt]).hits["e"].tokens == 5 * SIZE


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3))
def test_credit_is_never_shorter_than_what_is_known(tokens: int, indexed: int, less: int) -> None:
    """The block is left out of what is not in the index yet, and of nothing else."""
    part = CachedPart(tokens, 10 * tokens, {}, indexed)
    found = with_shorter_credit(part, less)
    assert found.indexed == indexed
    assert found.tokens == (tokens if tokens <= indexed else max(indexed, tokens - less))
