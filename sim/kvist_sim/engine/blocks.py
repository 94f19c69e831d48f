"""Pool of KV cache blocks with vLLM's semantics (``vllm/v1/core/block_pool.py``). Pure.

Only full blocks are cached. A freed block stays cached until it is allocated again (lazy eviction), least
recently freed first; a chain is freed tail first, so that the tail is evicted first. Two
blocks may hold the same hash: nothing is merged. Every change of what is cached is an event.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from kvist_epp.engines.vllm.kv_events import Cleared, Event, Removed, Stored
from kvist_sim.engine.chain import Digest, short

Name = TypeVar("Name", bound=Hashable)
"""Key of a cached block: vLLM's digest, or in virtual time a number."""


class Blocks(Generic[Name]):
    """Pool of ``blocks`` blocks, the first of which is vLLM's placeholder and never allocated.

    A block is an int. It is *held* while its reference count is positive, else free; independent of that it
    is *cached* while it has a digest.
    """

    def __init__(self, blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.block_size = block_size
        self.caching = caching
        self._digests: list[Name | None] = [None] * blocks
        self._held = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._cached: dict[Name, tuple[int, ...]] = {}

    def __repr__(self) -> str:
        name, free = type(self).__name__, len(self._free)
        return f"<{name} {free} of {self.capacity} free, {len(self._cached)} hashes cached>"

    @property
    def capacity(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._held) - 1

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds, cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks held by sequences, 0 to 1; cached blocks that no sequence holds count as free."""
        return 1.0 - len(self._free) / self.capacity if self.capacity else 0.0

    def hit(self, digests: Sequence[Name], tokens: int) -> list[int]:
        """Return the blocks of the longest cached prefix of a sequence of ``tokens`` tokens.

        The last token is always computed again, so that a hit ends before it.
        """
        cached = self._cached
        found = list(map(cached.get, digests[: max(0, tokens - 1) // self.block_size]))
        if None in found:
            del found[found.index(None) :]
        return [blocks[0] for blocks in found if blocks]

    def evictable(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks`` count as free, and would not after ``hold``."""
        held = self._held
        return [held[block] for block in blocks].count(0)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block."""
        held, free = self._held, self._free
        for block in blocks:
            if not held[block]:
                del free[block]
            held[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` blocks held once, evicting their content. Raises KeyError when fewer are free."""
        take, held, digests = self._free.popitem, self._held, self._digests
        blocks = [take(last=False)[0] for _ in range(count)]
        for block in blocks:
            held[block] = 1
            digest = digests[block]
            if digest is not None:
                self._evict(block, digest)
        return blocks

    def cache(self, blocks: Sequence[int], digests: Sequence[Name]) -> None:
        """Register full blocks under their digests."""
        known, cached = self._digests, self._cached
        for block, digest in zip(blocks, digests, strict=True):
            known[block] = digest
            others = cached.get(digest)
            cached[digest] = (block,) if others is None else (*others, block)

    def _evict(self, block: int, digest: Name) -> None:
        others = tuple([other for other in self._cached[digest] if other != block])
        if others:
            self._cached[digest] = others
        else:
            del self._cached[digest]
        self._digests[block] = None
        self._evicted(digest)

    def _evicted(self, digest: Name) -> None:
        """A block lost what it cached."""
        raise NotImplementedError

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each block, in the order in which they should be evicted.

        What is cached joins the end of the queue; what is not can never be hit and is reused first.
        """
        held, free, digests = self._held, self._free, self._digests
        for block in blocks:
            held[block] -= 1
            if not held[block]:
                free[block] = None
                if digests[block] is None:
                    free.move_to_end(block, last=False)


class BlockPool(Blocks[Digest]):
    """Pool of an engine that publishes events."""

    def __init__(self, blocks: int, block_size: int, *, caching: bool = True) -> None:
        super().__init__(blocks, block_size, caching=caching)
        self._events: list[Event] = []

    def cached(self) -> dict[int, int]:
        """Number of blocks by published hash."""
        return {short(digest): len(blocks) for digest, blocks in self._cached.items()}

    def _evicted(self, digest: Digest) -> None:
        self._events.append(Removed(hashes=[short(digest)], group=0))

    def store(
        self,
        blocks: Sequence[int],
        digests: Sequence[Digest],
        tokens: list[int],
        *,
        parent: Digest | None,
        lora: str | None = None,
        salt: str | None = None,
        session: str | None = None,
    ) -> None:
        """Cache full blocks, in chain order after ``parent``; ``tokens`` are those of the blocks alone."""
        if not self.caching or not blocks:
            return
        self.cache(blocks, digests)
        self.announce(digests, tokens, parent=parent, lora=lora, salt=salt, session=session)

    def announce(
        self,
        digests: Sequence[Digest],
        tokens: list[int],
        *,
        parent: Digest | None,
        lora: str | None = None,
        salt: str | None = None,
        session: str | None = None,
    ) -> None:
        """Publish the event of ``store`` without storing (vLLM's report mode "full" repeats cache hits)."""
        self._events.append(
            Stored(
                hashes=list(map(short, digests)),
                parent=None if parent is None else short(parent),
                token_ids=tokens,
                block_size=self.block_size,
                lora=lora,
                group=0,
                kind="full_attention",
                salt=salt if parent is None else None,
                session=session,
            )
        )

    def reset(self) -> bool:
        """Drop everything cached; return False, and change nothing, while any block is held."""
        if len(self._free) != self.capacity:
            return False
        self._cached.clear()
        self._digests = [None] * len(self._digests)
        self._events.append(Cleared())
        return True

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        taken, self._events = self._events, []
        return taken
