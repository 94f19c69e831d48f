"""Cached share of the prompts of the last ten minutes, and the token at which prompts diverge. Pure."""

from typing import Any, Final

from kvist_epp.prefix_stats.window import Window

BOUNDS: Final = tuple(1 << power for power in range(4, 21))
"""Upper bounds in tokens: 16 to a million. Matches are whole blocks, so none lies between 0 and the first."""


class _PromptCounts:
    __slots__ = ("diverged", "matched", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = self.tokens = self.matched = 0
        self.diverged = [0] * (len(BOUNDS) + 1)


class DivergenceHistogram:
    """Histogram of the number of prompt tokens that the picked endpoint had cached."""

    def __init__(self) -> None:
        self._window = Window(_PromptCounts)

    def record(self, tokens: int, matched: int, now: float) -> None:
        """Record a prompt of ``tokens`` tokens, ``matched`` of which the index expects on its endpoint."""
        counts = self._window.current(now)
        counts.requests += 1
        counts.tokens += tokens
        counts.matched += matched
        above = matched.bit_length() - 4
        counts.diverged[min(above, len(BOUNDS)) if above > 0 else 0] += 1

    def document(self, now: float) -> dict[str, Any]:
        """Return the totals and the histogram for ``GET /fleet``.

        An entry of ``parted`` counts the requests that diverge before ``before`` tokens (null: no limit), but
        not before the next lower bound. Entries without requests are omitted.
        """
        live = self._window.live(now)
        diverged = [sum(column) for column in zip(*(counts.diverged for counts in live), strict=True)]
        return {
            "requests": sum(counts.requests for counts in live),
            "tokens": sum(counts.tokens for counts in live),
            "matched_tokens": sum(counts.matched for counts in live),
            "parted": [
                {"before": bound, "requests": count}
                for bound, count in zip((*BOUNDS, None), diverged, strict=bool(diverged))
                if count
            ],
        }
