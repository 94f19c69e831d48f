"""Samples of the picker's figures over the last five minutes, for rates, shares and sparklines. Pure.

Counters only grow, so the difference of two samples is what happened between them. A sample of an endpoint is
a row of floats in an array: 2.4 KB for each endpoint, however long the picker runs.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

SAMPLE_SECONDS: Final = 10.0
"""Time between two samples."""
POINTS: Final = 30
"""Samples that are kept: five minutes."""


class EndpointFigures(NamedTuple):
    """One endpoint at one moment: counters of this replica's requests, counters of the engine, and gauges."""

    at: float = 0.0
    requests: float = 0.0
    """Requests of this replica that were sent there."""
    prompt_tokens: float = 0.0
    predicted_tokens: float = 0.0
    """Of those tokens, the ones predicted to be cached there."""
    verified_tokens: float = 0.0
    """Prompt tokens of the requests whose true cache hit is known."""
    true_tokens: float = 0.0
    """Of those tokens, the ones that were cached."""
    looked_up_tokens: float = 0.0
    """Prompt tokens that the engine looked up in its prefix cache, by its own counter."""
    found_tokens: float = 0.0
    """Of those tokens, the ones that it found."""
    load: float = 0.0
    """Requests there."""
    backlog_seconds: float = 0.0


class PickerFigures(NamedTuple):
    """The whole picker at one moment; all but ``queued`` are counters."""

    at: float = 0.0
    picked: float = 0.0
    refused: float = 0.0
    prompt_tokens: float = 0.0
    predicted_tokens: float = 0.0
    verified_tokens: float = 0.0
    true_tokens: float = 0.0
    saved_tokens: float = 0.0
    """Prompt tokens that engines did not have to prefill, because they were cached."""
    saved_seconds: float = 0.0
    """Seconds of an endpoint that this prefill would have taken."""
    queued: float = 0.0


Cumulative = tuple[float, ...]
"""A histogram at one moment: observations up to each bound, the last of which is infinite."""


def difference(new: Cumulative, old: Cumulative | None) -> Cumulative:
    """Return what was observed after ``old``; all if there is none."""
    return new if old is None else tuple([one - before for one, before in zip(new, old, strict=True)])


def quantile(bounds: Sequence[float], cumulative: Sequence[float], share: float) -> float | None:
    """Return the value below which ``share`` of the observations are, interpolated within its bucket as
    Prometheus does; None without observations.

    ``bounds`` are the finite ones. Example: of 10 observations up to 0.1 s and 10 more up to 0.2 s, 75 % are
    below 0.15 s.
    """
    total = cumulative[-1] if cumulative else 0
    if not total:
        return None
    wanted = share * total
    at = bisect_left(cumulative, wanted)
    if at >= len(bounds):
        return bounds[-1]
    below, before = (bounds[at - 1], cumulative[at - 1]) if at else (0.0, 0.0)
    return below + (bounds[at] - below) * (wanted - before) / max(cumulative[at] - before, 1)


class SampleRing:
    """The last rows of floats, all of the same width, in one array; the first column is the time."""

    __slots__ = ("_next", "_rows", "_width")

    def __init__(self, width: int, points: int = POINTS) -> None:
        self._width = width
        self._rows = array("d", bytes(8 * width * points))
        self._next = 0

    def __len__(self) -> int:
        return min(self._next, len(self._rows) // self._width)

    def append(self, row: Sequence[float]) -> None:
        """Store a row in place of the oldest one."""
        start = self._next % (len(self._rows) // self._width) * self._width
        self._rows[start : start + self._width] = array("d", row)
        self._next += 1

    def rows(self) -> Iterator[Sequence[float]]:
        """Yield the rows, oldest first."""
        for number in range(self._next - len(self), self._next):
            yield self._row(number)

    def column(self, number: int) -> Sequence[float]:
        """Return one column, oldest first."""
        values, kept = self._rows[number :: self._width], len(self)
        cut = self._next % len(values) if kept == len(values) else 0
        return values[cut:kept] + values[:cut]

    def first(self) -> Sequence[float] | None:
        """Return the oldest row; None if there is none."""
        return self._row(self._next - len(self)) if self._next else None

    def before(self, at: float) -> Sequence[float] | None:
        """Return the newest row from ``at`` or earlier, else the oldest row; None if there is none."""
        if not self._next:
            return None
        older = bisect_right(self.column(0), at)
        return self._row(self._next - len(self) + max(older - 1, 0))

    def _row(self, number: int) -> Sequence[float]:
        start = number * self._width % len(self._rows)
        return self._rows[start : start + self._width]


class RecentSamples:
    """Samples of the pool, of its histograms and of each endpoint; those of endpoints that left go."""

    def __init__(self) -> None:
        self.pool = SampleRing(len(PickerFigures._fields))
        self.histograms: dict[str, list[Cumulative]] = {}
        """By name, oldest first, as many as the pool has rows."""
        self._endpoints: dict[str, SampleRing] = {}

    def add_pool(self, figures: PickerFigures, histograms: Iterable[tuple[str, Cumulative]]) -> None:
        """Store one sample of the pool and its histograms."""
        self.pool.append(figures)
        for name, cumulative in histograms:
            kept = self.histograms.setdefault(name, [])
            kept.append(cumulative)
            del kept[: -len(self.pool)]

    def add_endpoint(self, key: str, figures: EndpointFigures) -> None:
        """Store one sample of an endpoint."""
        if (ring := self._endpoints.get(key)) is None:
            ring = self._endpoints[key] = SampleRing(len(EndpointFigures._fields))
        ring.append(figures)

    def keep_only(self, keys: Iterable[str]) -> None:
        """Drop the samples of all other endpoints."""
        kept = set(keys)
        for key in [key for key in self._endpoints if key not in kept]:
            del self._endpoints[key]

    def endpoint(self, key: str) -> SampleRing:
        """Return the samples of an endpoint; an empty ring if there are none."""
        return self._endpoints.get(key) or SampleRing(len(EndpointFigures._fields), 1)
