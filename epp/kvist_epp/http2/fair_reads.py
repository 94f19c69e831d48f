"""Shares the event loop among connections that are flooded, and with everything else in the process.

libuv hands over up to 32 pieces of 256 KB of one socket in a row, and goes on with the next socket: with
small requests that is seconds of work, in which no health check, scrape or timer has its turn. Here a large
piece is taken at once only while its turn of the loop is young; else it waits, and its socket is not read
meanwhile.
"""

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Final

LARGE_BYTES: Final = 64 * 1024
"""Pieces from this size on pass through `FairReads`; most requests are smaller."""
TURN_SECONDS: Final = 0.01
"""Of large pieces in one turn; the one under way is finished."""

Work = Callable[[], None]


class FairReads:
    """One for the connections of a port."""

    __slots__ = ("_clock", "_late", "_soon", "_spent", "_told")

    def __init__(self, soon: Callable[[Work], object], clock: Callable[[], float] = perf_counter) -> None:
        """``soon`` has something done in the loop's next turn; ``clock`` in seconds."""
        self._soon = soon
        self._clock = clock
        self._late: deque[Work] = deque()
        self._spent = 0.0
        self._told = False

    def __len__(self) -> int:
        """Pieces that wait."""
        return len(self._late)

    def now(self, work: Work) -> bool:
        """Do it at once and say so; or not, when this turn has had enough: it is done in a later one."""
        if not self._told:
            self._told = True
            self._soon(self._next)
        if self._late or self._spent >= TURN_SECONDS:
            self._late.append(work)
            return False
        self._do(work)
        return True

    def _next(self) -> None:
        """Another turn begins."""
        self._told, self._spent = False, 0.0
        try:
            while self._late and self._spent < TURN_SECONDS:
                self._do(self._late.popleft())
        finally:
            if self._late and not self._told:
                self._told = True
                self._soon(self._next)

    def _do(self, work: Work) -> None:
        begun = self._clock()
        try:
            work()
        finally:
            self._spent += self._clock() - begun
