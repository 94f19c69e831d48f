"""What /debug/fleet and /debug/index show, as plain documents."""

from collections.abc import Mapping
from dataclasses import asdict
from math import inf
from typing import Any

from kvist_epp.director.endpoint_registry import Membership
from kvist_epp.endpoints.discovery import Discovery
from kvist_epp.endpoints.scraper import EngineState
from kvist_epp.load.ledger import Ledger


def fleet(membership: Membership, discovery: Discovery) -> dict[str, Any]:
    """Every endpoint: its state, what it owes, what it serves, and whether its events are believed."""
    picker = membership.picker
    document = fleet_document(membership.scraper.states, picker.ledger, picker.clock(), picker.max_owed)
    keys = picker.lookup.members
    return {
        "discovery": discovery.describe(),
        "listed": membership.fleet is not None,
        "approximate": {key: why for key in keys if (why := membership.why_approximate(key))},
        **document,
    }


def fleet_document(
    states: Mapping[str, EngineState], ledger: Ledger, now: float, max_owed: float = inf
) -> dict[str, object]:
    """``/debug/fleet``: each endpoint, what it said at the last scrape and what it owes by our books.

    ``max_owed``: seconds of prefill from which an endpoint is full.
    """
    return {"endpoints": [_engine(state, ledger, now, max_owed) for state in states.values()]}


def _engine(state: EngineState, ledger: Ledger, now: float, max_owed: float) -> dict[str, object]:
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


def index(membership: Membership) -> dict[str, Any]:
    """The index, the model it decodes with, and each publisher's counters."""
    picker = membership.picker
    model = picker.model
    return {
        "model": {
            "name": model.name if model else None,
            "faithful": model is not None and model.faithful,
            "why_not": model.why_not if model else "no --model",
        },
        "bytes_per_token": round(picker.lookup.bytes_per_token, 3),
        "index": picker.index.stats(),
        "on_their_way": len(picker.flights),
        "publishers": _publishers(membership),
    }


def _publishers(membership: Membership) -> dict[str, Any]:
    if membership.subscriber is None:
        return {}
    stats = membership.subscriber.stats()
    picker = membership.picker
    return {
        name: asdict(counters) | {"held_blocks": picker.index.blocks(picker.index.publisher(name))}
        for name, counters in stats.items()
    }
