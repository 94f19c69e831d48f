"""How fast a pod computes prompts, by its own events. Pure.

Only while it has more to do than a step takes: then no time is spent waiting for work, and every step is as
long as its tokens make it. What is counted so is what a queue on this pod moves at, decoding included. What
seems to be owed may be in its cache already, so each step has to show that its work was waiting for it.
"""

from collections import deque
from math import ceil, inf
from typing import Final

BACKLOG_TOKENS: Final = 2_048
"""Owed throughout a window that counts: 130 ms at 15,928 tokens/s, seven times a step's fixed cost."""
WINDOW_SECONDS: Final = 1.0
"""At least; two steps or more, so that it matters little where in a step it begins."""
WINDOW_TOKENS: Final = 4_096
"""At least: several steps of a slow engine, and one window of a full KV cache instead of many."""
WINDOWS: Final = 32
"""Remembered; half a minute of backlog."""
ENOUGH: Final = 3
QUANTILE: Final = 0.9
"""Of the windows: those in which prompts waited for blocks, or the picker for events, tell too little."""
SAME_STEP_SECONDS: Final = 0.005
"""Events that come closer than this are of one step: none is as short while it computes prompts."""


class Pace:
    """``rate``: tokens/s, None until learned; ``shown``: it is at least this."""

    __slots__ = ("_before", "_begun", "_done", "_last", "_rates", "_since", "rate", "shown")

    def __init__(self) -> None:
        self.rate: float | None = None
        self.shown = 0.0
        self._rates: deque[float] = deque(maxlen=WINDOWS)
        self._since: float | None = None
        """End of the step before the window; None: it is not behind."""
        self._last = 0.0
        """End of the last step told of."""
        self._before = 0.0
        """End of the one before it."""
        self._begun = inf
        """When the first of those told of in the last step came: after the one before, and it was idle."""
        self._done = 0.0
        """Computed in the steps of the window."""

    def advanced(self, computed: float, owed: float, begun: float, now: float) -> None:
        """Events told of prompt tokens ``computed`` by now, of a request that was routed at ``begun``; so
        many are still ``owed``. A step's events come together."""
        if computed >= BACKLOG_TOKENS and now > begun:
            self.shown = max(self.shown, computed / (now - begun))
        if now - self._last > SAME_STEP_SECONDS:
            self._step(now)
        self._begun = min(self._begun, begun)
        if self._since is not None and self._last > self._since:
            self._done += computed
        if owed < BACKLOG_TOKENS:
            self._since = None
        elif self._since is None:
            self._since, self._done = self._last, 0.0

    def _step(self, now: float) -> None:
        """Another step has ended; whether the steps before it make a window."""
        if self._begun > self._before + SAME_STEP_SECONDS:
            self._since = None
        seconds = 0.0 if self._since is None else self._last - self._since
        if seconds >= WINDOW_SECONDS and self._done >= WINDOW_TOKENS:
            self._learn(self._done / seconds)
            self._since, self._done = self._last, 0.0
        self._before, self._last, self._begun = self._last, now, inf

    def _learn(self, rate: float) -> None:
        self._rates.append(rate)
        if len(self._rates) >= ENOUGH:
            self.rate = sorted(self._rates)[ceil(QUANTILE * len(self._rates)) - 1]


ALIKE: Final = 0.25
"""Rates that differ by less are taken for those of equal GPUs: windows of one engine differ by as much, and a
pod that looks a little slower would lose its prefixes to the others."""
SETTLED: Final = 0.05
"""A smaller change of the pool's rate is not passed on."""


class Paces:
    """Rates of all pods, tokens/s. Who has not learned its own was never behind, and so is taken for as fast
    as the fastest that has, or as it has shown to be."""

    def __init__(self, default: float) -> None:
        self._default = default
        self._learned: dict[str, float] = {}
        self._fastest = default

    def learn(self, key: str, rate: float) -> bool:
        """One pod's, told at every event; whether that changes what is thought of the others."""
        if self._learned.get(key) == rate:
            return False
        self._learned[key] = rate
        return self._settle()

    def forget(self, key: str) -> bool:
        """The pod has left; whether that changes what is thought of the others."""
        return self._learned.pop(key, None) is not None and self._settle()

    def rate(self, key: str, shown: float = 0.0) -> float:
        """Its own where that differs from the fastest's, which is the default until somebody has learned."""
        own = self._learned.get(key)
        if own is None:
            return max(shown, self._fastest)
        return own if own < (1.0 - ALIKE) * self._fastest else self._fastest

    def _settle(self) -> bool:
        fastest = max(self._learned.values(), default=self._default)
        if abs(fastest - self._fastest) <= SETTLED * self._fastest:
            return False
        self._fastest = fastest
        return True
