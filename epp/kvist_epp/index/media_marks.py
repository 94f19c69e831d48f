"""Marks of media in the bytes of blocks and prompts: characters of a private use area. Pure.

Engines put as many placeholder tokens into a prompt as a picture, a sound or a video takes, and the hash of
its content into the hashes of the blocks. In the index a mark with that identity precedes the first of these
tokens, so that blocks with media are compared by their bytes as all others are: equal bytes are equal media
at equal places. Prompts get the same bytes once the identity of a medium is known (``prompt.media_texts``).

Texts of clients never contain these characters: they are replaced (``without_marks``).
"""

import hashlib
from typing import Final

_ITEM, _UNKNOWN, _TOKEN = "\U000f4b56", "\U000f4b57", "\U000f4b58"

ITEM: Final = _ITEM.encode()
"""Begins the mark before the first token of a medium; 16 digits of its identity follow."""
UNKNOWN: Final = _UNKNOWN.encode()
"""Begins the mark of a medium of which only the request tells; 16 characters follow."""
TOKEN: Final = _TOKEN.encode()
"""Stands for one placeholder token: 4 bytes, as many as a token of text has on average."""
DIGITS: Final = 16
"""Characters after ``ITEM`` or ``UNKNOWN``."""
MARK_SIZE: Final = len(ITEM) + DIGITS
"""Bytes of a whole mark."""


def item_mark(identifier: str) -> bytes:
    """Return the mark of a medium that engines know by this identifier, any text."""
    return (
        ITEM + hashlib.blake2b(identifier.encode(errors="surrogatepass"), digest_size=8).hexdigest().encode()
    )


def without_marks(text: str) -> str:
    """Return a text of a client with U+FFFD in place of the characters of marks."""
    for mark in (_ITEM, _UNKNOWN, _TOKEN):
        if mark in text:  # at once where a text has no characters beyond U+FFFF
            text = text.replace(mark, "\ufffd")
    return text


def after_media(text: bytes) -> bytes:
    """Return what follows the last medium in a piece of a block chain's text."""
    text = text.rpartition(TOKEN)[2]
    _, mark, rest = text.rpartition(ITEM)
    return rest[DIGITS:] if mark else rest
