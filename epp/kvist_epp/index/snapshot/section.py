"""One publisher's section: on its way out, as the ingestor gives it; on its way in, to the index and the
ingestor's books."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from kvist_epp.errors import SnapshotError
from kvist_epp.index.snapshot.capture import Capture
from kvist_epp.index.snapshot.parts import Content, End, Extra, Holding
from kvist_epp.index.snapshot.restore import Restore
from kvist_epp.kvevents.decode_blocks import DecodeBlock, DecodeBlockState
from kvist_epp.kvevents.decode_check import DecodeChecker
from kvist_epp.kvevents.publisher_state import PublisherState


class Captured(NamedTuple):
    """Parts of a section."""

    group: int | None
    """The one KV cache group learned."""
    pending: tuple[DecodeBlock, ...]
    """Blocks born in decode, as they were before the rest was recorded."""
    capture: Capture


class Section:
    """Nothing of it counts before ``end`` has returned; a caller that gives it up removes the publisher."""

    def __init__(self, restore: Restore, publisher: PublisherState, checker: DecodeChecker) -> None:
        self._restore = restore
        self._publisher = publisher
        self._checker = checker
        self._pending: dict[int, DecodeBlock] = {}
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
        for block in extra.pending:
            if self._pending.setdefault(block.hash, block) is not block:
                raise SnapshotError("a block waits for its check twice")

    def end(self, end: End) -> Iterator[None]:
        """Complete: yields now and then. Raises SnapshotError when something is missing."""
        if (end.blocks, end.extras) != (self._restore.blocks, self._extras):
            raise SnapshotError("a section is not what its end says")
        yield from self._restore.finish()
        if self.valid:
            for block in self._pending.values():
                self._checker.adopt(self._publisher, self._judged(block))

    def _judged(self, block: DecodeBlock) -> DecodeBlock:
        """The index decides: it may have been credited, or its credit taken back, after it was recorded."""
        if self._restore.holds(block.hash):
            return replace(block, state=DecodeBlockState.CREDITED)
        return (
            replace(block, state=DecodeBlockState.REJECTED)
            if block.state is DecodeBlockState.CREDITED
            else block
        )
