"""Accuracy of the index on slower tiers: tokens predicted to come from each tier against those that came.

An engine's events do not tell where the blocks of one request came from, so its counters are compared with
the sums of predictions, over a window: of 30 seconds, or longer until enough was predicted to decide. Only
the promise that a tier has not kept matters: what it gave beyond the prediction costs nothing. Such a tier's
blocks are forgotten, and the endpoint stays precise: what the GPU holds is compared request by request
(``index_accuracy``). Pure; the clock is a parameter.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

WINDOW_SECONDS: Final = 30.0
"""What a tier gave longer ago excuses nothing, where enough was predicted since: files that go while others
are loaded all the time are found out within that time."""
LONGEST_SECONDS: Final = 3600.0
"""Of a window in which little is predicted."""
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

    def predicted_since(self, first: "_Sums", source: str) -> int:
        return self.predicted.get(source, 0) - first.predicted.get(source, 0)

    def true_since(self, first: "_Sums", source: str) -> float:
        return self.true.get(source, 0.0) - first.true.get(source, 0.0)


class TierAccuracy:
    """The accuracy of one endpoint's tiers, by the source that the engine's counters name."""

    def __init__(self) -> None:
        self.predicted: dict[str, int] = {}
        """Tokens predicted since the start, of requests that the engine has taken up."""
        self._last: _Sums | None = None
        self._windows: dict[str, deque[_Sums]] = {}
        """By source, oldest sums first; of several in which nothing changed, first and last."""

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
        last, sums = self._last, _Sums(now, dict(self.predicted), true)
        if not self.predicted and last is not None and true == last.true:
            self._last = sums
            return []
        if last is not None and any(true.get(name, 0.0) < n for name, n in last.true.items()):
            self.on_engine_restart()
            last = None
        self._last = sums
        for source in self.predicted:
            self._slide(source, last, sums)
        found = (self._broken(source, window[0], sums) for source, window in self._windows.items())
        broken = [one for one in found if one is not None]
        if broken:
            self.on_engine_restart()
            self._last = sums
        return broken

    def kept(self, source: str) -> bool:
        """Return whether a tier has given what was predicted, in the window, and enough to say so."""
        window = self._windows.get(source)
        if not window:
            return False
        first, last = window[0], window[-1]
        predicted, true = last.predicted_since(first, source), last.true_since(first, source)
        return predicted >= LEAST_TOKENS and true >= KEPT_SHARE * predicted

    def on_engine_restart(self) -> None:
        """Begin new windows: the sums say nothing of what comes."""
        self._windows.clear()
        self._last = None

    def _slide(self, source: str, before: _Sums | None, sums: _Sums) -> None:
        """Add sums to the window of a source, and drop those that are too old and not needed."""
        window = self._windows.get(source)
        if window is None:
            window = self._windows[source] = deque(() if before is None else (before,))
        if len(window) > 1 and not sums.predicted_since(window[-2], source):
            window.pop()
        window.append(sums)
        while len(window) > 2 and window[1].at <= sums.at - WINDOW_SECONDS:
            enough = sums.predicted_since(window[1], source) >= LEAST_TOKENS
            idle = not window[1].predicted_since(window[0], source)
            if not (enough or idle or window[0].at <= sums.at - LONGEST_SECONDS):
                return
            window.popleft()

    def _broken(self, source: str, first: _Sums, last: _Sums) -> BrokenPromise | None:
        predicted, true = last.predicted_since(first, source), last.true_since(first, source)
        # blocks may have moved to another tier between the pick and the load
        moved = sum(
            max(0.0, last.true_since(first, other) - last.predicted_since(first, other))
            for other in self.predicted
            if other != source
        )
        if predicted < LEAST_TOKENS or true + moved >= KEPT_SHARE * predicted:
            return None
        return BrokenPromise(source, predicted, round(true))
