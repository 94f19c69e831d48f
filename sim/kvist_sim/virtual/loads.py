"""Loads from slower places in virtual time: what the GPU announces, and what a request forbids."""

import json
from typing import NamedTuple

from kvist_sim.engine.tiers import DISK, HOST, SHARED
from kvist_sim.virtual.jobs import Call, Job


class LoadNote(NamedTuple):
    """The GPU announces blocks that were loaded, not computed: blocks ``first`` up to ``end`` of the job.

    A real event has no parent if nothing of the prompt was on the GPU, whatever was loaded before.
    """

    job: Job
    first: int
    end: int


def limit_loads(request: object, body: bytes | None) -> None:
    """Let the engine load only from where the body that the picker has written allows it to
    (``kv_transfer_params.kv_load_tiers``); None: it has not."""
    if body is None or not isinstance(request, Call):
        return
    named = {tier["medium"] for tier in json.loads(body)["kv_transfer_params"]["kv_load_tiers"]}
    request.load_tiers = frozenset([m for m in (HOST, DISK, SHARED) if (m if m == HOST else DISK) in named])
