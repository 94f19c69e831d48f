"""Check and credit blocks computed in decode, against the tokenizer. Pure.

A model may generate tokens that are not the canonical tokenisation of the text they spell. A later prompt
with that text is tokenised canonically and does not hit such blocks, although their bytes are equal.
Nearly all blocks are known to be canonical, as their words were seen before (``Chunks``), and are credited at
once. For the others a short window of text is tokenised again and compared, off the hot path and in slices,
which takes about 60 us for 200 bytes.

The window begins some text before the blocks, because how a token splits depends on what precedes it, and
ends with the blocks that follow, because it depends on that, too: " hel" is a token of its own only while
"lo" has not come. Blocks that end inside a character, or differ only in their last tokens, wait for more
text.

The check runs on the event loop: the tokenizer holds the interpreter's lock while it encodes, so that a
thread would only make stalls longer. Blocks that gather while the check waits for its turn are checked in one
window, so that the cost of a block falls as the load grows.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, count
from operator import ne
from typing import Protocol, TypeAlias

from kvist_epp.index.byte_index import GPU, Index
from kvist_epp.index.media_marks import after_media
from kvist_epp.kvevents.decode_blocks import BlockTokens, DecodeBlock, DecodeBlockState
from kvist_epp.kvevents.publisher_state import PublisherState

Encode: TypeAlias = Callable[[str], list[int]]

SETTLING_TOKENS = 4
"""A difference this close to the end of the text may vanish when the text continues: wait, do not reject."""
TAIL_BYTES = 64
"""Text before a block in the first check; tokens settle within a word or two."""
LONG_TAIL_BYTES = 1024
"""Text in the second check, before anything is rejected: long words, long runs of spaces."""
RUN_BYTES = 512
"""Text of the blocks in one window: bounds the time of one call of the tokenizer (about 1 us a byte)."""


class Chunks(Protocol):
    """The part of ``prompt.canonical_chunks.CanonicalChunks`` that the checker uses."""

    def canonical(self, ids: Sequence[int], *, behind: bytes, before: Sequence[int] = ()) -> bool:
        """Return whether tokens are known to be canonical behind a text, of which ``before`` are the last."""


@dataclass(frozen=True, slots=True)
class CanonicalBlocks:
    """Number of leading blocks that are canonical, and of trailing ones that cannot be judged yet."""

    canonical: int
    waiting: int


def find_canonical(
    tail: bytes, blocks: Sequence[BlockTokens], encode: Encode, pieces: Sequence[bytes | None]
) -> CanonicalBlocks:
    """Compare ``blocks`` with the tokenisation of their text after ``tail``.

    ``tail`` is the text that precedes, cut anywhere; ``pieces`` are the bytes of each token id.
    """
    start = 0
    while start < min(4, len(tail)) and tail[start] & 0xC0 == 0x80:
        start += 1  # a continuation byte of a character that was cut
    tail = tail[start:]
    text = tail + b"".join(block.data for block in blocks)
    valid, cut_short = _valid_prefix(text)
    canonical_ids = encode(text[:valid].decode())
    first = _token_at(canonical_ids, len(tail), pieces)
    ids = list(chain.from_iterable(block.ids for block in blocks))
    theirs = [] if first is None else canonical_ids[first:]
    agreed = next(compress(count(), map(ne, ids, theirs)), min(len(ids), len(theirs)))
    text_ends = list(accumulate(len(block.data) for block in blocks))
    id_ends = list(accumulate(len(block.ids) for block in blocks))
    readable = sum(len(tail) + end <= valid for end in text_ends)
    canonical = sum(end <= agreed for end in id_ends[:readable])
    if canonical == readable:
        return CanonicalBlocks(canonical, len(blocks) - readable if cut_short else 0)
    unsettled = first is not None and canonical == len(blocks) - 1 and agreed >= id_ends[-1] - SETTLING_TOKENS
    return CanonicalBlocks(canonical, int(unsettled))


def _valid_prefix(text: bytes) -> tuple[int, bool]:
    """Return the number of leading bytes that are UTF-8, and whether the rest is one unfinished character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start, error.reason == "unexpected end of data"
    return len(text), True


