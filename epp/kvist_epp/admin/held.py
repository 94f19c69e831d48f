"""What is held for requests that are on their way: a moment after the last one has ended, nothing.

The page ``/debug/held``. Soaks and chaos runs read it; a count that stays is a leak.
"""

import asyncio
from collections import Counter
from typing import Any, Final

from kvist_epp.director.director import Picker
from kvist_epp.flowcontrol.flow_controller import Queue

LASTING: Final = ("peer",)
"""Ports whose streams are there all the time."""


def held(picker: Picker, others: int = 0) -> dict[str, Any]:
    """Counts by part; ``others`` is the number of other replicas' requests that are known here.

    ``tasks``: asyncio tasks by the name of their coroutine; those of the picker's own life are among them.
    ``streams``: open ones by port, gateways' access logs and health watches included.
    """
    ports = picker.metrics.ports.items()
    loads = {name: tally.load() for name, tally in ports if name not in LASTING}
    return {
        "tasks": _tasks(),
        "streams": {name: load.streams for name, load in loads.items()},
        "stream_bytes": {name: load.receiving_bytes + load.unsent_bytes for name, load in loads.items()},
        "ledger": len(picker.ledger),
        "of_peers": others,
        "flights": len(picker.flights),
        "waiting": 0 if picker.queue is None else picker.queue.waiting.requests,
        "waiting_bytes": 0 if picker.queue is None else picker.queue.waiting.size,
        "prompt_bytes": picker.flights.kept_bytes,
        "notes": len(picker.history),
        **_waiting(picker.queue),
    }


def _waiting(queue: Queue | None) -> dict[str, int]:
    requests, size = (queue.waiting.requests, queue.waiting.size) if queue is not None else (0, 0)
    return {"waiting": requests, "waiting_bytes": size}


def _tasks() -> dict[str, int]:
    found = Counter(_name(task) for task in asyncio.all_tasks())
    return dict(sorted(found.items()))


def _name(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return getattr(coroutine, "__qualname__", type(coroutine).__name__)
