"""How much of the prompts of the last ten minutes was known beforehand, and where they part from it. Pure."""

from typing import Any, Final

from kvist_epp.prefix_stats.window import Window

BOUNDS: Final = tuple(1 << power for power in range(4, 21))
"""Tokens: 16 to a million. What is matched is whole blocks, so nothing lies between 0 and the first."""


class _Piece:
    __slots__ = ("matched", "parted", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = self.tokens = self.matched = 0
        self.parted = [0] * (len(BOUNDS) + 1)


class DivergenceHistogram:
    """Prompts that were understood and picked for."""

    def __init__(self) -> None:
        self._window = Window(_Piece)

    def record(self, tokens: int, matched: int, now: float) -> None:
        """A prompt of so many tokens, so many of which the picked endpoint holds by all that is known."""
        piece = self._window.at(now)
        piece.requests += 1
        piece.tokens += tokens
        piece.matched += matched
        piece.parted[min(max(matched.bit_length() - 4, 0), len(BOUNDS))] += 1

    def document(self, now: float) -> dict[str, Any]:
        """``parted``: requests that part before ``before`` tokens (null: any number) and not before the bound
        that precedes it; those without requests are left out."""
        pieces = self._window.live(now)
        parted = [sum(column) for column in zip(*(piece.parted for piece in pieces), strict=True)]
        return {
            "requests": sum(piece.requests for piece in pieces),
            "tokens": sum(piece.tokens for piece in pieces),
            "matched_tokens": sum(piece.matched for piece in pieces),
            "parted": [
                {"before": bound, "requests": count}
                for bound, count in zip((*BOUNDS, None), parted, strict=bool(parted))
                if count
            ],
        }
