"""The blocks that host memory removes next follow vLLM's order, and a look-up expects them from storage."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.parts import BLOCK

from kvist_epp.index.byte_index import Index
from kvist_epp.index.cached_part import CachedPart, Member
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.index.tree import eviction
from kvist_epp.names import HOST_MEDIUM, SHARED_MEDIUM, STORAGE_MEDIUM

ROOT = (None, None)
Chain = tuple[str, ...]
"""Blocks of a prompt, each by a letter."""

prompts = st.lists(st.text("ab", min_size=1, max_size=6), min_size=2, max_size=12)


class HostMemory:
    """Host memory as vLLM's LRU policy keeps it, an engine that announces what it does, and a disk that keeps
    everything."""

    def __init__(self, room: int, disk: str = SHARED_MEDIUM) -> None:
        self.index = Index()
        self.engine = self.index.publisher("e")
        self.disk = self.engine if disk == STORAGE_MEDIUM else self.index.publisher("storage/s")
        self.room = room
        self.removed: Chain = ()
        self._medium = disk
        self._blocks: list[Chain] = []
        """Each as the chain that ends with it; the one that is removed first comes first."""

    def use(self, letters: Sequence[str]) -> None:
        """Serve a request: its blocks are stored, as far as they are not there, and used from now on."""
        chain = tuple(letters)
        parts = [chain[: end + 1] for end in range(len(chain))]
        for part in parts:
            if part not in self._blocks:
                while len(self._blocks) >= self.room:
                    self.evict(next(one for one in self._blocks if one not in parts))
                self._blocks.append(part)
                self._store(self.engine, part, HOST_MEDIUM)
                self._store(self.disk, part, self._medium)
        self._blocks = [part for part in self._blocks if part not in parts] + parts[::-1]

    def evict(self, part: Chain) -> None:
        """Remove one block."""
        self._blocks.remove(part)
        self.removed = part
        self.index.removed(self.engine, [name(part)], medium=HOST_MEDIUM)
        self.index.evicted(self.engine, name(part), HOST_MEDIUM)

    def evict_next(self) -> Chain:
        """Remove the block whose turn it is, and return it."""
        part = self._blocks[0]
        self.evict(part)
        return part

    def next_in_turn(self) -> int:
        """Return how many of the blocks that go next are those before the one that was removed last."""
        count = 0
        for part in self._blocks:
            if part != self.removed[: -1 - count]:
                break
            count += 1
        return count

    def next_by_index(self, limit: int = 1000) -> int:
        """Return the same as the index sees it."""
        end = self.index.match(ROOT, text_of(self.removed) + b"?").end(self.disk)
        assert end is not None, "the disk keeps everything"
        after = (len(self.removed) - 1) * BLOCK
        found = self.index.next_evicted(self.engine, HOST_MEDIUM, end, after, limit * BLOCK)
        assert self.index.next_evicted(self.engine, HOST_MEDIUM, end, after + BLOCK, limit * BLOCK) == 0
        return found // BLOCK

    def _store(self, publisher: int, part: Chain, medium: str) -> None:
        parent = name(part[:-1]) if len(part) > 1 else None
        text = part[-1].encode() * 4 * BLOCK
        self.index.stored(publisher, ROOT, parent, [name(part)], [text], block_size=BLOCK, medium=medium)

    def look(self, letters: Sequence[str]) -> CachedPart:
        """Return what the look-up says of a prompt that goes on after these blocks."""
        found = Lookup(self.index, RoutingHistory())
        found.join("e", Member((self.engine,), block_size=BLOCK, storage="s"))
        if self._medium == SHARED_MEDIUM:
            found.storages = {"s": self.disk}
        return found.look(ROOT, [text_of(letters) + b"?"]).hits["e"]


def name(part: Chain) -> int:
    """Return the hash of the block with which a chain ends."""
    return hash(part) & (1 << 64) - 1


def text_of(letters: Sequence[str]) -> bytes:
    """Return the text of a chain of blocks."""
    return b"".join(letter.encode() * 4 * BLOCK for letter in letters)


@given(prompts, st.integers(8, 16))
def test_the_next_blocks_are_those_of_the_engine(documents: list[str], room: int) -> None:
    """After any requests, each with an end of its own, the blocks that the index takes for the next of the
    prompt of the block that was removed last are the ones that vLLM's order removes next."""
    memory = HostMemory(room)
    for number, document in enumerate(documents):
        memory.use((*document, f"q{number}"))
        if not memory.removed:
            continue
        assert memory.next_by_index() == memory.next_in_turn()


