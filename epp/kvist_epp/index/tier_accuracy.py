"""Accuracy of the index on slower tiers: tokens predicted to come from each tier against those that came.

An engine's events do not tell where the blocks of one request came from, so its counters are compared with
the sums of predictions, over a window. Only the promise that a tier has not kept matters: what it gave beyond
the prediction costs nothing. Such a tier's blocks are forgotten, and the endpoint stays precise: what the GPU
holds is compared request by request (``index_accuracy``). Pure; the clock is a parameter.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

WINDOW_SECONDS: Final = 60.0
LEAST_TOKENS: Final = 2048
"""Tokens predicted from a tier in the window below which nothing is decided."""
KEPT_SHARE: Final = 0.25
"""A tier that gave less of what was predicted is not what the index takes it for. A load that was predicted
may have become unnecessary meanwhile, so a smaller difference is no proof."""


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A tier that gave hardly anything of what was predicted."""

    source: str
    predicted: int
    """Tokens."""
    true: int


@dataclass(frozen=True, slots=True)
class _Sums:
    at: float
    predicted: Mapping[str, int]
    true: Mapping[str, float]


class TierAccuracy:
    """The accuracy of one endpoint's tiers, by the source that the engine's counters name."""

    def __init__(self) -> None:
        self.predicted: dict[str, int] = {}
        """Tokens predicted since the start, of requests that the engine has taken up."""
        self._sums: deque[_Sums] = deque()

    def on_taken_up(self, predicted: Mapping[str, int]) -> None:
        """Note the tokens that a request, which its engine has admitted, was predicted to load, by source."""
        for source, tokens in predicted.items():
            self.predicted[source] = self.predicted.get(source, 0) + tokens

    def on_counters(self, true: Mapping[str, float], now: float) -> list[BrokenPromise]:
        """Compare the engine's cached tokens by source; return the tiers that did not give what was expected.

        Empty counters, of an engine that has none, decide nothing. Counters that fell begin anew.
        """
        if not true:
            return []
        sums = _Sums(now, dict(self.predicted), true)
        if self._sums and any(true.get(name, 0.0) < n for name, n in self._sums[-1].true.items()):
            self._sums.clear()
        self._sums.append(sums)
        while len(self._sums) > 2 and self._sums[1].at <= now - WINDOW_SECONDS:
            self._sums.popleft()
        broken = self._broken(self._sums[0], sums)
        if broken:
            self.on_engine_restart()
        return broken

    def on_engine_restart(self) -> None:
        """Begin a new window: the sums say nothing of what comes."""
        self._sums.clear()

    def _broken(self, first: _Sums, last: _Sums) -> list[BrokenPromise]:
        predicted = {name: n - first.predicted.get(name, 0) for name, n in last.predicted.items()}
        true = {name: n - first.true.get(name, 0.0) for name, n in last.true.items()}
        # blocks may have moved to another tier between the pick and the load
        moved = sum(max(0.0, true.get(name, 0.0) - n) for name, n in predicted.items())
        return [
            BrokenPromise(name, n, round(true.get(name, 0.0)))
            for name, n in predicted.items()
            if n >= LEAST_TOKENS and true.get(name, 0.0) + moved < KEPT_SHARE * n
        ]
