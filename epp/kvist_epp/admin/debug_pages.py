"""Contents of ``/debug/fleet``, ``/debug/index`` and ``/debug/held``."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from math import inf
from typing import Any, Final

from kvist_epp.director.director import Director
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.endpoints.discovery import Discovery
from kvist_epp.endpoints.engine_state import EngineState
from kvist_epp.load.tracker import LoadTracker

REPLICA_PORTS: Final = ("peer",)
"""Ports whose streams are always open."""


def fleet_document(registry: EndpointRegistry, discovery: Discovery) -> dict[str, Any]:
    """Return the page ``/debug/fleet``: the endpoints, and which of them are matched approximately."""
    director = registry.director
    now = registry.clock()
    states = {key: state.scrape for key, state in registry.states.items()}
    document = endpoints_document(states, director.tracker, now, director.max_backlog)
    return {
        "discovery": discovery.describe(),
        "listed": registry.fleet is not None,
        "approximate": {key: why for key in states if (why := registry.why_approximate(key))},
        **document,
    }


def endpoints_document(
    states: Mapping[str, EngineState], tracker: LoadTracker, now: float, max_backlog: float = inf
) -> dict[str, object]:
    """Return each endpoint with its state, its last scrape and its backlog by the load tracker.

    ``max_backlog``: seconds of prefill from which an endpoint is full.
    """
    return {"endpoints": [_endpoint(state, tracker, now, max_backlog) for state in states.values()]}


def _endpoint(state: EngineState, tracker: LoadTracker, now: float, max_backlog: float) -> dict[str, object]:
    endpoint, load, rates = state.endpoint, tracker.load(state.endpoint.key), state.rates
    return {
        "endpoint": endpoint.hostport,
        "name": endpoint.key,
        "labels": dict(endpoint.labels),
        "kv_events": [source.events for source in endpoint.sources],
        "state": state.state.value,
        "problem": state.problem or state.models_problem,
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
        "scraped": asdict(state.sample),
    }


def index_document(registry: EndpointRegistry) -> dict[str, Any]:
    """Return the page ``/debug/index``: the index, its model, and the counters of each publisher."""
    director = registry.director
    model = director.model
    stats = {} if registry.subscriber is None else registry.subscriber.stats()
    return {
        "model": {
            "name": model.name if model else None,
            "faithful": model is not None and model.faithful,
            "why_not": model.why_not if model else "no --model",
        },
        "bytes_per_token": round(director.lookup.bytes_per_token, 3),
        "index": director.index.stats(),
        "requests_in_flight": len(director.table),
        "publishers": {
            name: asdict(counters) | {"held_blocks": director.index.blocks(director.index.publisher(name))}
            for name, counters in stats.items()
        },
    }


def in_flight_document(director: Director, remote_requests: int = 0) -> dict[str, Any]:
    """Return the page ``/debug/held``: what is held for requests in flight, as counts by part.

    A moment after the last request has ended all counts are 0; one that stays is a leak. Soak and chaos runs
    read the page. ``remote_requests`` is the number of requests known from other replicas. ``tasks`` are
    asyncio tasks by the name of their coroutine, those of the picker itself included. ``streams`` are open
    ones by port, access logs and health watches included.
    """
    ports = director.metrics.ports.items()
    loads = {name: stats.load() for name, stats in ports if name not in REPLICA_PORTS}
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
