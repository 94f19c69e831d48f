"""Judge whether a picker's memory is stable under load, and its state empty after it. Pure.

*second minute*, *last minute*
    The mean resident memory from a tenth to two tenths of the run, and over its last tenth (a full run
    takes ten minutes).
*left*
    What ``/debug/held`` shows when the load is over and its connections are closed: every count but those of
    tasks must be 0; tasks are held against the same page from before the load.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

GROWTH_BOUND: Final = 0.05
PARTS: Final = 10
"""Windows of a run; the second and the last are compared."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of one process over a run."""

    samples: Sequence[tuple[float, int]]
    """(seconds after the load began, bytes), in order."""
    seconds: float
    """Length of the run."""

    def mean(self, part: int) -> float:
        """Return the mean of one of ``PARTS`` windows, counted from 0; 0.0 without a sample."""
        begin, end = (self.seconds * at / PARTS for at in (part, part + 1))
        found = [size for at, size in self.samples if begin <= at < end]
        return sum(found) / len(found) if found else 0.0

    @property
    def growth(self) -> float:
        """Relative growth from the second window to the last; infinite if either has no sample."""
        first, last = self.mean(1), self.mean(PARTS - 1)
        return last / first - 1 if first and last else float("inf")


@dataclass(frozen=True, slots=True)
class SoakFigures:
    """One picker in one part of the soak; times in seconds."""

    part: str
    picker: str
    seconds: float
    requests: int
    failed: int
    """Requests without a correct answer."""
    p50: float
    p99: float
    memory: Memory
    left: Sequence[str]
    """State that requests left behind, in words."""
    cpu_per_second: float
    """CPU seconds of the picker, per second of the run."""
    why: Sequence[str] = ()
    """Descriptions of a few failed requests."""

    def broken(self) -> list[str]:
        """Return every broken bound in words."""
        found = []
        if self.failed or not self.requests:
            found.append(f"{self.failed} of {self.requests} requests failed")
        if abs(self.memory.growth) > GROWTH_BOUND:
            found.append(f"memory of the last minute is {self.memory.growth:+.1%} off the second's")
        return [*found, *(f"left behind: {what}" for what in self.left)]


def left(before: Mapping[str, Any], after: Mapping[str, Any], kept: Collection[str] = ()) -> list[str]:
    """Return the counts that should be zero, from two ``/debug/held`` pages; counts of ``kept`` may stay."""
    found = []
    for name, value in after.items():
        if name == "tasks":
            found += _tasks(before.get(name, {}), value)
        elif name not in kept:
            found += [f"{what}: {count}" for what, count in _counts(name, value) if count]
    return found


def _tasks(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    more = {name: count - before.get(name, 0) for name, count in after.items()}
    return [f"tasks of {name}: {count}" for name, count in more.items() if count > 0]


def _counts(name: str, value: Any) -> list[tuple[str, int]]:
    if isinstance(value, Mapping):
        return [(f"{name} of {key}", int(count)) for key, count in value.items()]
    return [(name, int(value))]
