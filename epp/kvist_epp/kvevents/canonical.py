"""Whether blocks born in decode are what the tokenizer would make of their text.

A model may generate tokens that are not the canonical tokenisation of the text they spell. A later prompt
with that text is tokenised canonically, so it does not hit such blocks, though their bytes are equal. Here a
short window of text is tokenised again and compared; pure, and cheap (about 60 us for 300 bytes).

The window begins some text before the blocks, because how a token splits depends on what precedes it, and
ends with the blocks that follow, because it depends on that too: " hel" is a token of its own only while "lo"
has not come. A run that ends inside a character, or disagrees only in its last tokens, waits for more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

Encode: TypeAlias = Callable[[str], list[int]]

SETTLING_TOKENS = 4
"""A difference this near the end of the text may be gone when the text goes on: wait, do not reject."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One block: its token ids and the bytes they spell."""

    ids: Sequence[int]
    data: bytes


@dataclass(frozen=True, slots=True)
class CanonicalBlocks:
    """Number of leading blocks that are canonical, and of trailing ones that cannot be judged yet."""

    canonical: int
    waiting: int


def examine(
    tail: bytes, blocks: Sequence[Piece], encode: Encode, pieces: Sequence[bytes | None]
) -> CanonicalBlocks:
    """Compares ``blocks`` with the tokenisation of their text after ``tail``.

    ``tail``: the text that precedes, cut anywhere; ``pieces``: the bytes of each token id.
    """
    tail = _from_boundary(tail)
    text = tail + b"".join(block.data for block in blocks)
    valid, cut_short = _valid_prefix(text)
    again = encode(text[:valid].decode())
    start = _token_at(again, len(tail), pieces)
    agreed = 0 if start is None else _agreement(again[start:], [i for block in blocks for i in block.ids])
    ends = list(accumulate(len(block.data) for block in blocks))
    ids = list(accumulate(len(block.ids) for block in blocks))
    readable = sum(len(tail) + end <= valid for end in ends)
    canonical = sum(count <= agreed for count in ids[:readable])
    if canonical == readable:
        return CanonicalBlocks(canonical, len(blocks) - readable if cut_short else 0)
    unsettled = start is not None and canonical == len(blocks) - 1 and agreed >= ids[-1] - SETTLING_TOKENS
    return CanonicalBlocks(canonical, int(unsettled))


def _from_boundary(tail: bytes) -> bytes:
    """Without the continuation bytes of a character that was cut."""
    start = 0
    while start < min(4, len(tail)) and tail[start] & 0xC0 == 0x80:
        start += 1
    return tail[start:]


def _valid_prefix(text: bytes) -> tuple[int, bool]:
    """(bytes that are UTF-8, whether all that follows is one character not finished yet)."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start, error.reason == "unexpected end of data"
    return len(text), True


def _token_at(ids: Sequence[int], offset: int, pieces: Sequence[bytes | None]) -> int | None:
    """Index of the token that begins at this byte; None when a token spans it."""
    at = 0
    for index, token in enumerate(ids):
        if at >= offset:
            return index if at == offset else None
        at += len(pieces[token] or b"")
    return len(ids) if at == offset else None


def _agreement(again: Sequence[int], ids: Sequence[int]) -> int:
    """Return how many leading ids are equal."""
    agreed = 0
    for ours, theirs in zip(ids, again, strict=False):
        if ours != theirs:
            break
        agreed += 1
    return agreed
