"""A snapshot's parts, in the order they come, into an ingestor: publisher by publisher, in steps.

Each section is complete in itself, so a snapshot that breaks off, or contradicts itself, leaves the
publishers before that point restored and the one it happened in forgotten.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from kvist_epp.errors import SnapshotError
from kvist_epp.index.snapshot.parts import Begin, Content, End, Extra, Holding, Part
from kvist_epp.index.snapshot.section import Section
from kvist_epp.index.tree.holders import SEGMENT_BLOCKS


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
        """``wanted``: whether a publisher's section is still of use, asked again while it comes in.
        ``complete``: told of each section when all of it is in."""
        self.blocks = 0
        """Distinct blocks told."""
        self._books = books
        self._wanted = wanted
        self._complete = complete
        self._contents: dict[int, Content] = {}
        self._begin: Begin | None = None
        self._section: Section | None = None
        """None while ``_begin`` is there: not wanted, what is told of it is passed over."""

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
            raise SnapshotError("blocks of no publisher")
        elif self._useful():
            yield from self._told(part)
        elif isinstance(part, End):
            self._begin = None

    def _told(self, part: Holding | Extra | End) -> Iterator[None]:
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
            raise SnapshotError("a section begins before the last one has ended")
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
            raise SnapshotError("a holding of a content that was not told")
        return self._contents[number]

    def _content(self, content: Content) -> None:
        length = len(content.hashes)
        if content.number != len(self._contents) + 1 or not 0 < length <= SEGMENT_BLOCKS:
            raise SnapshotError("a content out of order, or of no or too many blocks")
        if len(content.sizes) != length or sum(content.sizes) != len(content.text):
            raise SnapshotError("a content's text is not as long as its blocks")
        if content.parent:
            self._check_parent(content, self._known(content.parent))
        elif content.at != -1 or content.block_size < 1:
            raise SnapshotError("a content that begins nowhere")
        self._contents[content.number] = content
        self.blocks += length

    def _check_parent(self, content: Content, parent: Content) -> None:
        if not 0 <= content.at < len(parent.hashes):
            raise SnapshotError("a content that follows no block")
        if (content.root, content.block_size) != (parent.root, parent.block_size):
            raise SnapshotError("a content of another tree than its parent's")
