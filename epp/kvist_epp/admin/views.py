"""What /debug/fleet and /debug/index show, as plain documents."""

import dataclasses
from typing import Any

from kvist_epp.admin.describe import fleet_document
from kvist_epp.fleet.watch import FileWatch
from kvist_epp.membership import Membership


def fleet(membership: Membership, watch: FileWatch) -> dict[str, Any]:
    """Every endpoint: its state, what it owes, what it serves, and whether its events are believed."""
    picker = membership.picker
    document = fleet_document(membership.scraper.states, picker.ledger, picker.clock())
    keys = picker.lookup.members
    return {
        "endpoints_file": {"path": str(watch.path), "problem": watch.problem, "refused": watch.bad_files},
        "listed": membership.fleet is not None,
        "approximate": {key: why for key in keys if (why := membership.why_approximate(key))},
        **document,
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
        name: dataclasses.asdict(counters)
        | {"held_blocks": picker.index.blocks(picker.index.publisher(name))}
        for name, counters in stats.items()
    }
