"""The plan against what a real engine reports: KV tokens of the CPU build within two per cent."""

import re
from pathlib import Path

import aiohttp
import pytest
from tests.engine import tiny
from tests.engine.vllm import VllmEngine

from kvist_operator.models.source import model_facts
from kvist_operator.plan import Plan, make_plan
from kvist_operator.spec import read_pool

HARNESS = ("--served-model-name", "--port", "--kv-events-config")
"""Flags the test harness gives itself."""


def planned(folder: Path) -> Plan:
    """Return the plan for the model in the folder, on this machine."""
    pool = read_pool(
        {
            "apiVersion": "kvist.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": "m"},
            "spec": {
                "model": {"source": str(folder)},
                "engine": {"version": "0.32.0", "maxModelLen": 8192, "maxNumSeqs": 8},
                "accelerator": {"product": "cpu", "memory": "5Gi"},
            },
        }
    )
    return make_plan(pool, model_facts(pool.model))


def flags(plan: Plan) -> list[str]:
    """The plan's flags, but for those of the harness."""
    words, kept = list(plan.argv[2:]), []
    while words:
        flag = words.pop(0)
        values = []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        if flag not in HARNESS:
            kept += [flag, *values]
    return kept


async def reported(engine: VllmEngine) -> dict[str, str]:
    """The labels of the engine's cache_config_info."""
    async with aiohttp.ClientSession() as client, client.get(f"{engine.url}/metrics") as response:
        page = await response.text()
    line = next(line for line in page.splitlines() if line.startswith("vllm:cache_config_info{"))
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


@pytest.mark.timeout(900)
async def test_planned_kv_tokens_are_what_the_engine_reports(tmp_path: Path) -> None:
    """The planned arguments, a real start, and the figure it exports."""
    folder = tiny.build("llama3", tmp_path / "llama3")
    plan = planned(folder)
    async with VllmEngine(
        folder, "--dtype", "bfloat16", *flags(plan), block_size=plan.settings.block
    ) as engine:
        found = await reported(engine)

    assert int(found["block_size"]) == plan.settings.block
    assert plan.memory.kv_tokens == pytest.approx(int(found["kv_cache_size_tokens"]), rel=0.02)
