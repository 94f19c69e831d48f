"""Contents of ``/debug/pick`` and ``/debug/queue``, and the gauges of the queue.

They contain numbers by priority, never tenants or prompts.
"""

from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from typing import Any, Final

from kvist_epp.flowcontrol.flow_controller import Held, Queue
from kvist_epp.scheduling.pick import MAX_ENDPOINTS, Scored
from kvist_epp.telemetry.picker_metrics import Gauges

KEPT_SECONDS: Final = 600.0
"""Time for which an empty priority level is reported as 0, so that autoscalers see that it is empty."""
MAX_LEVELS: Final = 32
"""Priority levels reported one by one, since clients choose them; the others are summed as ``other``."""


def pick_document(
    mode: str, prompt_bytes: int, rows: Sequence[Scored], *, limit: int = MAX_ENDPOINTS
) -> dict[str, object]:
    """Return the page ``/debug/pick`` for the rows of ``explain``.

    ``picked`` has the ``ip:port`` of those that ``choose`` would answer, at most ``limit``.
    """
    eligible = [row for row in rows if row.eligible]
    return {
        "mode": mode,
        "prompt_bytes": prompt_bytes,
        "endpoints": [
            {
                "endpoint": row.endpoint.hostport,
                "name": row.endpoint.key,
                "eligible": row.eligible,
                "matched_tokens": row.matched_tokens,
                "matched_bytes": row.matched_bytes,
                "uncached_tokens": row.uncached_tokens,
                "owed_tokens": row.owed_tokens,
                "predicted_ttft_seconds": round(row.predicted_ttft_seconds, 6),
                "reason": row.reason,
            }
            for row in rows
        ],
        "picked": [row.endpoint.hostport for row in eligible[:limit]],
        "full": bool(eligible) and eligible[0].full,
    }


def queue_document(queue: Queue | None) -> dict[str, Any]:
    """Return the page ``/debug/queue``."""
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
        "levels": [
            {
                "priority": priority,
                "requests": level.requests,
                "tokens": level.tokens,
                "bytes": level.size,
                "tenants": level.rounds.tenants,
            }
            for priority, level in levels
        ],
        "full_endpoints": full_endpoints(queue),
        "pool_empty": queue.patience.empty,
        "owed_seconds": round(backlog_seconds(queue), 3),
        "picks_per_second": round(queue.pace.rate, 2),
        "bounds": asdict(queue.bounds),
    }


def backlog_seconds(queue: Queue) -> float:
    """Return the mean seconds that eligible endpoints need to prefill their backlog; 0 without endpoints."""
    now = queue.clock()
    seconds = [c.load.drain(now) / c.load.rate for c in queue.pool() if not c.refusal]
    return sum(seconds) / len(seconds) if seconds else 0.0


def full_endpoints(queue: Queue) -> int:
    """Return the number of endpoints that could be picked if they were not full."""
    now, able = queue.clock(), [c.load for c in queue.pool() if not c.refusal]
    for load in able:
        load.drain(now)
    return sum(load.full(queue.bounds.max_owed) for load in able)


class QueueGauges:
    """Gauges of the queue; must be constructed before the first request is queued."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._seen: dict[int, float] = {0: inf}
        queue.held = self._on_queued

    def attach(self, gauges: Gauges) -> None:
        """Register the sources of the gauges."""
        queue = self._queue
        gauges.queue_requests = self.requests
        gauges.queue_tokens = lambda: queue.waiting.tokens
        gauges.queue_bytes = lambda: queue.waiting.size
        gauges.full_endpoints = lambda: full_endpoints(queue)
        gauges.backlog_seconds = lambda: backlog_seconds(queue)

    def requests(self) -> dict[str, int]:
        """Return the number of queued requests by priority."""
        now, levels = self._queue.clock(), self._queue.waiting.levels
        for priority, seen_at in tuple(self._seen.items()):
            if now - seen_at > KEPT_SECONDS and priority not in levels:
                del self._seen[priority]
        counts = {str(at): levels[at].requests if at in levels else 0 for at in sorted(self._seen)}
        other = self._queue.waiting.requests - sum(counts.values())
        return counts | ({"other": other} if other else {})

    def _on_queued(self, priority: int, now: float) -> None:
        seen = self._seen
        if priority in seen or len(seen) < MAX_LEVELS:
            seen[priority] = max(now, seen.get(priority, now))
