"""What pages and metrics show of the queue: numbers by priority, never who waits or for what."""

from dataclasses import asdict
from math import inf
from typing import Any, Final

from kvist_epp.flowcontrol.flow_controller import Held, Queue
from kvist_epp.flowcontrol.request_queue import Level
from kvist_epp.telemetry.metrics import Gauges

KEPT_SECONDS: Final = 600.0
"""A level that has emptied is told as 0 for so long: autoscalers must see that it has."""
MAX_LEVELS: Final = 32
"""Levels told one by one, since clients choose them; what else waits is told as ``other``."""


def document(queue: Queue | None) -> dict[str, Any]:
    """The page ``/debug/queue``."""
    if queue is None:
        return {}
    waiting = queue.waiting
    oldest = waiting.oldest()
    levels = sorted(waiting.levels.items(), reverse=True)[:MAX_LEVELS]
    return {
        "requests": waiting.requests,
        "tokens": waiting.tokens,
        "bytes": waiting.size,
        "oldest_seconds": round(queue.clock() - oldest.since, 3) if isinstance(oldest, Held) else 0.0,
        "levels": [_level(priority, level) for priority, level in levels],
        "full_endpoints": full_endpoints(queue),
        "pool_empty": queue.patience.empty,
        "owed_seconds": round(owed_seconds(queue), 3),
        "picks_per_second": round(queue.pace.rate, 2),
        "bounds": asdict(queue.bounds),
    }


def owed_seconds(queue: Queue) -> float:
    """Mean seconds of prefill owed by those who could be picked; 0 without any."""
    now = queue.clock()
    owed = [c.load.drain(now) / c.load.rate for c in queue.pool() if not c.refusal]
    return sum(owed) / len(owed) if owed else 0.0


def full_endpoints(queue: Queue) -> int:
    """Endpoints that could be picked but for being full."""
    now, able = queue.clock(), [c.load for c in queue.pool() if not c.refusal]
    for load in able:
        load.drain(now)
    return sum(load.full(queue.bounds.max_owed) for load in able)


class QueueGauges:
    """The queue as metrics; made before anything waits."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._seen: dict[int, float] = {0: inf}
        queue.held = self._held

    def attach(self, gauges: Gauges) -> None:
        """Be asked at each scrape."""
        queue = self._queue
        gauges.queue_requests = self.requests
        gauges.queue_tokens = lambda: queue.waiting.tokens
        gauges.queue_bytes = lambda: queue.waiting.size
        gauges.full_endpoints = lambda: full_endpoints(queue)
        gauges.backlog_seconds = lambda: owed_seconds(queue)

    def requests(self) -> dict[str, int]:
        """That wait, by priority."""
        self._forget()
        levels = self._queue.waiting.levels
        told = {str(at): levels[at].requests if at in levels else 0 for at in sorted(self._seen)}
        other = self._queue.waiting.requests - sum(told.values())
        return told | ({"other": other} if other else {})

    def _held(self, priority: int, now: float) -> None:
        seen = self._seen
        if priority in seen or len(seen) < MAX_LEVELS:
            seen[priority] = max(now, seen.get(priority, now))

    def _forget(self) -> None:
        now, levels = self._queue.clock(), self._queue.waiting.levels
        for priority, when in tuple(self._seen.items()):
            if now - when > KEPT_SECONDS and priority not in levels:
                del self._seen[priority]


def _level(priority: int, level: Level) -> dict[str, int]:
    return {
        "priority": priority,
        "requests": level.requests,
        "tokens": level.tokens,
        "bytes": level.size,
        "tenants": level.rounds.tenants,
    }
