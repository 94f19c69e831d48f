"""Data-parallel ranks behind one port: real engines of two ranks each, which run no model."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.engine.mix import CHAT, Mix, Turn
from tests.engine.test_groups import PoolWithoutModel
from tests.engine.test_main_path import error, one_by_one, report

pytestmark = pytest.mark.timeout(900)
RANKS = 2


class PoolOfRanks(PoolWithoutModel):
    """``PoolWithoutModel`` whose engines have two ranks each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ("full",), "--data-parallel-size", str(RANKS))

    def _endpoint(self, number: int) -> dict[str, Any]:
        return self._row(number) | {"dataParallelRanks": RANKS}


async def test_hits_of_ranks_are_predicted_and_conversations_spread(tmp_path: Path) -> None:
    """100 mixed requests one at a time are exact but for few; of 120 conversations that begin alike, at once,
    each rank of both engines gets some, though one of them had the beginning first."""
    async with PoolOfRanks(tmp_path) as pool:
        outcomes = await one_by_one(pool, Mix(1, "m"), 100)
        report("two ranks", outcomes)
        fleet = await pool.page("/debug/fleet")
        system = {"role": "system", "content": Mix(7, "m").text(6_000)}

        async def talk(number: int) -> None:
            messages = [system, {"role": "user", "content": f"question {number}"}]
            await pool.ask(Turn(CHAT, {"model": "m", "messages": messages, "max_tokens": 200}))

        await talk(0)  # one rank of one engine has the system prompt
        before = await running_of_ranks(pool)
        await asyncio.gather(*(talk(number) for number in range(1, 121)))
        after = await running_of_ranks(pool)

    assert fleet["approximate"] == {}
    assert sum(one.predicted != one.cached for one in outcomes) <= 5
    assert error(outcomes) <= 0.03
    got = {key: after[key] - before[key] for key in after}

    assert len(got) == 2 * RANKS
    assert min(got.values()) >= 3, got


async def running_of_ranks(pool: PoolOfRanks) -> Counter[tuple[int, str]]:
    """Return the requests that each rank of each engine has ended so far."""
    found: Counter[tuple[int, str]] = Counter()
    for number, engine in enumerate(pool.engines):
        async with pool.client.get(f"{engine.url}/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith("vllm:request_success_total"):
                    rank = line.partition('engine="')[2].partition('"')[0]
                    found[number, rank] += int(float(line.rpartition(" ")[2]))
    return found
