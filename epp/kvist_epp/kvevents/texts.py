"""Token ids → the bytes of each block."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any


class Texts:
    """A vocabulary, ready to spell blocks; ``pieces``: bytes of each token id, b"" where there is none."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces: list[bytes | None] = [piece or None for piece in pieces]
        """None makes ``join`` fail, so that an absent id is noticed at no cost to the others."""

    def spell(self, ids: Sequence[int], size: int) -> tuple[list[bytes], bool]:
        """(bytes of each block of ``size`` tokens up to the first with an absent id, whether all are)."""
        try:
            tokens: Any = iter(_pick(ids)(self.pieces))
            blocks = list(map(b"".join, zip(*[tokens] * size, strict=False)))
        except (IndexError, TypeError):
            absent = next(at for at, token in enumerate(ids) if not self._exists(token))
            return self.spell(ids[: absent - absent % size], size)[0], False

        return blocks, True

    def _exists(self, token: int) -> bool:
        return token < len(self.pieces) and self.pieces[token] is not None


def _pick(ids: Sequence[int]) -> Callable[[list[bytes | None]], tuple[bytes | None, ...]]:
    """``itemgetter``, the fastest way to look many up, for any number of ids."""
    if len(ids) > 1:
        return itemgetter(*ids)
    return lambda pieces: tuple(pieces[token] for token in ids)
