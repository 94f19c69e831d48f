"""Which streams stand still, and since when: slow bodies, shut windows, calls that are forgotten.

Looked at a few times in ``stall_seconds``: streams keep no times, so that the hot path pays nothing for it.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol, TypeVar

from kvist_epp.http2.limits import Limits

ENDING: Final = "stalled-ending"
SENDING: Final = "stalled-sending"
RECEIVING: Final = "stalled-receiving"
SILENT: Final = "silent"

CHECKS_PER_STALL: Final = 4
"""How often in ``stall_seconds``."""


class Watched(Protocol):
    """A stream, as far as its progress goes."""

    number: int
    lasting: bool
    sent: bool
    window: int
    waiting_bytes: int
    emitted: int

    @property
    def received(self) -> int:
        """Bytes of DATA so far."""

    @property
    def incomplete(self) -> bool:
        """Whether a message has begun and not ended."""


AnyStream = TypeVar("AnyStream", bound=Watched)


class Mark(NamedTuple):
    """What a stream was doing when it last got on."""

    state: str
    since: float
    received: int
    emitted: int
    window: int


class StallDetector:
    """The marks of one connection's streams."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._marks: dict[int, Mark] = {}

    def look(self, streams: Iterable[AnyStream], now: float) -> list[tuple[AnyStream, str]]:
        """The streams whose time is up, each with one of ``stats.STREAM_ENDS``; ``now`` in seconds."""
        marks: dict[int, Mark] = {}
        late = []
        for stream in streams:
            state = _state(stream)
            if not state:
                continue
            mark = self._marks.get(stream.number)
            if mark is None or mark.state != state or self._moves(stream, mark, now):
                mark = Mark(state, now, stream.received, stream.emitted, stream.window)
            elif now - mark.since > self._time(state):
                late.append((stream, state))
            marks[stream.number] = mark
        self._marks = marks
        return late

    def _moves(self, stream: Watched, mark: Mark, now: float) -> bool:
        if mark.state == SILENT:
            return (stream.received, stream.window) != (mark.received, mark.window)
        moved = {
            SENDING: stream.emitted - mark.emitted,
            RECEIVING: stream.received - mark.received,
        }.get(mark.state, -1)
        return moved >= self._limits.bytes_per_second * (now - mark.since)

    def _time(self, state: str) -> float:
        return self._limits.stream_idle_seconds if state == SILENT else self._limits.stall_seconds


def _state(stream: Watched) -> str:
    """What it waits for; empty: it may wait for ever."""
    if stream.sent:
        return ENDING
    if stream.waiting_bytes:
        return SENDING
    if stream.incomplete:
        return RECEIVING
    return "" if stream.lasting else SILENT
