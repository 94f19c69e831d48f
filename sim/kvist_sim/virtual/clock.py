"""Virtual time: what happens next, in order of time and, at one moment, in order of planning. Pure."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Agenda:
    """Everything planned; ``run`` lets it happen. Equal plans give equal runs."""

    __slots__ = ("_count", "_heap", "now")

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds; the moment of what happens at present."""
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, when: float, what: Callable[[Any], None], about: Any = None) -> None:
        """``what(about)`` happens at ``when``; if that is past, now, after what is planned for now."""
        self._count += 1
        heappush(self._heap, (max(when, self.now), self._count, what, about))

    def run(self, until: Callable[[], bool]) -> None:
        """Run until ``until`` is true, or nothing is planned any more."""
        heap = self._heap
        while heap and not until():
            self.now, _, what, about = heappop(heap)
            what(about)
