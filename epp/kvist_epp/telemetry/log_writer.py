"""Writes log lines to stderr without ever making the event loop wait for whoever reads it."""

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final


class Writer:
    """A file descriptor behind a bounded queue and a thread. Lines beyond ``limit`` are dropped and
    counted."""

    GATHER_SECONDS: Final = 0.05
    """Each wake-up of the thread takes the interpreter lock from the loop, so it takes all that this
    brings."""

    def __init__(
        self, fd: int = 2, *, limit: int = 10_000, told: Callable[[int], bytes] | None = None
    ) -> None:
        """``told``: makes the line that says how many were lost."""
        self.dropped = 0
        """Lines lost since the start."""
        self._fd = fd
        self._limit = limit
        self._told = told
        self._lines: deque[bytes] = deque()
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvist-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue one line, without its newline. Any thread; never blocks."""
        if len(self._lines) >= self._limit:
            self.dropped += 1
            return
        self._lines.append(line)
        if not self._news.is_set():
            self._news.set()

    def close(self, timeout: float = 1.0) -> None:
        """Write what is queued, for at most ``timeout`` seconds; lines after this are lost."""
        self._closing.set()
        self._news.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        told = 0
        while not (self._closing.is_set() and not self._lines):
            self._news.wait()
            self._closing.wait(self.GATHER_SECONDS)
            self._news.clear()
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            lost, told = self.dropped - told, self.dropped
            if lost and self._told:
                lines.append(self._told(lost))
            self._put(lines)

    def _put(self, lines: list[bytes]) -> None:
        view = memoryview(b"".join(line + b"\n" for line in lines))
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # a pipe somebody made non-blocking: the reader is slow
                if self._closing.wait(self.GATHER_SECONDS):
                    return
            except OSError:  # stderr has gone: nobody is left to tell
                self.dropped += len(lines)
                return
