"""The block pool as simply as it can be said, and what a subscriber makes of its events."""

from collections import Counter
from collections.abc import Iterable, Sequence

from kvist_epp.engines.vllm.kv_events import Event, Removed, Stored
from kvist_sim.engine.blocks import Digest, short


class NaivePool:
    """Lists and linear searches; the same verbs as ``BlockPool``."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.digest: dict[int, Digest | None] = dict.fromkeys(range(1, blocks))
        self.held = dict.fromkeys(self.digest, 0)
        self.order = list(self.digest)
        self.seen: list[int] = []
        """Cached blocks, oldest first."""

    def cached(self) -> dict[int, int]:
        return Counter(short(digest) for digest in self.digest.values() if digest is not None)

    def hit(self, digests: Sequence[Digest], tokens: int) -> list[int]:
        found: list[int] = []
        for number, digest in enumerate(digests):
            holders = [block for block in self.seen if self.digest[block] == digest]
            if not holders or (number + 1) * self.block_size > tokens - 1:
                break
            found.append(holders[0])
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.held[block] += 1
            if block in self.order:
                self.order.remove(block)

    def allocate(self, count: int) -> list[int]:
        taken, self.order = self.order[:count], self.order[count:]
        for block in taken:
            self.held[block] = 1
            self.digest[block] = None
            if block in self.seen:
                self.seen.remove(block)
        return taken

    def store(self, blocks: Sequence[int], digests: Sequence[Digest]) -> None:
        for block, digest in zip(blocks, digests, strict=True):
            self.digest[block] = digest
            self.seen.append(block)

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.held[block] -= 1
            if self.held[block] == 0:
                self.order.insert(len(self.order) if self.digest[block] is not None else 0, block)


class Subscriber:
    """Counts each hash, as a consumer must."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()
        self.parents: dict[int, int | None] = {}

    def apply(self, events: Iterable[Event]) -> None:
        """Raises AssertionError for a removal of what was never stored, or a child of an unknown parent."""
        for event in events:
            if isinstance(event, Stored):
                assert event.parent is None or event.parent in self.parents
                assert len(event.token_ids) == len(event.hashes) * event.block_size
                self.held.update(event.hashes)
                for parent, name in zip([event.parent, *event.hashes], event.hashes, strict=False):
                    self.parents[name] = parent
            elif isinstance(event, Removed):
                assert all(self.held[name] > 0 for name in event.hashes)
                self.held.subtract(event.hashes)
            else:
                self.held.clear()

    def content(self) -> dict[int, int]:
        """Return the expected content of the cache."""
        return {name: count for name, count in self.held.items() if count}
