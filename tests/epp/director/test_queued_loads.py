"""Requests that waited in the queue and whose prefix is on a slow tier."""

import json
from typing import Any

import pytest
from tests.epp.parts import MODEL, Clock, chat
from tests.epp.queued_director import QueuedDirector, Wait

from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.prompt.request import parse

TEXT = "A question about a document that was read long ago. " * 8
BLOCK = 16


def on_disk(queued: QueuedDirector, body: dict[str, Any]) -> None:
    """Put the prompt's blocks on the disk of the first endpoint, and nowhere else."""
    [prompt] = MODEL.prompts(parse("/v1/chat/completions", json.dumps(body).encode()))
    ids = MODEL.encode(prompt.decode())
    blocks = [MODEL.vocabulary.join(ids[at : at + BLOCK]) for at in range(0, len(ids) - BLOCK + 1, BLOCK)]
    index, names = queued.director.index, list(range(1, len(blocks) + 1))
    number = index.publisher(f"{queued.parts.endpoints[0].key}/0")
    assert index.stored(number, (None, None), None, names, blocks, block_size=BLOCK)
    for name in names:
        index.held(number, (name,), "STORAGE", counted=False)
    index.removed(number, names)


@pytest.mark.parametrize("tiers", [True, False])
async def test_a_request_that_waited_is_kept_from_a_slow_tier(tiers: bool) -> None:
    """The body of a request that is dispatched tells the engine not to load from the disk, if it has tiers;
    without any engine with tiers no body is kept in the queue."""
    queued = QueuedDirector(1, 1, Clock())
    on_disk(queued, chat(TEXT))
    load = queued.director.tracker.load(queued.parts.endpoints[0].key)
    load.tier_rates, load.skipped_media = {"STORAGE": 10.0}, frozenset({"STORAGE"})
    queued.director.limits_loads = tiers
    queued.ask("first", text="short")
    waiting = queued.ask("second", text=TEXT)
    assert isinstance(waiting, Wait)
    kept = waiting.queued.context.body
    queued.ends("first")
    answer = await waiting

    assert isinstance(answer, PickResult)
    assert bool(kept) is tiers
    if tiers:
        assert answer.body is not None
        assert json.loads(answer.body)["kv_transfer_params"] == {"kv_load_tiers": [{"medium": "CPU"}]}
    else:
        assert answer.body is None
