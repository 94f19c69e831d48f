"""Work in slices between picks: after about a millisecond of it, the event loop gets its turn."""

import asyncio
from collections import deque
from time import perf_counter
from typing import Protocol


class Job(Protocol):
    """Something with work to do now and then."""

    def work(self, deadline: float) -> bool:
        """Works until done or until ``deadline`` (``perf_counter`` seconds); returns whether more is left."""


class Pump:
    """Runs jobs that are ready, in turn, ``slice_seconds`` at a time; made inside a running event loop."""

    def __init__(self, slice_seconds: float = 0.001) -> None:
        self._slice = slice_seconds
        self._loop = asyncio.get_running_loop()
        self._ready: deque[Job] = deque()
        self._handle: asyncio.Handle | None = None

    def ready(self, job: Job) -> None:
        """The job has work; said again while it waits, it changes nothing."""
        if job not in self._ready:
            self._ready.append(job)
        if self._handle is None:
            self._handle = self._loop.call_soon(self._run)

    def drop(self, job: Job) -> None:
        """The job is not to be run again."""
        if job in self._ready:
            self._ready.remove(job)

    def close(self) -> None:
        """Nothing runs any more."""
        self._ready.clear()
        if self._handle is not None:
            self._handle.cancel()

    def _run(self) -> None:
        deadline = perf_counter() + self._slice
        try:
            while self._ready:
                job = self._ready.popleft()
                if job.work(deadline) and job not in self._ready:
                    self._ready.append(job)
                if perf_counter() >= deadline:
                    break
        finally:
            self._handle = self._loop.call_soon(self._run) if self._ready else None
