"""Captures into the parts of one snapshot: text that was told already is not told again. Pure."""

from collections.abc import Iterator, Sequence

from kvist_epp.index.snapshot.capture import Capture, Recorded
from kvist_epp.index.snapshot.parts import Content, End, Extra, Holding, Part
from kvist_epp.index.tree.segment import Segment
from kvist_epp.kvevents.decode_blocks import DecodeBlock

EXTRAS = 256
"""Entries in one ``Extra``."""


class Writer:
    """One for each snapshot."""

    def __init__(self) -> None:
        self.blocks = 0
        """Told so far."""
        self._told: dict[tuple[Segment, int], tuple[tuple[int, ...], int]] = {}
        """Segment and identity of its hashes → those, so that the identity stays theirs, and the content's
        number. A segment that changes gets other hashes: then it is told again, whole."""

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
