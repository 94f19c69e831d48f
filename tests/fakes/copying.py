"""Indexes copied by snapshot, without a connection: what one writes, another reads."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvist_epp.index.byte_index import Index
from kvist_epp.index.snapshot.parts import Begin, Part
from kvist_epp.index.snapshot.sections import Reader, Section, Writer
from kvist_epp.kvevents.decode_check import DecodeChecker
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.publisher_state import PublisherState


class Shelf:
    """An index as a reader sees it: publishers by name."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._checker = DecodeChecker(index, [], None)

    def restore(self, source: str, group: int | None) -> Section:
        """Return a section of the snapshot, made as the ingestor makes it."""
        number = self.index.publisher(source)
        return Section(self.index.restore(number), PublisherState(source, number), self._checker)

    def forget(self, source: str) -> None:
        """Forget a publisher as the ingestor does."""
        self.index.forget(self.index.publisher(source))


def told(index: Index, names: Iterable[str]) -> Iterator[Part]:
    """The snapshot of these publishers."""
    writer = Writer()
    for at, name in enumerate(names):
        capture = index.capture(index.publisher(name))
        for _ in capture.steps():
            pass
        yield Begin(publisher=name, next=at, mark=b"", group=None)
        yield from writer.section(capture, ())


def heard(
    index: Index | Ingestor, parts: Iterable[Part], wanted: Callable[[str], bool] = lambda _: True
) -> Sequence[str]:
    """Reads a snapshot into an index, or that of an ingestor; the publishers whose sections were complete."""
    complete: list[str] = []
    restored = Shelf(index) if isinstance(index, Index) else index
    reader = Reader(restored, wanted, lambda begin: complete.append(begin.publisher))
    for part in parts:
        for _ in reader.feed(part):
            pass
    reader.close()
    return complete


def copied(index: Index, names: Sequence[str]) -> Index:
    """Another index of the same publishers, with the same numbers."""
    copy = Index()
    for name in names:
        copy.publisher(name)
    assert heard(copy, told(index, names)) == names
    return copy