def in_part(disk: str) -> HostMemory:
    """Host memory that has lost the last two of the four blocks of a document, and nothing since."""
    memory = HostMemory(8, disk)
    memory.use("abcd")
    memory.use("xyzuv")
    memory.evict_next()
    return memory


def test_what_goes_while_the_rest_is_read_is_read_from_storage() -> None:
    """A prompt's blocks in host memory that are next to go are counted with those of the disk, shared or not,
    unless another prompt has used them since."""
    for disk in (SHARED_MEDIUM, STORAGE_MEDIUM):
        memory = in_part(disk)
        assert memory.look("abcd").lower == {disk: 4 * BLOCK}

        memory = in_part(disk)
        memory.use("abq")
        assert memory.removed == ("a", "b", "c")
        assert memory.look("abcd").lower == {HOST_MEDIUM: 2 * BLOCK, disk: 2 * BLOCK}


def test_a_prompt_that_is_not_next_keeps_its_part() -> None:
    """A block of another prompt was removed since: what is left of this one was used later."""
    memory = in_part(SHARED_MEDIUM)
    memory.use("ab")
    memory.evict(("x", "y", "z", "u", "v"))

    assert memory.look("abcd").lower == {HOST_MEDIUM: 2 * BLOCK, SHARED_MEDIUM: 2 * BLOCK}


@pytest.mark.parametrize("restarted", [True, False])
def test_a_forgotten_engine_evicts_nothing(*, restarted: bool) -> None:
    """After a restart, and after a tier was cleared, no block is the next to go."""
    memory = in_part(SHARED_MEDIUM)
    if restarted:
        memory.index.forget(memory.engine)
    else:
        memory.index.cleared(memory.engine, medium=HOST_MEDIUM)

    assert memory.look("abcd").lower == {SHARED_MEDIUM: 4 * BLOCK}
    assert memory.next_by_index() == 0


def test_of_many_ways_on_one_is_taken_for_used() -> None:
    """A block from which more prompts go on than are looked at counts as used."""
    memory = HostMemory(1000)
    for number in range(eviction.MOST_BRANCHES + 2):
        memory.use(("a", f"q{number}"))
    memory.use("abc")
    for number in range(eviction.MOST_BRANCHES + 2):
        memory.evict(("a", f"q{number}"))
    memory.evict(("a", "b", "c"))

    assert memory.next_by_index() == 1


def test_a_long_prompt_is_followed_through_its_segments() -> None:
    """Hundreds of blocks are followed over their segments of 64, as far as is asked."""
    memory = HostMemory(1000)
    memory.use([f"{number % 7}" for number in range(300)])
    for _ in range(20):
        memory.evict_next()

    assert [memory.next_by_index(limit) for limit in (1, 100, 1000)] == [1, 100, 280]


def test_an_engine_with_hashes_of_its_own_evicts_by_its_own() -> None:
    """Two engines that have another hash for the same blocks are each asked by their own."""
    memory = in_part(STORAGE_MEDIUM)
    other = memory.index.publisher("other")
    for medium in (HOST_MEDIUM, STORAGE_MEDIUM):
        texts = [text_of(letter) for letter in "abcd"]
        memory.index.stored(other, ROOT, None, [1, 2, 3, 4], texts, block_size=BLOCK, medium=medium)
    memory.index.removed(other, [4, 3], medium=HOST_MEDIUM)
    memory.index.evicted(other, 3, HOST_MEDIUM)
    end = memory.index.match(ROOT, text_of("abcd") + b"?").end(other)

    assert end is not None
    assert memory.index.next_evicted(other, HOST_MEDIUM, end, 2 * BLOCK, 4 * BLOCK) == 2 * BLOCK
    assert memory.next_by_index() == 2
