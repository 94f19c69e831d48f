"""A rolling update of disaggregated engines while requests run: part of ``make bench-pd``.

The new revision has another model string, which is in the hash of NIXL's handshake, and equal weights: its
answers are those of the old one, and blocks of the two must not be exchanged.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.engine.disaggregation_faults import (
    FAILED_TRANSFERS,
    PAIR_FAILURES,
    READY,
    Trial,
)
from tests.engine.prefill_decode import SPLIT, TRANSFERRED, WARM, Answer

CLIENTS = 3


class Load:
    """Clients that send one request after the other while the block runs."""

    def __init__(self, trial: Trial) -> None:
        self.answered = 0
        self.lost: list[Answer] = []
        """Answers with another status than 200."""
        self._trial = trial
        self._over = False

    async def client(self) -> None:
        """Send requests until the end; each answer that came is to be right."""
        while not self._over:
            body = self._trial.request(self._trial.pool.random.randint(30, 250))
            answer = await self._trial.timed(self._trial.pool.ask("/v1/completions", body))
            if answer.status == 200:
                assert answer.same(await self._trial.pool.alone("/v1/completions", body)), answer
                self.answered += 1
            else:
                self.lost.append(answer)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Load"]:
        """Have the clients run within the block; raises what one of them has raised."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self.client())
            try:
                yield self
            finally:
                self._over = True

    async def goes_on(self) -> None:
        """Wait until each client has had an answer since now."""
        before = self.answered
        while self.answered < before + 2 * CLIENTS:
            await asyncio.sleep(0.1)


def _same_under_another_name(model: Path) -> Path:
    new = model.with_name(f"{model.name}-new")
    new.unlink(missing_ok=True)
    new.symlink_to(model)
    return new


async def a_rolling_update(trial: Trial) -> None:
    """Engines of another revision replace both engines under load: no answer is wrong, none is lost but those
    of the engine that was killed, revisions are never paired, and two of one revision are again.

    The first engine is taken off the list before it is killed, the second one is killed while it is listed.
    """
    pool = trial.pool
    new = _same_under_another_name(pool.model)
    async with Load(trial).running() as load:
        pool.listed((None, "decode"), ("old", "old"))
        await pool.until_below(READY, 2)
        await trial.idle(0)
        await pool.restart(0, model=new)
        pool.listed(("prefill", "decode"), ("new", "old"))
        await pool.until(READY, 2)
        split = await pool.counted(SPLIT)
        await load.goes_on()
        assert await pool.counted(SPLIT) == split
        assert load.lost == []

        await pool.restart(1, model=new)
        pool.listed(("prefill", "decode"), ("new", "new"))
        await pool.until(TRANSFERRED, 1, 1)
        await pool.until(WARM, 1)
        split = await pool.counted(SPLIT)
        await pool.until(SPLIT, split + 1)
    assert len(load.lost) <= CLIENTS, load.lost


async def engines_whose_labels_lie(trial: Trial) -> None:
    """Engines of different revisions with equal labels refuse each other: the pair fails, which is counted,
    no request is split, and legs sent by hand are computed where they are answered."""
    pool = trial.pool
    pool.listed((None, "decode"))
    await pool.until_below(READY, 2)
    await pool.restart(0)  # of the old revision; the other one is of the new one
    failures = await pool.counted(PAIR_FAILURES)
    pool.listed(("prefill", "decode"))
    await pool.until(PAIR_FAILURES, failures + 1)
    split = await pool.counted(SPLIT)
    await trial.right(trial.request())
    assert await pool.counted(SPLIT) == split

    body, failed = trial.request(), await pool.counted(FAILED_TRANSFERS, 1)
    found = await pool.first_leg(body)
    await trial.right(body, pool.direct(1, body | {"kv_transfer_params": found}))
    assert await pool.counted(FAILED_TRANSFERS, 1) > failed
