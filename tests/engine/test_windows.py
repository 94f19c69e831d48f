"""Predictions for a model with sliding windows, whose real engines have three KV cache groups."""

from pathlib import Path

import pytest
from tests.engine import tiny
from tests.engine.pool import Pool
from tests.engine.test_main_path import predicted_hits
from tests.engine.vllm import VllmEngine

FLAGS = ("--num-gpu-blocks-override", "500", "--max-model-len", "4096")
"""A cache of 7,474 tokens in three groups, so that evictions are frequent."""


class PoolWithWindows(Pool):
    """``Pool`` with such a model."""

    def _build_model(self) -> Path:
        return tiny.with_windows(tiny.build("chatml", self._folder / "model"))

    def _engine(self, number: int, ports: tuple[int, ...] = ()) -> VllmEngine:
        return VllmEngine(self.model, *FLAGS, ports=ports)


@pytest.mark.timeout(900)
async def test_hits_of_models_with_windows_are_predicted(tmp_path: Path) -> None:
    """100 mixed requests one at a time are predicted, at most one of them too long and none short by more
    than a block, and the index stays trusted. vLLM keeps little of groups with a window, so that hits are
    shorter than what the group with the whole prefix holds, also where one parts from the prompt just sent.
    """
    async with PoolWithWindows(tmp_path) as pool:
        outcomes = await predicted_hits(pool, "with sliding windows", 100)
        publishers = (await pool.page("/debug/index"))["publishers"]

    assert sum(one.predicted > one.cached for one in outcomes) <= 1
    assert [one["other_groups"] for one in publishers.values()] == [0, 0]
