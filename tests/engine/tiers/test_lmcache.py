"""A server of LMCache end to end: two real engines that use it, behind picker and Envoy."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.engine.tiers.lmcache import CHUNK, LmcachePool, LmcacheServer
from tests.engine.tiers.test_tiers import ask, came_from, error, where
from tests.engine.tiers.tier_pool import TierMix, expected, totals

from kvist_epp.engines.vllm.tier_metrics import DEVICE, EXTERNAL

REQUESTS = int(os.environ.get("KVIST_LMCACHE_REQUESTS", "40"))
"""Of the mix; ``make bench-tiers`` sends 300."""
LONG = REQUESTS >= 300
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800 if LONG else 1200)]
KINDS = (32, 20, 0) if LONG else (9, 5, 0)
"""Different prompts, plain and salted. LMCache does not tell adapters apart, so that there are none."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LmcachePool]:
    """The server, two engines that use it, one that does not, the picker, Envoy."""
    folder = Path(tmp_path_factory.mktemp("lmcache"))
    async with LmcachePool(folder, LmcacheServer()) as running:
        yield running


async def test_what_leaves_the_gpu_is_loaded_from_the_server_by_both_engines(pool: LmcachePool) -> None:
    """A prompt is computed, then served from the GPU, from the server, and by the other engine from what this
    one has sent there: each time as the picker expected, with text and log probabilities of a lone engine."""
    body = pool.mix.fresh()
    first = await ask(pool, body)
    number = where(pool, first)
    await pool.only(number)
    await pool.settled()
    again = await ask(pool, body)
    await pool.evict(number, body, DEVICE)
    evicted = await ask(pool, body)
    await pool.only(1 - number)
    other = await ask(pool, body)
    await pool.only(0, 1)

    assert (first.equal, first.predicted, first.actual) == (True, {}, {})
    assert came_from(again, DEVICE)
    assert came_from(evicted, EXTERNAL)
    assert came_from(other, EXTERNAL)
    assert where(pool, other) != number


async def test_predictions_of_the_server_s_part_are_right(pool: LmcachePool) -> None:
    """40 requests (``make bench-tiers``: 300), plain and salted with equal text, which no GPU holds all:
    predicted and actual tokens differ by 2 % at most on the GPU, and by 5 % on the server, whose evictions no
    event tells; all answers are right, and trust is kept."""
    mix, served = TierMix(1, *KINDS), []
    for _ in range(REQUESTS):
        await pool.settled(1)
        served.append(await pool.serve(mix.next()))
    predicted, actual = totals(served)
    shown = ", ".join(f"{source} {error(served, source):.2%}" for source in (DEVICE, EXTERNAL))
    print(  # noqa: T201 - figures for the log of the run
        f"\n{len(served)} requests: predicted {dict(predicted)}, actual {dict(actual)}; errors: {shown}"
    )

    assert [one for one in served if not one.equal] == []
    assert min(actual[source] for source in (DEVICE, EXTERNAL)) >= 4 * CHUNK
    assert error(served, DEVICE) <= 0.02
    assert error(served, EXTERNAL) <= 0.05
    assert (await pool.page("/metrics")).count("kvist_epp_tier_resets_total{") == 0
    assert list((await pool.trusted()).values()) == [1, 1]


async def test_a_server_that_was_killed_costs_no_answer_and_no_trust(pool: LmcachePool) -> None:
    """Prompts that only a killed server has are computed, after LMCache has noticed: all answers are right,
    and the picker trusts its index of the engine. ``lmcache_faults`` starts the server again."""
    await pool.only(0)
    bodies = [pool.mix.fresh() for _ in range(6)]
    await pool.compute(0, bodies)
    held = [body for body in bodies if EXTERNAL in expected((await pool.explain(body))[0])]
    await pool.server.stop(signal.SIGKILL)
    lost = [await ask(pool, body) for body in held[:3]]

    assert len(lost) == 3
    assert [(one.equal, one.actual[EXTERNAL]) for one in lost] == [(True, 0)] * 3
    assert list((await pool.trusted()).values()) == [1]
