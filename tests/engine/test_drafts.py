"""Predictions for engines that draft tokens with EAGLE: each hit is a block shorter, or blocks look ahead."""

import json
from pathlib import Path

import pytest
from tests.engine import install, tiny
from tests.engine.mix import Mix
from tests.engine.pool import BLOCK, Pool
from tests.engine.test_main_path import one_by_one, report
from tests.engine.vllm import VllmEngine

from kvist_epp.index.last_block import LEAST

REQUESTS = 70
LATE = 2
"""Requests of an endpoint that may be predicted before the report of the one that settles it has come."""
UNSETTLED = 2
"""Hits of an endpoint that may be a block shorter for another reason: the last token of an answer's last
block may join the text that follows, which shows once that text fills a block (decision 1)."""


def draft_flags(draft: Path, *, look_ahead: bool = True) -> tuple[str, ...]:
    """The flags of an engine with this draft model; ``look_ahead`` False: its hashes are those before vLLM
    0.33."""
    drafts: dict[str, object] = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    if not look_ahead:
        drafts["disable_lookahead_block_hashes"] = True
    return ("--speculative-config", json.dumps(drafts))


class PoolWithDrafts(Pool):
    """``Pool`` with a draft model."""

    def _build_model(self) -> Path:
        return tiny.with_drafts(tiny.build("chatml", self._folder / "model"), self._folder / "draft")

    def _engine(self, number: int, ports: tuple[int, ...] = ()) -> VllmEngine:
        flags = (*draft_flags(self._folder / "draft"), "--max-model-len", "4096")
        return VllmEngine(self.model, *flags, ports=ports, environment=self._environment())

    def _environment(self) -> dict[str, str]:
        return {}


class PoolOfNewest(PoolWithDrafts):
    """``PoolWithDrafts`` whose engines have hashes that cover the token behind each block."""

    def _environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(install.newest_code())}


@pytest.mark.timeout(900)
async def test_hits_of_engines_with_drafts_are_predicted(tmp_path: Path) -> None:
    """70 mixed requests one at a time: the first hits of each engine are a block shorter than the index says,
    nearly all others are exact, and the index stays trusted."""
    async with PoolWithDrafts(tmp_path) as pool:
        outcomes = await one_by_one(pool, Mix(1, "m"), REQUESTS)
        report("with drafts", outcomes)
        approximate = (await pool.page("/debug/fleet"))["approximate"]

    hits: dict[str, list[int]] = {}
    """By how many tokens each hit is shorter than predicted, by endpoint."""
    for one in outcomes:
        if one.predicted or one.cached:
            hits.setdefault(one.endpoint, []).append(one.predicted - one.cached)
    assert len(hits) == 2
    for off in hits.values():
        assert len(off) > LEAST + LATE + UNSETTLED
        further = [now - BLOCK * (number < LEAST) for number, now in enumerate(off)]
        assert set(further) <= {0, BLOCK}
        assert further.count(BLOCK) <= LATE + UNSETTLED
    assert sum(one.cached for one in outcomes) > 5_000
    assert approximate == {}


@pytest.mark.timeout(900)
async def test_hits_of_engines_whose_hashes_look_ahead_are_predicted(tmp_path: Path) -> None:
    """70 mixed requests one at a time: nearly all hits are exact from the beginning, and none is wrong by
    more than a block: a prompt that is all cached, up to the token that its last block's hash covers, is a
    block short."""
    async with PoolOfNewest(tmp_path) as pool:
        outcomes = await one_by_one(pool, Mix(1, "m"), REQUESTS)
        report("with drafts and hashes that look ahead", outcomes)
        approximate = (await pool.page("/debug/fleet"))["approximate"]

    off = [one for one in outcomes if one.predicted != one.cached]
    ended = [one for one in off if one.cached == one.prompt_tokens - 1 == one.predicted + BLOCK]
    assert {abs(one.predicted - one.cached) for one in off} <= {BLOCK}
    assert len(off) - len(ended) <= LATE + UNSETTLED
    assert sum(one.cached for one in outcomes) > 5_000
    assert approximate == {}
