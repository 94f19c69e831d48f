"""Gives our index to replicas that start, in slices between picks, over the ``Call`` seam. No transport.

Publisher by publisher: its events wait while its segments are recorded, a few milliseconds, and go on while
they are packed and sent. The reader allows for chunks one by one, so that a slow one costs no memory.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from kvist_epp.errors import ProtocolError
from kvist_epp.http2.call import Sink
from kvist_epp.index.snapshot.parts import Begin
from kvist_epp.index.snapshot.write import Writer
from kvist_epp.kvevents.feed import Feed
from kvist_epp.kvevents.ingestion import Learner
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.replicas.chunks import Packer
from kvist_epp.replicas.replication_stats import Tally
from kvist_epp.replicas.updates import Hello, Want, decode_want

MOST: Final = 4
"""Snapshots given at once."""
CREDIT: Final = 64
"""Chunks a reader may allow for in advance: about 10 MB."""

_INVALID_ARGUMENT: Final = 3
_RESOURCE_EXHAUSTED: Final = 8
_FAILED_PRECONDITION: Final = 9

Chunks = Generator[bytes | None, None, None]
"""Chunks, None where something else may run, and …"""
_WAIT: Final = b"wait"
"""… where something else must."""
_LAST: Final = b"last"
"""No chunk: there are no more."""


@dataclass(slots=True, eq=False)
class Giver:
    """Starts a ``Giving`` for each reader."""

    hello: Callable[[], Hello]
    learner: Learner
    subscriber: Subscriber
    believed: Callable[[str], bool]
    """Whether we believe what we know of an endpoint, by its key."""
    tally: Tally
    givings: "set[Giving]" = field(default_factory=set)

    def start(self, sink: Sink) -> "Giving":
        """A reader calls: the ``Method``."""
        return Giving(self, sink)

    def why_not(self, reader: Hello) -> tuple[int, str]:
        """(status, reason) for which this reader gets nothing; (0, "") when it does."""
        own = self.hello()
        if (reader.version, reader.fingerprint) != (own.version, own.fingerprint):
            return _FAILED_PRECONDITION, "another version, model or tokenizer"
        if not own.warm:
            return _FAILED_PRECONDITION, "not warm"
        return (_RESOURCE_EXHAUSTED, "too many readers") if len(self.givings) >= MOST else (0, "")


class Giving:
    """One reader: a ``Call``, and a job of the pump."""

    __slots__ = ("_begun", "_chunks", "_credit", "_giver", "_sink")

    def __init__(self, giver: Giver, sink: Sink) -> None:
        self._giver = giver
        self._sink = sink
        self._credit = 0
        self._begun = False
        self._chunks: Chunks | None = None

    def message(self, data: bytes) -> None:
        """What it wants, then more chunks."""
        try:
            want = decode_want(data)
            if not self._begun:
                self._begin(want)
        except ProtocolError as error:
            self._close(_INVALID_ARGUMENT, str(error))
        else:
            self._credit = min(self._credit + want.chunks, CREDIT)
            self._go_on()

    def half_closed(self) -> None:
        """It has all it wants."""
        self._close()

    def cancelled(self) -> None:
        """It has gone."""
        self._stop()

    def work(self, deadline: float) -> bool:
        """Packs and sends until ``deadline`` or until nothing more is allowed for."""
        chunks = self._chunks
        while chunks is not None and self._credit and perf_counter() < deadline:
            chunk = next(chunks, _LAST)
            if chunk == _LAST:
                self._stop()  # the reader ends the call: it may be about to ask for more
                return False
            if chunk == _WAIT:
                return True
            if chunk is not None:
                self._send(chunk)
        return chunks is not None and self._credit > 0

    def _begin(self, want: Want) -> None:
        if want.hello is None:
            raise ProtocolError("a reader that does not say who it is")
        status, why = self._giver.why_not(want.hello)
        if why:
            self._close(status, why)
            return
        self._begun = True
        self._giver.givings.add(self)
        self._chunks = self._all(want.publishers)

    def _go_on(self) -> None:
        if self._chunks is not None and self._credit:
            self._giver.subscriber.pump.ready(self)

    def _send(self, chunk: bytes) -> None:
        self._credit -= 1
        self._giver.tally.sent(len(chunk))
        self._sink.send(chunk)

    def _all(self, publishers: tuple[str, ...]) -> Chunks:
        writer, packer = Writer(), Packer()
        for source in publishers:
            feed = self._giver.subscriber.feed(source)
            if feed is not None and self._giver.believed(feed.endpoint):
                yield from self._publisher(source, feed, writer, packer)
        self._giver.tally.snapshots["given"] += 1
        yield packer.last()

    def _publisher(self, source: str, feed: Feed, writer: Writer, packer: Packer) -> Chunks:
        feed.pause()
        try:
            while not feed.intake.between and self._giver.subscriber.feed(source) is feed:
                yield _WAIT
            position, captured = feed.intake.position, self._giver.learner.capture(source)
            for _ in captured.capture.steps():
                yield None
        finally:
            feed.go_on()
        if position is not None and captured.capture.valid:
            yield packer.add(Begin(source, position.next, position.mark, captured.group))
            for part in writer.section(captured.capture, captured.pending):
                yield packer.add(part)

    def _close(self, status: int = 0, why: str = "") -> None:
        self._stop()
        self._sink.close(status, why)

    def _stop(self) -> None:
        chunks, self._chunks = self._chunks, None
        self._giver.givings.discard(self)
        self._giver.subscriber.pump.drop(self)
        if chunks is not None:
            chunks.close()
