"""Contents of the pages under ``/debug``, and the gauges of the queue.

The pages contain numbers by endpoint or priority, never tenants or prompts.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import asdict
from math import inf
from typing import Any, Final

from kvist_epp.admin.slices import run_in_slices
from kvist_epp.director.decision_log import endpoint_document
from kvist_epp.director.director import Director
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.director.explanation import Explanation
from kvist_epp.endpoints.discovery import Discovery
from kvist_epp.endpoints.engine_state import EngineState
from kvist_epp.engines.vllm.tier_metrics import NO_TIERS
from kvist_epp.flowcontrol.flow_controller import (
    MAX_LEVELS,
    FlowController,
    QueuedRequest,
)
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.names import REPLICA_PORT
from kvist_epp.scheduling.cost import DEFAULT
from kvist_epp.scheduling.split_record import split_document
from kvist_epp.telemetry.metrics import Gauges


async def fleet_document(registry: EndpointRegistry, discovery: Discovery) -> dict[str, Any]:
    """Return the page ``/debug/fleet``: the endpoints, and which of them are matched approximately."""
    director, now = registry.director, registry.clock()
    endpoints, approximate = list[dict[str, object]](), dict[str, str]()

    def each_endpoint() -> Generator[None, None, None]:
        for key, state in tuple(registry.states.items()):
            if registry.states.get(key) is state:
                endpoints.append(endpoint_row(state.scrape, director.tracker, now, director.max_backlog))
                if why := registry.why_approximate(key):
                    approximate[key] = why
            yield

    await run_in_slices(each_endpoint())
    return {
        "discovery": discovery.describe(),
        "listed": registry.fleet is not None,
        "approximate": approximate,
        "endpoints": endpoints,
    }


def endpoint_row(
    state: EngineState, tracker: LoadTracker, now: float, max_backlog: float = inf
) -> dict[str, object]:
    """Return an endpoint with its state, its last scrape and its backlog by the load tracker.

    ``max_backlog``: seconds of prefill from which an endpoint is full.
    """
    endpoint, load, rates = state.endpoint, tracker.load(state.endpoint.key), state.rates
    return {
        "endpoint": endpoint.hostport,
        "name": endpoint.key,
        "labels": dict(endpoint.labels),
        "kv_events": [source.events for source in endpoint.sources],
        "state": state.state.value,
        "problem": state.problem or state.metrics_problem or state.models_problem,
        "has_metrics": not state.metrics_problem,
        "models": sorted(state.served.models),
        "adapters": sorted(state.served.adapters),
        "max_model_len": state.served.max_model_len,
        "backlog_tokens": round(load.drain(now)),
        "requests": len(load.attempts),
        "untracked_requests": load.untracked_requests,
        "slots": load.slots,
        "full": load.full(max_backlog),
        "prefill_tokens_per_second": round(load.rate, 1),
        "prefill_rate_learned": rates.prefill is not None,
        "decode_seconds": rates.decode_seconds,
        "seconds_per_token": rates.token_seconds,
        "hit_ratio": rates.hit_ratio,
        "tiers": _tiers(state, load),
        "scraped": asdict(state.sample),
    }


def _tiers(state: EngineState, load: EndpointLoad) -> dict[str, Any]:
    """Return how fast blocks of slower tiers are loaded, measured or by default, and from which they are not.

    Empty for an engine whose metrics show no tier.
    """
    if state.sample.tiers is NO_TIERS:
        return {}
    rates, default = load.tier_rates, DEFAULT.load_rates
    return {
        **asdict(state.tier_speed.speed),
        "tokens_per_second": {medium: round(rate, 1) for medium, rate in {**default, **rates}.items()},
        "measured": sorted(rates),
        "skipped": sorted(load.skipped_media),
    }


async def index_document(registry: EndpointRegistry) -> dict[str, Any]:
    """Return the page ``/debug/index``: the index, its model, and the counters of each publisher."""
    director = registry.director
    model, index = director.model, director.index
    publishers: dict[str, dict[str, Any]] = {}

    def each_publisher() -> Generator[None, None, None]:
        if (subscriber := registry.subscriber) is None:
            return
        for name, counters in subscriber.stats().items():
            if subscriber.feed(name) is not None:
                publishers[name] = asdict(counters) | {"held_blocks": index.blocks(index.publisher(name))}
            yield

    await run_in_slices(each_publisher())
    return {
        "model": {
            "name": model.name if model else None,
            "faithful": model is not None and model.faithful,
            "why_not": model.why_not if model else "--model is not set",
            "why_no_chats": model.why_no_chats if model else "",
            "known_cuts": model is not None and model.chunks is not None,
            "known_media": len(model.media) if model and model.media else 0,
        },
        "bytes_per_token": round(director.lookup.bytes_per_token, 3),
        "index": index.stats(),
        "requests_in_flight": len(director.table),
        "publishers": publishers,
    }


def in_flight_document(director: Director, remote_requests: int = 0) -> dict[str, Any]:
    """Return the page ``/debug/held``: what is held for requests in flight, as counts by part.

    A moment after the last request has ended all counts are 0; one that stays is a leak. Soak and chaos runs
    read the page. ``remote_requests`` is the number of requests known from other replicas. ``tasks`` are
    asyncio tasks by the name of their coroutine, those of the picker itself included. ``streams`` are open
    ones by port, access logs and health watches included, but not those between replicas, which stay open.
    """
    ports = director.metrics.ports.items()
    loads = {name: stats.load() for name, stats in ports if name != REPLICA_PORT}
    return {
        "tasks": _tasks(),
        "streams": {name: load.streams for name, load in loads.items()},
        "stream_bytes": {name: load.receiving_bytes + load.unsent_bytes for name, load in loads.items()},
        "attempts": len(director.tracker),
        "remote_requests": remote_requests,
        "requests_in_flight": len(director.table),
        "queued_requests": 0 if director.flow is None else director.flow.queue.requests,
        "queued_bytes": 0 if director.flow is None else director.flow.queue.size,
        "prompt_bytes": director.table.prompt_bytes,
        "routing_history": len(director.history),
    }


def _tasks() -> dict[str, int]:
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    found = Counter(getattr(one, "__qualname__", type(one).__name__) for one in coroutines)
    return dict(sorted(found.items()))


KEPT_SECONDS: Final = 600.0
"""Time for which an empty priority level is reported as 0, so that autoscalers see that it is empty."""


def pick_document(explanation: Explanation) -> dict[str, object]:
    """Return the page ``/debug/pick``; ``picked`` has the ``ip:port`` of those that would be answered."""
    eligible = [row for row in explanation.rows if not row.refusal]
    return {
        "mode": explanation.mode,
        "prompt_bytes": explanation.prompt_bytes,
        "endpoints": [endpoint_document(row) for row in explanation.rows],
        "picked": [row.endpoint.hostport for row in eligible[: explanation.limit]],
        "full": bool(eligible) and eligible[0].full,
        **({} if explanation.split is None else {"disaggregation": split_document(explanation.split)}),
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
