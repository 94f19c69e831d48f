"""The block cache of an engine in virtual time, which notes the events that the engine publishes."""

from collections.abc import Sequence
from typing import TypeAlias

from kvist_sim.engine.blocks import Blocks
from kvist_sim.engine.tiers import TierNote
from kvist_sim.virtual.jobs import Job
from kvist_sim.virtual.loads import LoadNote

Note: TypeAlias = int | tuple[Job, int, int] | TierNote | LoadNote
"""The hash of a block that was evicted; (job, first, end): its blocks ``first`` up to ``end`` were cached; or
an event of slower places."""


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

    def load(self, job: Job, first: int, end: int) -> None:
        """Cache the job's blocks ``first`` up to ``end``, which were loaded from a slower place."""
        self.changes += 1
        self.cache(job.held[first:end], job.hashes[first:end])
        if self._noting:
            self._notes.append(LoadNote(job, first, end))

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
