"""Credits blocks born in decode: off the hot path, in slices, each after a check against the tokenizer.

The subscriber calls ``step`` between other work, on the event loop: the tokenizer holds the interpreter's
lock while it encodes, so that a thread would only make stalls longer. Blocks that gather while the checker
waits for its turn are checked in one window, so that the cost of a block falls as the load grows.
"""

from collections import deque
from collections.abc import Sequence

from kvist_epp.index.byte_index import Index
from kvist_epp.kvevents.canonical import CanonicalBlocks, Encode, Piece, examine
from kvist_epp.kvevents.decode_blocks import DecodeBlock, DecodeBlockState, DecodeBlockTable
from kvist_epp.kvevents.publisher_stats import PublisherStats

TAIL_BYTES = 64
"""Text before a block in the first look; tokens settle within a word or two."""
LONG_TAIL_BYTES = 1024
"""Text in the second look, before anything is rejected: long words, long runs of spaces."""
RUN_BYTES = 512
"""Text of the blocks in one window: bounds how long one call of the tokenizer takes (about 1 us a byte)."""


class PublisherState:
    """A publisher under care: its number in the index, its blocks that are not credited, its counters."""

    __slots__ = ("number", "pending", "stats")

    def __init__(self, number: int, stats: PublisherStats) -> None:
        self.number = number
        self.pending = DecodeBlockTable()
        self.stats = stats


class DecodeChecker:
    """Owns the queue of blocks to check; ``encode`` None: nothing can be checked, nothing is credited.

    ``limit``: blocks that may wait; more are not credited.
    """

    def __init__(
        self, index: Index, pieces: Sequence[bytes | None], encode: Encode | None, limit: int = 65_536
    ) -> None:
        self._index = index
        self._pieces = pieces
        self._encode = encode
        self._limit = limit
        self._queue: deque[tuple[PublisherState, DecodeBlock]] = deque()

    def __len__(self) -> int:
        """Blocks that wait for their check."""
        return len(self._queue)

    def add(self, ward: PublisherState, born: DecodeBlock) -> None:
        """Takes in a block, known by its hash from now on; a block stored again is one copy more."""
        known = ward.pending.uncredited(born.name)
        if known is not None:
            known.copies += 1
            return
        ward.pending.add(born)
        parent = ward.pending.uncredited(born.parent)
        if (
            (parent is not None and parent.state is DecodeBlockState.REJECTED)
            or self._encode is None
            or len(self._queue) >= self._limit
        ):
            self._reject(ward, born)
        else:
            self._queue.append((ward, born))

    def adopt(self, ward: PublisherState, born: DecodeBlock) -> None:
        """Takes over a block from a peer's snapshot, as far as it got there."""
        ward.pending.add(born)
        if born.state is not DecodeBlockState.PENDING:
            return
        if self._encode is None or len(self._queue) >= self._limit:
            self._reject(ward, born)
        else:
            self._queue.append((ward, born))

    def prove(self, ward: PublisherState, born: DecodeBlock) -> bool:
        """An engine's own prompt matched this block: it and what it follows are canonical."""
        for block in reversed([born, *ward.pending.above(born)]):
            if not self._credit(ward, block):
                return False
            ward.pending.drop(block)
        return True

    def step(self) -> bool:
        """Checks one run of blocks, 0.1 to 0.5 ms; returns whether more wait."""
        encode = self._encode
        while encode and self._queue:
            ward, born = self._queue.popleft()
            if born.state is DecodeBlockState.PENDING and ward.pending.get(born.name) is born:
                self._check_around(ward, born, encode)
                break
        return bool(self._queue)

    def _check_around(self, ward: PublisherState, born: DecodeBlock, encode: Encode) -> None:
        run = ward.pending.run(born, RUN_BYTES)
        self._check(ward, run, encode)
        if born not in run:
            self._queue.append((ward, born))

    def _check(self, ward: PublisherState, run: list[DecodeBlock], encode: Encode) -> None:
        parent = run[0].parent
        above = ward.pending.get(parent)
        if parent is not None and self._index.depth(parent, ward.number) is None:
            self._reject_all(ward, run)
            return
        guard = [] if above is None else [above]
        finding = self._examine(ward, [*guard, *run], encode)
        if guard and finding.canonical == 0:
            self._refuse(ward, guard[0], run, finding)
            return
        self._settle(ward, run, CanonicalBlocks(finding.canonical - len(guard), finding.waiting))

    def _examine(self, ward: PublisherState, blocks: list[DecodeBlock], encode: Encode) -> CanonicalBlocks:
        """With a short tail; with a long one before anything is rejected."""
        pieces = [block.piece for block in blocks]
        finding = CanonicalBlocks(0, 0)
        for limit in (TAIL_BYTES, LONG_TAIL_BYTES):
            tail = self._tail(ward, blocks[0].parent, limit)
            finding = examine(tail, pieces, encode, self._pieces)
            if finding.canonical + finding.waiting == len(pieces) or len(tail) < limit:
                break
        return finding

    def _tail(self, ward: PublisherState, parent: int | None, limit: int) -> bytes:
        return b"" if parent is None else self._index.tail(parent, limit, ward.number) or b""

    def _settle(self, ward: PublisherState, run: list[DecodeBlock], finding: CanonicalBlocks) -> None:
        for position, born in enumerate(run):
            if position < finding.canonical:
                self._credit(ward, born)
            elif position < len(run) - finding.waiting:
                self._reject(ward, born)

    def _refuse(
        self, ward: PublisherState, guard: DecodeBlock, run: list[DecodeBlock], finding: CanonicalBlocks
    ) -> None:
        """The text that came shows that the boundary before it is not canonical: the credit is taken back."""
        if finding.waiting:
            return
        gone = 0
        while self._index.removed(ward.number, [guard.name]):
            gone += 1
        guard.copies = max(1, gone)
        ward.stats.revoked += 1
        self._reject(ward, guard)
        self._reject_all(ward, run)

    def _reject_all(self, ward: PublisherState, run: list[DecodeBlock]) -> None:
        for born in run:
            self._reject(ward, born)

    def _reject(self, ward: PublisherState, born: DecodeBlock) -> None:
        born.state = DecodeBlockState.REJECTED
        born.piece = Piece((), born.piece.data)
        ward.stats.uncredited += 1

    def _credit(self, ward: PublisherState, born: DecodeBlock) -> bool:
        """Into the index, as often as it was stored; False when its parent is gone."""
        for _ in range(born.copies):
            if not self._index.stored(
                ward.number,
                born.root,
                born.parent,
                [born.name],
                [born.piece.data],
                block_size=born.block_size,
            ):
                self._reject(ward, born)
                return False
        for medium in born.media:
            self._index.held(ward.number, [born.name], medium)
        ward.stats.credited += 1
        born.state = DecodeBlockState.CREDITED
        above = ward.pending.get(born.parent)
        if above is not None:
            ward.pending.drop(above)
        return True
