"""Contents of ``/debug/fleet``, ``/debug/index`` and ``/debug/held``."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from math import inf
from typing import Any, Final

from kvist_epp.director.director import Picker
from kvist_epp.director.endpoint_registry import Membership
from kvist_epp.endpoints.discovery import Discovery
from kvist_epp.endpoints.engine_state import EngineState
from kvist_epp.load.ledger import Ledger

REPLICA_PORTS: Final = ("peer",)
"""Ports whose streams are always open."""


def fleet_document(membership: Membership, discovery: Discovery) -> dict[str, Any]:
    """Return the page ``/debug/fleet``: the endpoints, and which of them are matched approximately."""
    picker = membership.picker
    document = endpoints_document(membership.scraper.states, picker.ledger, picker.clock(), picker.max_owed)
    keys = picker.lookup.members
    return {
        "discovery": discovery.describe(),
        "listed": membership.fleet is not None,
        "approximate": {key: why for key in keys if (why := membership.why_approximate(key))},
        **document,
    }


def endpoints_document(
    states: Mapping[str, EngineState], ledger: Ledger, now: float, max_owed: float = inf
) -> dict[str, object]:
    """Return each endpoint with its state, its last scrape and its backlog by the ledger.

    ``max_owed``: seconds of prefill from which an endpoint is full.
    """
    return {"endpoints": [_endpoint(state, ledger, now, max_owed) for state in states.values()]}


def _endpoint(state: EngineState, ledger: Ledger, now: float, max_owed: float) -> dict[str, object]:
    endpoint, load, rates = state.endpoint, ledger.load(state.endpoint.key), state.rates
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
        "owed_tokens": round(load.drain(now)),
        "requests": len(load.requests),
        "foreign_requests": load.foreign,
        "slots": load.slots,
        "full": load.full(max_owed),
        "prefill_tokens_per_second": round(load.rate, 1),
        "prefill_rate_learned": rates.prefill is not None,
        "decode_seconds": rates.decode_seconds,
        "seconds_per_token": rates.token_seconds,
        "hit_ratio": rates.hit_ratio,
        "scraped": asdict(state.sample),
    }


def index_document(membership: Membership) -> dict[str, Any]:
    """Return the page ``/debug/index``: the index, its model, and the counters of each publisher."""
    picker = membership.picker
    model = picker.model
    stats = {} if membership.subscriber is None else membership.subscriber.stats()
    return {
        "model": {
            "name": model.name if model else None,
            "faithful": model is not None and model.faithful,
            "why_not": model.why_not if model else "no --model",
        },
        "bytes_per_token": round(picker.lookup.bytes_per_token, 3),
        "index": picker.index.stats(),
        "on_their_way": len(picker.flights),
        "publishers": {
            name: asdict(counters) | {"held_blocks": picker.index.blocks(picker.index.publisher(name))}
            for name, counters in stats.items()
        },
    }


def in_flight_document(picker: Picker, remote_requests: int = 0) -> dict[str, Any]:
    """Return the page ``/debug/held``: what is held for requests in flight, as counts by part.

    A moment after the last request has ended all counts are 0; one that stays is a leak. Soak and chaos runs
    read the page. ``remote_requests`` is the number of requests known from other replicas. ``tasks`` are
    asyncio tasks by the name of their coroutine, those of the picker itself included. ``streams`` are open
    ones by port, access logs and health watches included.
    """
    ports = picker.metrics.ports.items()
    loads = {name: stats.load() for name, stats in ports if name not in REPLICA_PORTS}
    return {
        "tasks": _tasks(),
        "streams": {name: load.streams for name, load in loads.items()},
        "stream_bytes": {name: load.receiving_bytes + load.unsent_bytes for name, load in loads.items()},
        "ledger": len(picker.ledger),
        "of_peers": remote_requests,
        "flights": len(picker.flights),
        "waiting": 0 if picker.queue is None else picker.queue.waiting.requests,
        "waiting_bytes": 0 if picker.queue is None else picker.queue.waiting.size,
        "prompt_bytes": picker.flights.kept_bytes,
        "notes": len(picker.history),
    }


def _tasks() -> dict[str, int]:
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    found = Counter(getattr(one, "__qualname__", type(one).__name__) for one in coroutines)
    return dict(sorted(found.items()))
