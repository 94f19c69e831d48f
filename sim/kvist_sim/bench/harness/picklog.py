"""Read the pickers' request logs back: the decisions in their order."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

_MARK: Final = b'"event":"request"'


class Line(msgspec.Struct):
    """Fields of a request log line (``kvist_epp.telemetry.request_log.RequestLine``) that the
    benchmarks read."""

    id: str
    session: str = ""
    outcome: str = ""
    mode: str = ""
    endpoint: str | None = None
    """First endpoint of the answer."""
    matched_tokens: int = 0
    waited_ms: float = 0.0
    """Milliseconds in the queue."""


_DECODER: Final = msgspec.json.Decoder(Line)


class PickLog:
    """One picker's JSON log; each ``read`` continues at the end of the one before."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at = 0

    def read(self) -> Iterator[Line]:
        """Yield request lines written since the last call; an incomplete line is left out."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                if _MARK in line and (found := _line(line)) is not None:
                    yield found


def _line(line: bytes) -> Line | None:
    """None for a line that a killed picker left half written, with the next one's beginning behind it."""
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError:
        return None
