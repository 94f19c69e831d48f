"""A server of LMCache that is killed and started again under two real engines: ``make bench-tiers``.

    .venv/bin/python -m tests.engine.tiers.lmcache_faults

Not among the tests, since it takes a minute. LMCache 0.5.6 begins to watch its server with an engine's first
request, and makes itself known to a new server only when it has missed the old one. An engine that has
served no request before is never known again, and waits ``lmcache.mp.mq_timeout`` twice for each request.
"""

import asyncio
import signal
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from tests.engine.tiers.lmcache import CHUNK, LmcachePool, LmcacheServer
from tests.engine.tiers.tier_pool import Served, completion, expected, totals, wait_for

from kvist_epp.engines.vllm.tier_metrics import DEVICE, EXTERNAL


async def restarted_server(pool: LmcachePool) -> None:
    """A server that has started again is empty, which the picker learns from the engines' counters; then it
    promises no more than engines get of what they have stored anew, but for the blocks of one prompt at most:
    an engine that has not noticed yet reports one that the new server has not taken. All answers are
    right."""
    await pool.compute(1, [pool.mix.fresh()])  # watches the server from now on
    await pool.only(0)
    bodies = [pool.mix.fresh() for _ in range(14)]
    await pool.compute(0, bodies)
    held = [body for body in bodies if EXTERNAL in expected((await pool.explain(body))[0])]
    await pool.server.stop(signal.SIGKILL)
    lost = [await pool.serve(completion(pool.mix.fresh()))]
    await pool.server.start()
    lost += [await pool.serve(completion(body)) for body in held]

    async def is_forgotten() -> bool:
        return "kvist_epp_tier_resets_total{" in await pool.page("/metrics")

    await wait_for("the picker to forget the server", is_forgotten)
    again = [await pool.serve(completion(body)) for body in held]
    anew = await stored_anew(pool)
    await pool.only(0, 1)

    predicted, actual = totals(lost)
    assert predicted[EXTERNAL] >= 2048, predicted
    assert actual[EXTERNAL] <= 2 * CHUNK, actual  # unless a prompt of the mix begins alike
    missing = [one for one in again if one.predicted[EXTERNAL] > one.actual[EXTERNAL]]
    assert len(missing) <= 1, [(one.predicted, one.actual) for one in missing]
    assert [one for one in (*lost, *again) if not one.equal] == []
    assert anew.equal, anew
    assert anew.predicted == anew.actual, anew
    assert list((await pool.trusted()).values()) == [1, 1]


async def stored_anew(pool: LmcachePool) -> Served:
    """Compute prompts until the engine stores again, which it does once it has found the server; ask for one
    that has left the GPU."""
    for _ in range(30):
        body = pool.mix.fresh()
        await pool.compute(0, [body])
        await pool.evict(0, body, DEVICE)
        if EXTERNAL in expected((await pool.explain(body))[0]):
            return await pool.serve(completion(body))
    raise AssertionError("the engine does not store again")


async def main() -> int:
    """Run it; return 1 if it has failed."""
    with tempfile.TemporaryDirectory() as folder:
        async with LmcachePool(Path(folder), LmcacheServer()) as pool:
            started = time.monotonic()
            try:
                await restarted_server(pool)
                outcome = "ok"
            except (AssertionError, TimeoutError, aiohttp.ClientError) as error:
                outcome = f"failed: {error!r}"
            sys.stdout.write(f"restarted server {time.monotonic() - started:6.1f} s  {outcome}\n")
    return int(outcome != "ok")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
