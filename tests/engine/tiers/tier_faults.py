"""Places of two real engines that fail: ``make bench-tiers``.

    .venv/bin/python -m tests.engine.tiers.tier_faults

Those of ``test_tiers`` once more, after one another and after the restart of an engine, which is not among
the tests since it takes a minute.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from tests.engine.tiers.test_tiers import (
    ask,
    came_from,
    down_the_places,
    shown,
    test_a_full_volume_costs_only_the_places_on_it,
    test_a_slower_disk_is_not_waited_for,
    test_storage_is_cleaned_under_way,
)
from tests.engine.tiers.tier_pool import ADAPTER, FREE, TierPool

from kvist_epp.engines.vllm.tier_metrics import DEVICE, DISK, HOST


async def engine_restarts_without_token_ids_in_events(pool: TierPool) -> None:
    """An engine restarts with a warm disk and vLLM's default events, which name blocks of tiers by their hash
    only: what the disk has is expected and found at once, and new prompts, salted ones and those of an
    adapter too, are followed down all places."""
    kinds: list[dict[str, str]] = [{}, {"cache_salt": "someone"}, {"model": ADAPTER}]
    old, new = ([pool.mix.fresh(**kind) for kind in kinds] for _ in range(2))
    await pool.compute(0, old)
    pool.self_describing[1] = False
    await pool.restart(1)
    await pool.compute(1, [pool.mix.fresh()])  # its first events show the restart: a replay has to end
    await pool.only(1)
    warm = [await ask(pool, body) for body in old]
    walks = [await down_the_places(pool, body) for body in new]
    await pool.only(0, 1)

    assert [came_from(one, DISK) for one in warm] == [True] * 3, shown(warm)
    for first, *others in walks:
        assert (first.equal, first.actual) == (True, {}), shown([first])
        places = zip(others, (DEVICE, HOST, DISK), strict=True)
        assert [came_from(one, source) for one, source in places] == [True] * 3, shown(others)


FAULTS = (
    test_a_slower_disk_is_not_waited_for,
    test_storage_is_cleaned_under_way,
    engine_restarts_without_token_ids_in_events,
    test_a_full_volume_costs_only_the_places_on_it,
    test_storage_is_cleaned_under_way,
    test_a_slower_disk_is_not_waited_for,
)


async def main() -> int:
    """Run all; return the number of those that failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        async with TierPool(Path(folder)) as pool:
            for fault in FAULTS:
                started = time.monotonic()
                try:
                    await pool.only(0, 1)  # whatever the one before has left
                    for number in range(2):
                        pool.speed(number, **FREE)
                    await fault(pool)
                    outcome = "ok"
                except (AssertionError, TimeoutError, aiohttp.ClientError) as error:
                    outcome, failed = f"failed: {error!r}", failed + 1
                name = fault.__name__.removeprefix("test_").replace("_", " ")
                sys.stdout.write(f"{name} {time.monotonic() - started:6.1f} s  {outcome}\n")
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