def _token_at(ids: Sequence[int], offset: int, pieces: Sequence[bytes | None]) -> int | None:
    """Return the index of the token that begins at this byte; None if a token spans it."""
    at = 0
    for index, token in enumerate(ids):
        if at >= offset:
            return index if at == offset else None
        at += len(pieces[token] or b"")
    return len(ids) if at == offset else None


class DecodeChecker:
    """Queue of blocks to check; the subscriber calls ``step`` between other work.

    Without ``encode`` no block can be checked, and none is credited; without ``chunks`` all wait for their
    check. At most ``limit`` blocks wait; any more are not credited.
    """

    def __init__(
        self,
        index: Index,
        pieces: Sequence[bytes | None],
        encode: Encode | None,
        chunks: Chunks | None = None,
        limit: int = 65_536,
    ) -> None:
        self._index = index
        self._pieces = pieces
        self._encode = encode
        self._chunks = chunks
        self._limit = limit
        self._queue: deque[tuple[PublisherState, DecodeBlock]] = deque()

    def __len__(self) -> int:
        """Return the number of blocks that wait for their check."""
        return len(self._queue)

    def add(self, publisher: PublisherState, block: DecodeBlock) -> None:
        """Add a block to the publisher's table, and credit it at once or check it later; a known block has
        one copy more."""
        known = publisher.decode_blocks.uncredited(block.hash)
        if known is not None:
            known.copies += 1
            return
        publisher.decode_blocks.add(block)
        if not self._credit_known(publisher, [block]):
            parent = publisher.decode_blocks.uncredited(block.parent)
            rejected = parent is not None and parent.state is DecodeBlockState.REJECTED
            self._enqueue(publisher, block, reject=rejected)

    def append(self, publisher: PublisherState, parent: DecodeBlock, block: DecodeBlock) -> bool:
        """Credit a block that is known to be canonical behind its credited parent, if the index has but to
        append it, and set its depth. Returns False, and changes nothing, otherwise: ``add`` does all else."""
        table = publisher.decode_blocks
        unusual = parent.state is not DecodeBlockState.CREDITED or table.get(block.hash) is not None
        if unusual or not self._is_known(publisher, block):
            return False
        block.depth = self._index.append(
            publisher.number, parent.hash, block.hash, block.tokens.data, block_size=block.block_size
        )
        if block.depth is None:
            return False
        table.add(block)
        self._on_credited(publisher, block)
        return True

    def adopt(self, publisher: PublisherState, block: DecodeBlock) -> None:
        """Add a block from another replica's snapshot, in the state it has there."""
        publisher.decode_blocks.add(block)
        if block.state is DecodeBlockState.PENDING:
            self._enqueue(publisher, block)

    def prove(self, publisher: PublisherState, block: DecodeBlock) -> bool:
        """Credit a block and its ancestors, since an engine's own prompt matched it.

        Returns False if the index no longer has their parent.
        """
        for ancestor in reversed([block, *publisher.decode_blocks.ancestors(block)]):
            if not self._credit(publisher, ancestor):
                return False
            if publisher.decode_blocks.get(ancestor.hash) is ancestor:  # it is not its own ancestor
                publisher.decode_blocks.remove(ancestor)
        return True

    def step(self) -> bool:
        """Check one chain of blocks, which takes 0.1 to 0.5 ms; return whether more wait."""
        encode = self._encode
        while encode and self._queue:
            publisher, block = self._queue.popleft()
            pending = block.state is DecodeBlockState.PENDING
            if pending and publisher.decode_blocks.get(block.hash) is block:
                chain = publisher.decode_blocks.pending_chain(block, RUN_BYTES)
                known = self._credit_known(publisher, chain)
                judged = chain[known : known + self._settled(publisher, chain[known:])]
                if judged:
                    self._check(publisher, judged, encode)
                waits_for_text = judged[:1] and judged[0].state is DecodeBlockState.PENDING
                if block not in chain[: known + len(judged)] and not waits_for_text:
                    self._queue.append((publisher, block))
                break
        return bool(self._queue)

    def _credit_known(self, publisher: PublisherState, chain: list[DecodeBlock]) -> int:
        """Credit the leading blocks that are known to be canonical; return their number."""
        credited = 0
        if publisher.decode_blocks.uncredited(chain[0].parent):
            return 0
        while credited < len(chain) and self._is_known(publisher, chain[credited]):
            self._credit(publisher, chain[credited])
            credited += 1
        return credited

    def _is_known(self, publisher: PublisherState, block: DecodeBlock) -> bool:
        """Return whether a block is known to be canonical behind its parent, if that is."""
        if self._chunks is None:
            return False
        ids, parent = block.tokens.ids, publisher.decode_blocks.get(block.parent)
        if parent is not None:
            if parent.state is DecodeBlockState.REJECTED:
                return False
            return self._chunks.canonical(ids, behind=parent.tokens.data, before=parent.tokens.ids)
        tail = None
        if block.parent is not None:
            tail = self._index.tail(block.parent, TAIL_BYTES, publisher.number)
        return self._chunks.canonical(ids, behind=after_media(tail or b""))

    def _settled(self, publisher: PublisherState, chain: list[DecodeBlock]) -> int:
        """Return how many blocks to check: up to the first one that is known, which settles those before."""
        known = (at for at, block in enumerate(chain, 1) if at > 1 and self._is_known(publisher, block))
        return next(known, len(chain))

    def _enqueue(self, publisher: PublisherState, block: DecodeBlock, *, reject: bool = False) -> None:
        if reject or self._encode is None or len(self._queue) >= self._limit:
            self._reject(publisher, [block])
        else:
            self._queue.append((publisher, block))

    def _check(self, publisher: PublisherState, chain: list[DecodeBlock], encode: Encode) -> None:
        parent = chain[0].parent
        if parent is not None and self._index.depth(parent, publisher.number) is None:
            self._reject(publisher, chain)
            return
        credited = publisher.decode_blocks.get(parent)
        boundary = [] if credited is None else [credited]
        result = self._examine(publisher, [*boundary, *chain], encode)
        if credited is not None and result.canonical == 0:
            if not result.waiting:
                self._revoke(publisher, credited, chain)
            return
        canonical = result.canonical - len(boundary)
        for position, block in enumerate(chain):
            if position < canonical:
                self._credit(publisher, block)
            elif position < len(chain) - result.waiting:
                self._reject(publisher, [block])

    def _examine(
        self, publisher: PublisherState, blocks: list[DecodeBlock], encode: Encode
    ) -> CanonicalBlocks:
        """Check with a short tail, and with a long one before anything is rejected."""
        tokens, parent = [block.tokens for block in blocks], blocks[0].parent
        result = CanonicalBlocks(0, 0)
        for limit in (TAIL_BYTES, LONG_TAIL_BYTES):
            tail = b"" if parent is None else self._index.tail(parent, limit, publisher.number) or b""
            result = find_canonical(after_media(tail), tokens, encode, self._pieces)
            if result.canonical + result.waiting == len(tokens) or len(tail) < limit:
                break
        return result

    def _revoke(self, publisher: PublisherState, credited: DecodeBlock, chain: list[DecodeBlock]) -> None:
        """Remove a credited block: the text that followed shows that its last boundary is not canonical."""
        credited.copies, credited.media = 0, []
        while self._index.removed(publisher.number, [credited.hash]):
            credited.copies += 1
        for medium in self._index.blocks(publisher.number):
            while self._index.removed(publisher.number, [credited.hash], medium=medium):
                credited.media.append(medium)
        publisher.stats.revoked += 1
        self._reject(publisher, [credited, *chain])

    def _reject(self, publisher: PublisherState, blocks: Sequence[DecodeBlock]) -> None:
        for block in blocks:
            block.state = DecodeBlockState.REJECTED
            block.tokens = BlockTokens((), block.tokens.data)
        publisher.stats.uncredited += len(blocks)

    def _credit(self, publisher: PublisherState, block: DecodeBlock) -> bool:
        """Add a block to the index, as often as it was stored; return False if its parent is gone."""
        for medium in [GPU] * block.copies + block.media:
            if not self._index.stored(
                publisher.number,
                block.root,
                block.parent,
                [block.hash],
                [block.tokens.data],
                block_size=block.block_size,
                medium=medium,
            ):
                self._reject(publisher, [block])
                return False
        self._on_credited(publisher, block)
        return True

    def _on_credited(self, publisher: PublisherState, block: DecodeBlock) -> None:
        """Note that the index has a block, which shows that its parent's end is canonical."""
        publisher.stats.credited += 1
        block.state = DecodeBlockState.CREDITED
        parent = publisher.decode_blocks.get(block.parent)
        if parent is not None:
            publisher.decode_blocks.remove(parent)
