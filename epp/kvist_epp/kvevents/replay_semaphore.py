"""A limit on how many replays run at once: each may bring 10,000 batches."""

from collections import deque
from collections.abc import Callable, Hashable


class Slots:
    """First come, first served."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside: set[Hashable] = set()
        self._waiting: deque[tuple[Hashable, Callable[[], None]]] = deque()

    def enter(self, who: Hashable, start: Callable[[], None]) -> None:
        """Calls ``start`` now (at once, if ``who`` is inside already) or when another has left."""
        if who in self._inside or len(self._inside) < self._limit:
            self._inside.add(who)
            start()
        else:
            self._drop(who)
            self._waiting.append((who, start))

    def leave(self, who: Hashable) -> None:
        """``who`` is done, or does not want to enter any more."""
        self._inside.discard(who)
        self._drop(who)
        while self._waiting and len(self._inside) < self._limit:
            self.enter(*self._waiting.popleft())

    def _drop(self, who: Hashable) -> None:
        self._waiting = deque(item for item in self._waiting if item[0] is not who)
