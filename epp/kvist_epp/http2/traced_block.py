"""Header blocks that differ in their ``traceparent`` alone: most of them, behind a gateway that traces.

Without its value such a block is the same bytes each time, and means the same. The value is decoded by
itself: Huffman's code of its few characters, as text of bits. Sources: RFC 7541 sections 5.2, 6 and appendix
B; W3C Trace Context.
"""

import re
from typing import Final, NamedTuple

NAME: Final = b"traceparent"
SIZE: Final = 55
"""Characters of a ``traceparent`` of version 00."""

_CODES: Final = {
    "00000": "0",
    "00001": "1",
    "00010": "2",
    "011001": "3",
    "011010": "4",
    "011011": "5",
    "011100": "6",
    "011101": "7",
    "011110": "8",
    "011111": "9",
    "00011": "a",
    "100011": "b",
    "00100": "c",
    "100100": "d",
    "00101": "e",
    "100101": "f",
    "010110": "-",
}
_CODE: Final = re.compile("|".join(_CODES))
_WHOLE: Final = re.compile(f"((?:{_CODE.pattern}){{{SIZE}}})1{{0,7}}")
_PLAIN: Final = re.compile(rb"[0-9a-f-]{%d}" % SIZE)
_NAMES: Final = (b"\x88\x4d\x83\x21\x6b\x1d\x85\xa9\x3f", b"\x0b" + NAME)
"""The name as a literal: with Huffman's code, and plain."""
_HUFFMAN: Final = 0x80
_LONG: Final = 0x7F


class TracedBlock(NamedTuple):
    """A header block, cut in two."""

    at: int
    """Position of the name; one byte before it is the kind of the literal."""
    rest: tuple[bytes, bytes]
    """The block before and behind the value."""
    value: str


def cut(block: bytes) -> TracedBlock | None:
    """Return the parts of a block with a ``traceparent``; None if it has none, or one in an unusual form."""
    for name in _NAMES:
        at = block.find(name, 1)
        if at > 0:
            start = at + len(name) + 1
            head = block[start - 1] if start <= len(block) else _LONG
            stop = start + (head & _LONG)
            if head & _LONG == _LONG or stop > len(block):
                return None
            value = _decoded(block[start:stop]) if head & _HUFFMAN else _plain(block[start:stop])
            return TracedBlock(at, (block[: start - 1], block[stop:]), value) if value else None
    return None


def begins_field(block: bytes, position: int) -> bool:
    """Return whether a header field, and no part of one, begins at this position of a valid block."""
    at = 0
    while at < position:
        first = block[at]
        if first & 0x80:
            _, at = _number(block, at, 7)
        elif first & 0xE0 == 0x20:
            _, at = _number(block, at, 5)
        else:
            index, at = _number(block, at, 6 if first & 0x40 else 4)
            for _ in range(1 if index else 2):
                size, at = _number(block, at, 7)
                at += size
    return at == position


def _decoded(encoded: bytes) -> str:
    bits = f"{int.from_bytes(encoded, 'big'):0{8 * len(encoded)}b}"
    found = _WHOLE.fullmatch(bits)
    return "".join([_CODES[code] for code in _CODE.findall(found[1])]) if found else ""


def _plain(text: bytes) -> str:
    return text.decode() if _PLAIN.fullmatch(text) else ""


def _number(block: bytes, at: int, prefix: int) -> tuple[int, int]:
    """Return an integer (RFC 7541 section 5.1) and the position behind it."""
    most = (1 << prefix) - 1
    number, at = block[at] & most, at + 1
    if number < most:
        return number, at
    shift = 0
    while True:
        number += (block[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not block[at - 1] & 0x80:
            return number, at
