"""Predictions for models with several KV cache groups, in real engines that run no model (``modelless``)."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.engine import install, tiny
from tests.engine.mix import Mix
from tests.engine.pool import Pool
from tests.engine.test_drafts import draft_flags
from tests.engine.test_main_path import error, one_by_one, report
from tests.engine.vllm import VllmEngine

pytestmark = pytest.mark.timeout(900)
STATES = ("full", "state", "state", "state")
"""Three of four layers have a state, as in Qwen3-Next."""


class PoolWithoutModel(Pool):
    """``Pool`` of engines with these layers."""

    def __init__(
        self, folder: Path, layers: Sequence[str | int], *flags: str, answer: Sequence[int] = ()
    ) -> None:
        """``answer``: tokens with which every answer begins; the others are drawn."""
        super().__init__(folder)
        self._layers = layers
        self._flags = flags
        self._answer = answer

    def _build_model(self) -> Path:
        return tiny.build("chatml", self._folder / "model")

    def _engine(self, number: int, ports: tuple[int, ...] = ()) -> VllmEngine:
        environment = {
            "KVIST_KV_GROUPS": json.dumps(self._layers),
            "KVIST_ANSWER": json.dumps(self._answer),
            "PYTHONPATH": str(install.newest_code()),
        }
        flags = ("--distributed-executor-backend", "modelless.Modelless", "--no-async-scheduling")
        more = ("--max-model-len", "4096", *self._flags)
        return VllmEngine(self.model, *flags, *more, ports=ports, environment=environment)


class PoolOfDraftsAlone(PoolWithoutModel):
    """``PoolWithoutModel`` whose engines compute the last block of each hit again."""

    def __init__(self, folder: Path, layers: Sequence[str | int]) -> None:
        super().__init__(folder, layers, *draft_flags(folder / "draft", look_ahead=False))

    def _build_model(self) -> Path:
        return tiny.with_drafts(super()._build_model(), self._folder / "draft")


@pytest.mark.parametrize("layers", [("full", "draft", *STATES[1:]), ("full", "draft", 256, 256)])
async def test_hits_of_such_models_with_drafts_are_predicted(
    tmp_path: Path, layers: Sequence[str | int]
) -> None:
    """150 mixed requests: the engine leaves the last block out before it looks where states or windows allow
    a hit to end, which is recognised; the later half of the predictions is off by little."""
    async with PoolOfDraftsAlone(tmp_path, layers) as pool:
        outcomes = await one_by_one(pool, Mix(1, "m"), 150)
        report("with drafts", outcomes)

    later = outcomes[75:]
    report("later", later)
    assert error(later) <= 0.08
    assert sum(one.predicted != one.cached for one in later) <= 25


async def test_hits_of_models_with_states_are_predicted(tmp_path: Path) -> None:
    """150 mixed requests to small caches: a hit ends where the engine has kept a state, and the index knows
    where; nearly all are exact."""
    async with PoolWithoutModel(tmp_path, STATES, "--num-gpu-blocks-override", "300") as pool:
        outcomes = await one_by_one(pool, Mix(1, "m"), 150)
        report("with states", outcomes)
        approximate = (await pool.page("/debug/fleet"))["approximate"]

    assert sum(one.predicted != one.cached for one in outcomes) <= 4
    assert error(outcomes) <= 0.03
    assert sum(one.cached for one in outcomes) > 10_000
    assert approximate == {}
