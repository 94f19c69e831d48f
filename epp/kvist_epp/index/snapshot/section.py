"""One publisher's section: on its way out, as the learner gives it; on its way in, to the index and the
learner's books."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from kvist_epp.errors import SnapshotError
from kvist_epp.index.snapshot.capture import Capture
from kvist_epp.index.snapshot.parts import Content, End, Extra, Holding
from kvist_epp.index.snapshot.restore import Restore
from kvist_epp.kvevents.decode_blocks import Born, State
from kvist_epp.kvevents.decode_check import Checker, Ward


class Captured(NamedTuple):
    """Parts of a section."""

    group: int | None
    """The one KV cache group learned."""
    pending: tuple[Born, ...]
    """Blocks born in decode, as they were before the rest was recorded."""
    capture: Capture


class Section:
    """Nothing of it counts before ``end`` has returned; a caller that gives it up removes the publisher."""

    def __init__(self, restore: Restore, ward: Ward, checker: Checker) -> None:
        self._restore = restore
        self._ward = ward
        self._checker = checker
        self._pending: dict[int, Born] = {}
        self._extras = 0

    @property
    def valid(self) -> bool:
        """Whether it goes on: its publisher is still there and was not forgotten."""
        return self._restore.valid

    def hold(self, content: Content, holding: Holding) -> None:
        """Blocks of text. Raises SnapshotError."""
        self._restore.hold(content, holding)

    def extra(self, extra: Extra) -> None:
        """The rest. Raises SnapshotError."""
        self._extras += len(extra.copies) + len(extra.opaque) + len(extra.pending)
        self._restore.extra(extra.copies, extra.opaque)
        for born in extra.pending:
            if self._pending.setdefault(born.name, born) is not born:
                raise SnapshotError("a block waits for its check twice")

    def end(self, end: End) -> Iterator[None]:
        """Complete: yields now and then. Raises SnapshotError when something is missing."""
        if (end.blocks, end.extras) != (self._restore.blocks, self._extras):
            raise SnapshotError("a section is not what its end says")
        yield from self._restore.finish()
        if self.valid:
            for born in self._pending.values():
                self._checker.adopt(self._ward, self._judged(born))

    def _judged(self, born: Born) -> Born:
        """The index decides: it may have been credited, or its credit taken back, after it was recorded."""
        if self._restore.holds(born.name):
            return replace(born, state=State.CREDITED)
        return replace(born, state=State.REJECTED) if born.state is State.CREDITED else born
