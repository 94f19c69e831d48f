"""The simulator's block pool for virtual time: block hashes are numbers already, and events are short notes.

To make vLLM's events (token ids, one object a removal) would cost more than all else together; notes say the
same in a form that routers' indexes take up as it is.
"""

from collections.abc import Sequence
from typing import TypeAlias

from kvist_sim.engine.blocks import Blocks
from kvist_sim.virtual.jobs import Job

Note: TypeAlias = int | tuple[Job, int, int]
"""The hash of a block that was evicted; or (job, first, end): its blocks ``first`` up to ``end`` were
cached."""


class NotingPool(Blocks[int]):
    """Several engines may share one: then what one has computed is there for all."""

    def __init__(self, blocks: int, block_size: int, *, noting: bool = True) -> None:
        super().__init__(blocks, block_size)
        self._noting = noting
        self._notes: list[Note] = []
        self.changes = 0
        """Grows whenever a prompt is taken up or a piece of one computed."""

    def take(self, blocks: list[int]) -> None:
        """``hold`` for a prompt that is taken up."""
        self.changes += 1
        self.hold(blocks)

    def store(self, job: Job, first: int, end: int) -> None:
        """Caches the job's blocks ``first`` up to ``end``, which are full."""
        self.changes += 1
        self.cache(job.held[first:end], job.hashes[first:end])
        self.note(job, first, end)

    def note(self, job: Job, first: int, end: int) -> None:
        """Mark these blocks as cached and record the event."""
        if self._noting:
            self._notes.append((job, first, end))

    def _evicted(self, digest: int) -> None:
        if self._noting:
            self._notes.append(digest)

    def held_prefix(self, hashes: Sequence[int], tokens: int) -> int:
        """Return the number of leading blocks that are cached; ``hit`` without taking the blocks."""
        return len(self.hit(hashes, tokens))

    def take_notes(self) -> list[Note]:
        """Return the events since the last call."""
        taken, self._notes = self._notes, []
        return taken
