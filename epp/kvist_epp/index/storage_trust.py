"""Whether an endpoint shares the storage that its label names, by what its engine has found there. Pure; the
clock is a parameter.

Storage that gives an engine hardly anything of what it should hold was wiped, or it is not the storage that
the label says. The first time it is taken for wiped. If that happens again with nothing found in between, the
endpoint is parted from it, for a time that doubles: a volume that was wiped twice, or a server that crashed
twice, is used again after minutes, and a wrong label costs a few loads that find nothing, ever more rarely.
"""

from typing import Final

PARTED_SECONDS: Final = (300.0, 86_400.0)
"""Shortest and longest time for which an endpoint is parted from its storage."""


class StorageTrust:
    """Follows whether one endpoint finds in its shared storage what the label says it should."""

    __slots__ = ("_missed", "_seconds", "_until")

    def __init__(self) -> None:
        self._missed = False
        self._seconds = 0.0
        self._until: float | None = None

    def on_missed(self, now: float) -> bool:
        """Note that the engine found hardly anything of what was expected; return whether to part it."""
        if not self._missed:
            self._missed = True
            return False
        self._seconds = min(max(PARTED_SECONDS[0], 2 * self._seconds), PARTED_SECONDS[1])
        self._until = now + self._seconds
        return True

    def on_found(self) -> None:
        """Note that the engine found what was expected, so that it does share the storage."""
        self._missed, self._seconds = False, 0.0

    @property
    def doubtful(self) -> bool:
        """Whether its engine missed what was expected, and has found nothing since."""
        return self._missed

    def rejoins(self, now: float) -> bool:
        """Return whether it has been parted for long enough; True once for each time."""
        if self._until is None or now < self._until:
            return False
        self._until = None
        return True
