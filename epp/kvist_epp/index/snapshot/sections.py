"""Writes captures as the parts of a snapshot, and reads these parts into an ingestor, in steps.

Text that several publishers hold is written once. Each section is complete in itself, so a snapshot that
breaks off, or contradicts itself, leaves the publishers before that point restored and the one it happened in
forgotten."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvist_epp.errors import SnapshotError
from kvist_epp.index.snapshot.capture import Capture, Recorded, Restore
from kvist_epp.index.snapshot.parts import Begin, Content, End, Extra, Holding, Part
from kvist_epp.index.tree.holders import SEGMENT_BLOCKS
from kvist_epp.index.tree.segment import Segment
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
    """The section of one publisher that is being read.

    Nothing of it counts before ``end`` has returned; a caller that gives it up removes the publisher.
    """

    def __init__(
        self,
        restore: Restore,
        publisher: PublisherState,
        checker: DecodeChecker,
        on_restored: Callable[[PublisherState], None] = lambda _: None,
    ) -> None:
        """``on_restored`` is called once the section is complete."""
        self._on_restored = on_restored
        self._restore = restore
        self._publisher = publisher
        self._checker = checker
        self._pending: dict[int, DecodeBlock] = {}
        self._extras = 0

    @property
    def valid(self) -> bool:
        """True while its publisher exists and was not reset."""
        return self._restore.valid

    def hold(self, content: Content, holding: Holding) -> None:
        """Add blocks of text to the publisher. Raises SnapshotError."""
        self._restore.hold(content, holding)

    def extra(self, extra: Extra) -> None:
        """Add copies, opaque blocks, windows and pending decode blocks. Raises SnapshotError."""
        self._extras += len(extra.copies) + len(extra.opaque) + len(extra.pending)
        self._restore.extra(extra.copies, extra.opaque, extra.windows)
        for block in extra.pending:
            if self._pending.setdefault(block.hash, block) is not block:
                raise SnapshotError("a block that awaits its check was sent twice")

    def end(self, end: End) -> Iterator[None]:
        """Complete: yields now and then. Raises SnapshotError when something is missing."""
        if (end.blocks, end.extras) != (self._restore.blocks, self._extras):
            raise SnapshotError("a section differs from the counts at its end")
        yield from self._restore.finish()
        if self.valid:
            for block in self._pending.values():
                self._checker.adopt(self._publisher, self._judged(block))
            self._on_restored(self._publisher)

    def _judged(self, block: DecodeBlock) -> DecodeBlock:
        """The index decides: it may have been credited, or its credit taken back, after it was recorded."""
        if self._restore.holds(block.hash):
            return msgspec.structs.replace(block, state=DecodeBlockState.CREDITED)
        return (
            msgspec.structs.replace(block, state=DecodeBlockState.REJECTED)
            if block.state is DecodeBlockState.CREDITED
            else block
        )


EXTRAS = 256
"""Entries in one ``Extra``."""


class Writer:
    """One for each snapshot."""

    def __init__(self) -> None:
        self.blocks = 0
        """Sent so far."""
        self._told: dict[tuple[Segment, int], tuple[tuple[int, ...], int]] = {}
        """(segment, identity of its hashes) → the hashes, which keeps the identity theirs, and the content's
        number. A segment that changes gets other hashes: then it is sent again, whole."""

    def section(self, capture: Capture, pending: Sequence[DecodeBlock]) -> Iterator[Part]:
        """Yield the parts after ``Begin``, ``End`` included, of a complete capture."""
        for recorded in capture.segments:
            yield from self._segment(recorded)
        entries = 0
        for extra in _extras(capture, pending):
            entries += len(extra.copies) + len(extra.opaque) + len(extra.pending)
            yield extra
        yield End(blocks=capture.blocks, extras=entries)

    def _segment(self, recorded: Recorded) -> Iterator[Part]:
        told = self._told.get((recorded.segment, id(recorded.hashes)))
        if told is None:
            content = self._content(recorded, len(self._told) + 1)
            self._told[recorded.segment, id(recorded.hashes)] = told = recorded.hashes, content.number
            self.blocks += len(recorded.hashes)
            yield content
        names = None if recorded.names is None else recorded.names[: recorded.reach]
        yield Holding(
            content=told[1],
            reach=recorded.reach,
            media=recorded.media,
            names=None if names is None else tuple(name or 0 for name in names),
        )

    def _content(self, recorded: Recorded, number: int) -> Content:
        parent, tree = recorded.parent, recorded.segment.tree
        return Content(
            number=number,
            parent=0 if parent is None else self._told[parent.segment, id(parent.hashes)][1],
            at=-1 if parent is None else recorded.at,
            root=tree.key,
            block_size=tree.block_size,
            hashes=recorded.hashes,
            sizes=tuple(recorded.sizes[: len(recorded.hashes)]),
            text=recorded.text,
        )


def _extras(capture: Capture, pending: Sequence[DecodeBlock]) -> Iterator[Extra]:
    copies, opaque = capture.copies, capture.opaque
    for at in range(0, len(copies), EXTRAS):
        yield Extra(copies=tuple(copies[at : at + EXTRAS]))
    for at in range(0, len(opaque), EXTRAS):
        yield Extra(opaque=tuple(opaque[at : at + EXTRAS]))
    for at in range(0, len(pending), EXTRAS):
        yield Extra(pending=tuple(pending[at : at + EXTRAS]))
    for window in capture.windows:
        yield Extra(windows=(window,))


class Books(Protocol):
    """The part of the ingestor that a reader uses."""

    def restore(self, source: str, group: int | None) -> Section:
        """Forgets the publisher and takes its section in."""

    def forget(self, source: str) -> None:
        """Nothing the publisher said holds any more."""


class Reader:
    """One for each snapshot."""

    def __init__(
        self, books: Books, wanted: Callable[[str], bool], complete: Callable[[Begin], None]
    ) -> None:
        """``wanted``: returns whether a publisher's section is still of use; called again while it is read.
        ``complete``: called with each section that has been read whole."""
        self.blocks = 0
        """Distinct blocks sent."""
        self._books = books
        self._wanted = wanted
        self._complete = complete
        self._contents: dict[int, Content] = {}
        self._begin: Begin | None = None
        self._section: Section | None = None
        """None while ``_begin`` is there: not wanted, what is sent of it is ignored."""

    def feed(self, part: Part) -> Iterator[None]:
        """Takes in one part; yields where something else may run. Raises SnapshotError, after ``close``."""
        try:
            yield from self._take(part)
        except SnapshotError:
            self.close()
            raise

    def close(self) -> None:
        """End the snapshot: a publisher whose section is incomplete is removed."""
        if self._section is not None:
            self._give_up()
        self._begin = None

    def _take(self, part: Part) -> Iterator[None]:
        if isinstance(part, Content):
            self._content(part)
        elif isinstance(part, Begin):
            self._open(part)
        elif self._begin is None:
            raise SnapshotError("blocks were sent outside of a section")
        elif self._useful():
            yield from self._apply(part)
        elif isinstance(part, End):
            self._begin = None

    def _apply(self, part: Holding | Extra | End) -> Iterator[None]:
        section, begin = self._section, self._begin
        assert section is not None
        assert begin is not None
        if isinstance(part, Holding):
            section.hold(self._known(part.content), part)
        elif isinstance(part, Extra):
            section.extra(part)
        else:
            yield from section.end(part)
            if self._useful():
                self._complete(begin)
            self._begin = self._section = None

    def _open(self, begin: Begin) -> None:
        if self._begin is not None:
            raise SnapshotError("a section begins before the previous one has ended")
        self._begin = begin
        if self._wanted(begin.publisher):
            self._section = self._books.restore(begin.publisher, begin.group)

    def _useful(self) -> bool:
        """Whether the section at hand is taken in; one that is not of use any more is given up."""
        if self._section is None or self._begin is None:
            return False
        if self._section.valid and self._wanted(self._begin.publisher):
            return True
        self._give_up()
        return False

    def _give_up(self) -> None:
        section, self._section = self._section, None
        if section is not None and section.valid and self._begin is not None:
            self._books.forget(self._begin.publisher)

    def _known(self, number: int) -> Content:
        if number not in self._contents:
            raise SnapshotError("a message refers to a content that was not sent")
        return self._contents[number]

    def _content(self, content: Content) -> None:
        length = len(content.hashes)
        if content.number != len(self._contents) + 1 or not 0 < length <= SEGMENT_BLOCKS:
            raise SnapshotError("a content is out of order, empty or too long")
        if len(content.sizes) != length or sum(content.sizes) != len(content.text):
            raise SnapshotError("the length of a content's text differs from that of its blocks")
        if content.parent:
            self._check_parent(content, self._known(content.parent))
        elif content.at != -1 or content.block_size < 1:
            raise SnapshotError("a content without a parent has an invalid position or block size")
        self._contents[content.number] = content
        self.blocks += length

    def _check_parent(self, content: Content, parent: Content) -> None:
        if not 0 <= content.at < len(parent.hashes):
            raise SnapshotError("the parent block of a content does not exist")
        if (content.root, content.block_size) != (parent.root, parent.block_size):
            raise SnapshotError("a content and its parent differ in root or block size")
