"""Marks of media in the bytes of blocks and prompts. Pure.

Engines put as many placeholder tokens into a prompt as a picture, a sound or a video takes, and the hash of
its content into the hashes of the blocks. In the index a mark with that identity precedes the first of these
tokens, so that blocks with media are compared by their bytes as all others are: equal bytes are equal media
at equal places. Prompts get the same bytes once the identity of a medium is known (``prompt.media_texts``).

Marks begin with a byte that is in no UTF-8, and that pieces of a vocabulary do not have (``prompt.vocab``):
neither texts nor token ids of clients can spell one.
"""

import hashlib
from typing import Final

ITEM: Final = b"\xff[i]"
"""Begins the mark before the first token of a medium; 16 digits of its identity follow."""
UNKNOWN: Final = b"\xff[u]"
"""Begins the mark of a medium of which only the request tells; 16 digits follow."""
TOKEN: Final = b"\xff[t]"
"""Stands for one placeholder token: 4 bytes, as many as a token of text has on average."""
DIGITS: Final = 16
"""Characters after ``ITEM`` or ``UNKNOWN``."""
MARK_SIZE: Final = len(ITEM) + DIGITS
"""Bytes of a whole mark."""


def item_mark(identifier: str) -> bytes:
    """Return the mark of a medium that engines know by this identifier, any text."""
    digest = hashlib.blake2b(identifier.encode(errors="surrogatepass"), digest_size=DIGITS // 2)
    return ITEM + digest.hexdigest().encode()


def after_media(text: bytes) -> bytes:
    """Return what follows the last medium in a piece of a block chain's text."""
    text = text.rpartition(TOKEN)[2]
    _, mark, rest = text.rpartition(ITEM)
    return rest[DIGITS:] if mark else rest
