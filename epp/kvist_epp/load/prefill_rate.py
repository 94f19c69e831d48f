"""Prefill rates of endpoints, learned from their own events. Pure.

An engine is measured only while it has more to do than one step takes: then no time is spent waiting for
work, and every step is as long as its tokens make it. The rate learned so is what a queue on this endpoint
moves at, decoding included. A backlog may be in the cache already, so each step has to show that its work was
waiting.
"""

from collections import deque
from math import ceil, inf
from typing import Final

WINDOW_SECONDS: Final = 1.0
"""Length of a window at least; two steps or more, so that it matters little where in a step it begins."""
WINDOW_TOKENS: Final = 2_048
"""Tokens of a window at least, and backlog throughout it: 130 ms at 15,928 tokens/s, seven times a step's
fixed cost, and several steps of a slow engine."""
WINDOWS: Final = 32
"""Number of windows kept: half a minute with a backlog."""
QUANTILE: Final = 0.9
"""Of the windows: those in which prompts waited for blocks, or the picker for events, show too little."""
SAME_STEP_SECONDS: Final = 0.005
"""Events that come closer than this are of one step: none is as short while it computes prompts."""
ALIKE: Final = 0.25
"""Rates that differ by less are taken for those of equal GPUs: windows of one engine differ by as much, and
an endpoint that looks a little slower would lose its prefixes to the others."""


class PrefillRateEstimator:
    """The rate of one endpoint in tokens/s."""

    __slots__ = ("_before", "_begun", "_done", "_last", "_rates", "_since", "proven", "rate")

    def __init__(self) -> None:
        self.rate: float | None = None
        """None until learned."""
        self.proven = 0.0
        """The rate is at least this."""
        self._rates: deque[float] = deque(maxlen=WINDOWS)
        self._since: float | None = None
        """End of the step before the window; None: no window is open, the backlog is short."""
        self._last = 0.0
        """End of the last step reported."""
        self._before = 0.0
        """End of the one before it."""
        self._begun = inf
        """When the first request of the last step was routed: if after the step before, the engine was
        idle."""
        self._done = 0.0
        """Tokens computed in the steps of the window."""

    @property
    def measuring(self) -> bool:
        """True while a window is open, at the end of which the rate may change."""
        return self._since is not None

    def on_progress(self, computed: float, backlog: float, routed_at: float, now: float) -> None:
        """Apply an event: ``computed`` tokens of a request routed at ``routed_at``; ``backlog`` is the rest.

        Events of one step come together.
        """
        if computed >= WINDOW_TOKENS and now > routed_at:
            self.proven = max(self.proven, computed / (now - routed_at))
        if now - self._last > SAME_STEP_SECONDS:
            self._on_step(now)
        self._begun = min(self._begun, routed_at)
        if self._since is not None and self._last > self._since:
            self._done += computed
        if backlog < WINDOW_TOKENS:
            self._since = None
        elif self._since is None:
            self._since, self._done = self._last, 0.0

    def _on_step(self, now: float) -> None:
        if self._begun > self._before + SAME_STEP_SECONDS:
            self._since = None
        seconds = 0.0 if self._since is None else self._last - self._since
        if seconds >= WINDOW_SECONDS and self._done >= WINDOW_TOKENS:
            self._rates.append(self._done / seconds)
            self.rate = sorted(self._rates)[ceil(QUANTILE * len(self._rates)) - 1]
            self._since, self._done = self._last, 0.0
        self._before, self._last, self._begun = self._last, now, inf


class PoolPrefillRates:
    """Rates of all endpoints in tokens/s.

    An endpoint that has not learned its own never had a backlog, and so is taken for as fast as the fastest
    that has, or as it has proven to be.
    """

    def __init__(self, default: float) -> None:
        self._default = default
        self._learned: dict[str, float] = {}
        self._fastest = default

    def learn(self, key: str, rate: float) -> bool:
        """Store one endpoint's rate; return True if that changes the rate assumed for others."""
        if self._learned.get(key) == rate:
            return False
        self._learned[key] = rate
        return self._settle()

    def remove(self, key: str) -> bool:
        """Remove an endpoint; return True if that changes the rate assumed for others."""
        return self._learned.pop(key, None) is not None and self._settle()

    def rate(self, key: str, proven: float = 0.0) -> float:
        """Return the endpoint's own rate where it is clearly below the fastest's, else the fastest's."""
        own = self._learned.get(key)
        if own is None:
            return max(proven, self._fastest)
        return own if own < (1.0 - ALIKE) * self._fastest else self._fastest

    def _settle(self) -> bool:
        fastest = max(self._learned.values(), default=self._default)
        if fastest == self._fastest:
            return False
        self._fastest = fastest
        return True
