"""A vocabulary small enough to reason about: all bytes, and a few words matched greedily, longest first."""

from collections.abc import Sequence

from kvist_epp.index.media_marks import TOKEN
from kvist_epp.kvevents.decode_check import Chunks

WORDS = (b"hello", b" hel", b"lo", b" hello", b"the ", b"\xc3\xa9", b"<|end|>", b"zzz")


class Words:
    """Ids 0-255 are bytes, then ``WORDS``; then one id that does not exist, and a placeholder of pictures."""

    def __init__(self, chunks: Chunks | None = None) -> None:
        self.chunks = chunks
        self.pieces: Sequence[bytes] = [*(bytes([byte]) for byte in range(256)), *WORDS, b"", TOKEN]
        self.picture = len(self.pieces) - 1
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        """Greedy, longest match first."""
        self.encoded.append(text)
        data = text.encode()
        longest = sorted(range(256, 256 + len(WORDS)), key=lambda token: -len(self.pieces[token]))
        ids: list[int] = []
        at = 0
        while at < len(data):
            word = next((token for token in longest if data.startswith(self.pieces[token], at)), data[at])
            ids.append(word)
            at += len(self.pieces[word])
        return ids


def word(text: bytes) -> int:
    """The id of one of ``WORDS``."""
    return 256 + WORDS.index(text)
