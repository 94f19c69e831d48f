"""Contents of ``/debug/pick`` and ``/debug/queue``, and the gauges of the queue.

They contain numbers by priority, never tenants or prompts.
"""

from collections.abc import Callable
from typing import Any, Final

from kvist_epp.director.director import Explanation
from kvist_epp.flowcontrol.flow_controller import (
    MAX_LEVELS,
    FlowController,
    QueuedRequest,
)
from kvist_epp.telemetry.picker_metrics import Gauges

KEPT_SECONDS: Final = 600.0
"""Time for which an empty priority level is reported as 0, so that autoscalers see that it is empty."""


def pick_document(explanation: Explanation) -> dict[str, object]:
    """Return the page ``/debug/pick``; ``picked`` has the ``ip:port`` of those that would be answered."""
    eligible = [row for row in explanation.rows if row.eligible]
    return {
        "mode": explanation.mode,
        "prompt_bytes": explanation.prompt_bytes,
        "endpoints": [
            {
                "endpoint": row.endpoint.hostport,
                "name": row.endpoint.key,
                "eligible": row.eligible,
                "matched_tokens": row.matched_tokens,
                "matched_bytes": row.matched_bytes,
                "uncached_tokens": row.uncached_tokens,
                "owed_tokens": row.backlog_tokens,
                "backlog_tokens": row.backlog_tokens,
                "predicted_ttft_seconds": round(row.predicted_ttft_seconds, 6),
                "reason": row.reason,
                "cost_seconds": round(row.cost_seconds, 6),
                "terms": {name: round(seconds, 6) for name, seconds in row.terms.items()},
            }
            for row in explanation.rows
        ],
        "picked": [row.endpoint.hostport for row in eligible[: explanation.limit]],
        "full": bool(eligible) and eligible[0].full,
    }


def queue_document(flow: FlowController | None, now: float) -> dict[str, Any]:
    """Return the page ``/debug/queue``."""
    if flow is None:
        return {}
    queue, limits = flow.queue, flow.limits
    oldest = queue.oldest()
    levels = sorted(queue.levels.items(), reverse=True)[:MAX_LEVELS]
    return {
        "requests": queue.requests,
        "tokens": queue.tokens,
        "bytes": queue.size,
        "oldest_seconds": round(now - oldest.since, 3) if isinstance(oldest, QueuedRequest) else 0.0,
        "levels": [
            {
                "priority": priority,
                "requests": level.requests,
                "tokens": level.tokens,
                "bytes": level.size,
                "tenants": level.flows.tenants,
            }
            for priority, level in levels
        ],
        "full_endpoints": full_endpoints(flow, now),
        "pool_empty": flow.deadlines.pool_empty,
        "backlog_seconds": round(backlog_seconds(flow, now), 3),
        "picks_per_second": round(flow.dispatch_rate.rate, 2),
        "bounds": {
            "max_backlog_seconds": limits.max_backlog,
            "queue_requests": limits.requests,
            "queue_bytes": limits.size,
            "queue_seconds": limits.capacity_seconds,
            "empty_pool_seconds": limits.empty_seconds,
        },
    }


def backlog_seconds(flow: FlowController, now: float) -> float:
    """Return the mean seconds that eligible endpoints need to prefill their backlog; 0 without endpoints."""
    seconds = [c.load.drain(now) / c.load.rate for c in flow.pool() if not c.refusal]
    return sum(seconds) / len(seconds) if seconds else 0.0


def full_endpoints(flow: FlowController, now: float) -> int:
    """Return the number of endpoints that could be picked if they were not full."""
    able = [c.load for c in flow.pool() if not c.refusal]
    for load in able:
        load.drain(now)
    return sum(load.full(flow.limits.max_backlog) for load in able)


class QueueGauges:
    """Gauges of the queue."""

    def __init__(self, flow: FlowController, clock: Callable[[], float]) -> None:
        self._flow = flow
        self._clock = clock

    def attach(self, gauges: Gauges) -> None:
        """Register the sources of the gauges."""
        flow, clock = self._flow, self._clock
        gauges.queue_requests = self.requests
        gauges.queue_tokens = lambda: flow.queue.tokens
        gauges.queue_bytes = lambda: flow.queue.size
        gauges.full_endpoints = lambda: full_endpoints(flow, clock())
        gauges.backlog_seconds = lambda: backlog_seconds(flow, clock())

    def requests(self) -> dict[str, int]:
        """Return the number of queued requests by priority; 0 for levels that became empty lately."""
        now, queue, queued_at = self._clock(), self._flow.queue, self._flow.last_queued
        for priority, at in tuple(queued_at.items()):
            if now - at > KEPT_SECONDS and priority not in queue.levels:
                del queued_at[priority]
        shown = sorted([0, *[priority for priority in queued_at if priority != 0][: MAX_LEVELS - 1]])
        counts = {str(at): queue.levels[at].requests if at in queue.levels else 0 for at in shown}
        other = queue.requests - sum(counts.values())
        return counts | ({"other": other} if other else {})
