"""Run one task per rank: schedule, wait as long as the hardware would, complete, notify the sinks.

The only module that waits. It wakes once a step, not once a token: sinks are called, not awaited.
"""

import asyncio
import time
from collections.abc import Sequence as Seq
from typing import Protocol

from kvist_epp.engines.vllm.kv_events import Batch
from kvist_sim.engine.metrics import RankMetrics
from kvist_sim.engine.offload import OffloadTiers
from kvist_sim.engine.scheduler import Plan, Scheduler
from kvist_sim.engine.sequence import Sequence
from kvist_sim.engine.timing import Clock, Timing

LATE: float = 0.1
"""Seconds of lost time the loop makes up for when the machine, not the simulated hardware, was slow."""


class Sink(Protocol):
    """Receiver of a sequence's tokens."""

    def advanced(self, sequence: Sequence) -> None:
        """Handle a new token of the sequence, or its end (``finish``)."""


class Publisher(Protocol):
    """Receiver of KV events."""

    def publish(self, batch: Batch) -> int:
        """Queue a batch without waiting; return its number."""


class WallClock:
    """Clock of the machine."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    async def sleep_until(self, when: float) -> None:
        """Sleep for at least one turn of the event loop, so that sockets are served however fast the
        hardware is."""
        await asyncio.sleep(max(0.0, when - time.monotonic()))


class Engine:
    """Rank that processes sequences."""

    def __init__(
        self,
        rank: int,
        scheduler: Scheduler,
        timing: Timing,
        metrics: RankMetrics,
        *,
        clock: Clock,
        publisher: Publisher | None = None,
        tiers: OffloadTiers | None = None,
    ) -> None:
        """``tiers``: those of the scheduler."""
        self.rank = rank
        self.scheduler = scheduler
        self._timing = timing
        self._metrics = metrics
        self._clock = clock
        self._publisher = publisher
        self._tiers = tiers
        self._sinks: dict[Sequence, Sink] = {}
        self._work = asyncio.Event()

    @property
    def requests(self) -> int:
        """Number of waiting and running sequences."""
        return len(self._sinks)

    def submit(self, sequence: Sequence, sink: Sink) -> None:
        """Queue a sequence; ``sink`` is called for every token and once for the end."""
        self._sinks[sequence] = sink
        self.scheduler.add(sequence)
        self._work.set()

    def end(self, sequence: Sequence, reason: str = "abort") -> None:
        """End a sequence now.

        Its sink is notified unless the sink itself asked for it (and removed itself before).
        """
        self.scheduler.end(sequence, reason)
        self._finished(sequence, self._clock.now())

    def abort_all(self) -> None:
        """End all sequences."""
        for sequence in list(self._sinks):
            self.end(sequence)

    async def run(self) -> None:
        """Run until cancelled."""
        due = self._clock.now()
        while True:
            if self.scheduler.idle:
                self._metrics.state(self.scheduler)
                self._work.clear()
                await self._work.wait()
                due = self._clock.now()
            due = max(due, self._clock.now() - LATE)
            plan = self.scheduler.schedule(due)
            step = self._timing.step(plan.prefill_tokens, plan.decoding)
            due += step if plan.loaded_at is None else min(step, max(0.0, plan.loaded_at - due))
            await self._clock.sleep_until(due)
            self._complete(plan)

    def _complete(self, plan: Plan) -> None:
        now = self._clock.now()
        before = [sequence.last_token for sequence, _ in plan.work]
        had = dict(zip((sequence for sequence, _ in plan.work), before, strict=True))
        advanced = self.scheduler.complete(plan, now)
        self._publish()
        self._observe(plan, advanced, had, now)
        for sequence in advanced:
            self._tell(sequence, now)

    def _observe(
        self, plan: Plan, advanced: Seq[Sequence], had: dict[Sequence, float | None], now: float
    ) -> None:
        gaps = []
        for sequence in advanced:
            last = had[sequence]
            if last is None:
                self._metrics.first_token(sequence)
            else:
                gaps.append(now - last)
        self._metrics.step(plan, advanced, gaps)
        self._metrics.state(self.scheduler)

    def _tell(self, sequence: Sequence, now: float) -> None:
        if sequence.finish:
            self._finished(sequence, now)
        elif sequence in self._sinks:
            self._sinks[sequence].advanced(sequence)

    def _finished(self, sequence: Sequence, now: float) -> None:
        sink = self._sinks.pop(sequence, None)
        if sink is not None:
            self._metrics.finished(sequence, now)
            sink.advanced(sequence)

    def _publish(self) -> None:
        events, tiers = self.scheduler.pool.take_events(), self._tiers
        batches = [events] if tiers is None else tiers.batches(events)
        for batch in batches:
            if batch and self._publisher is not None:
                self._publisher.publish(Batch(ts=time.time(), rank=self.rank, events=batch))
