"""Faults of disaggregated requests on real engines: ``make bench-pd``, with ``disaggregation_bench``.

Each function states its promise, and raises AssertionError if it does not hold. Its bound says how long a
client waits at most for its answer, and why, on a machine that is not busy; the time is printed beside it.
They are run in order, since engines that are killed stay so until they are started again.
"""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from tests.engine.mix import COMPLETION
from tests.engine.prefill_decode import (
    FALLBACKS,
    LEASE_SECONDS,
    SPLIT,
    TRANSFERRED,
    WARM,
    Answer,
    PrefillDecode,
)

ANSWER: Final = {"model": "m", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 2}
FAILED_TRANSFERS: Final = r"vllm:nixl_num_failed_transfers_total\{.*"
EXPIRED: Final = r"vllm:nixl_num_kv_expired_reqs_total\{.*"
WAITING: Final = r"vllm:num_requests_waiting\{.*"
RUNNING: Final = r"vllm:num_requests_running\{.*"
BUSY: Final = r"vllm:num_requests_(running|waiting)\{.*"
READY: Final = r'kvist_epp_endpoints\{state="ready"\}'
PAIR_FAILURES: Final = "kvist_epp_disaggregation_pair_failures_total"


class Trial:
    """The running parts with which a fault is tried, and how long clients waited."""

    def __init__(self, pool: PrefillDecode) -> None:
        self.pool = pool
        self.slowest = 0.0
        """Seconds of the slowest answer."""

    def request(self, words: int = 200) -> dict[str, Any]:
        """Return a completion with a new prompt."""
        return ANSWER | {"prompt": self.pool.words(words)}

    async def timed(self, answer: Awaitable[Answer]) -> Answer:
        """Return an answer, and note how long it took from now."""
        started = time.monotonic()
        try:
            return await answer
        finally:
            self.slowest = max(self.slowest, time.monotonic() - started)

    async def right(self, body: dict[str, Any], asked: Awaitable[Answer] | None = None) -> Answer:
        """Send a request, unless it was sent already, and compare its answer with the lone engine's."""
        answer = await self.timed(asked or self.pool.ask(COMPLETION, body))
        alone = await self.pool.alone(COMPLETION, body)
        assert answer.same(alone), (answer, alone)
        return answer

    async def splits(self) -> None:
        """Send a request, which is to be split and to have the right answer."""
        before = await self.pool.counted(SPLIT)
        await self.right(self.request())
        assert await self.pool.counted(SPLIT) == before + 1

    async def splits_again(self) -> None:
        """Send requests, which are to have the right answers, until one of them is split."""
        before = await self.pool.counted(SPLIT)
        while await self.pool.counted(SPLIT) == before:
            await self.right(self.request())

    async def idle(self, number: int) -> None:
        """Wait until an engine has no request."""
        while await self.pool.counted(BUSY, number):
            await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def falls_back(self, reason: str) -> AsyncIterator[None]:
        """One request of the block is to be computed where it is answered, for this reason."""
        before = await self.pool.counted(FALLBACKS % reason)
        yield
        counted = await self.pool.counted(FALLBACKS % reason) - before
        assert counted == 1, await self.pool.series("kvist_epp_disaggregation_(decisions|fallbacks).*")


@dataclass(frozen=True, slots=True)
class Fault:
    """One trial, with the bound of its answers."""

    run: Callable[[Trial], Awaitable[None]]
    seconds: float
    """How long a client waits at most …"""
    why: str
    """… and why."""


async def roles_are_swapped(trial: Trial) -> None:
    """Endpoints change their roles while requests run: answers stay right, and the other one computes."""
    pool = trial.pool
    requests = [asyncio.create_task(trial.right(trial.request())) for _ in range(4)]
    pool.listed(("decode", "prefill"))
    await asyncio.gather(*requests)
    await pool.until(WARM, 2)
    before = await pool.counted(TRANSFERRED, 0)
    await trial.splits()
    assert await pool.counted(TRANSFERRED, 0) > before
    pool.listed(("prefill", "decode"))
    before = await pool.counted(TRANSFERRED, 1)
    while await pool.counted(TRANSFERRED, 1) == before:  # until the picker has read the file
        await trial.right(trial.request())


async def a_prompt_is_refused(trial: Trial) -> None:
    """A prompt that both engines refuse has the refusal of the decode endpoint, and rests no endpoint."""
    body = trial.request(1600)
    async with trial.falls_back("refused"):
        answer = await trial.timed(trial.pool.ask(COMPLETION, body))
        alone = await trial.pool.alone(COMPLETION, body)
    assert answer.status == alone.status == 400, (answer, alone)
    await trial.splits()


async def the_decode_engine_keeps_a_request_waiting(trial: Trial) -> None:
    """A request that waits in the decode engine's queue for longer than the lease, while the prefill engine
    computes other prompts, has the right answer: the decode engine extends the lease."""
    pool, body = trial.pool, trial.request(300)
    await asyncio.sleep(LEASE_SECONDS * 1.2)  # leases of the trials before end
    expired = await pool.counted(EXPIRED, 0)
    asked = await pool.begin(body)
    filler = ANSWER | {"max_tokens": 950}
    fillers = [asyncio.create_task(pool.direct(1, filler | {"prompt": pool.words(5)})) for _ in range(24)]
    await pool.until(BUSY, len(fillers) + 1, 1)  # three rounds of eight, and behind them the request
    await trial.idle(0)
    await asyncio.sleep(LEASE_SECONDS * 1.2)
    assert not asked.done(), "the decode engine was quicker than the lease"
    await pool.overwrite(0)
    for each in fillers:
        each.cancel()
    await trial.right(body, asked)
    assert await pool.counted(EXPIRED, 0) == expired


async def leg_1_takes_too_long(trial: Trial) -> None:
    """A prefill engine that stands still holds a request for the time limit of leg 1; then the decode engine
    computes the prompt, and the next requests at once."""
    pool, body = trial.pool, trial.request()
    pool.engines[0].send(signal.SIGSTOP)
    try:
        async with trial.falls_back("timeout"):
            await trial.right(body)
        slowest, trial.slowest = trial.slowest, 0.0
        await trial.right(trial.request())
        assert trial.slowest < slowest  # not split: it did not wait for leg 1
        trial.slowest = slowest
    finally:
        pool.engines[0].send(signal.SIGCONT)
    await trial.idle(0)


async def a_client_leaves_in_leg_1(trial: Trial) -> None:
    """The prefill engine aborts the request of a client that has left, and no place is kept for it."""
    pool = trial.pool
    name = r'kvist_epp_requests_total\{outcome="rejected-context-cancelled"\}'
    before = await pool.counted(name)
    asked = await pool.begin(trial.request(700))
    asked.cancel()
    await pool.until(name, before + 1)
    await trial.idle(0)
    await trial.splits()


async def the_port_is_wrong(trial: Trial) -> None:
    """A prefill endpoint that is listed with a wrong port is never paired, which is counted; requests are
    answered by the decode endpoint."""
    pool = trial.pool
    before, failures = await pool.counted(SPLIT), await pool.counted(PAIR_FAILURES)
    pool.listed(("prefill", "decode"), port=9)
    await pool.until(READY, 1)
    while await pool.counted(WARM):
        await trial.right(trial.request())
    split = await pool.counted(SPLIT)
    await trial.right(trial.request())
    assert await pool.counted(SPLIT) == split
    assert await pool.counted(PAIR_FAILURES) >= failures
    pool.listed(("prefill", "decode"))
    await pool.until(WARM, 1)
    assert await pool.counted(SPLIT) >= before
    await trial.splits()


async def peers_are_unreachable(trial: Trial) -> None:
    """A transfer from a port where no engine listens is computed anew after 5 s, and counted by the engine:
    this is how the picker finds pairs that cannot be connected."""
    pool, body = trial.pool, trial.request()
    found = await pool.first_leg(body)
    found |= {"remote_port": 9, "remote_engine_id": "elsewhere"}
    before = await pool.counted(FAILED_TRANSFERS, 1)
    await trial.right(body, pool.direct(1, body | {"kv_transfer_params": found}))
    assert await pool.counted(FAILED_TRANSFERS, 1) > before


async def picker_is_killed_in_leg_1(trial: Trial) -> None:
    """The gateway decides on the request of a picker that is killed; the next picker connects the engines
    anew and splits requests again."""
    asked = await trial.pool.begin(trial.request())
    await trial.pool.kill_picker()
    answer = await trial.timed(asked)
    assert answer.status in (200, 503), answer
    await trial.pool.replace_picker()
    await trial.splits()


async def picker_is_killed_between_the_legs(trial: Trial) -> None:
    """A picker that is killed when leg 1 has ended loses its own request at most, and the prefill engine
    releases the blocks that are not fetched when their lease ends."""
    pool = trial.pool
    expired = await pool.counted(EXPIRED, 0)
    asked = await pool.begin(trial.request())
    async with pool.stopped():
        await pool.leg_1_has_ended()
        await pool.kill_picker()
    answer = await trial.timed(asked)
    assert answer.status in (200, 503), answer
    for _ in range(60):  # vLLM looks at leases when it computes something
        if await pool.counted(EXPIRED, 0) > expired:
            break
        await pool.direct(0, trial.request(5))
        await asyncio.sleep(LEASE_SECONDS / 20)
    kept = await pool.counted(EXPIRED, 0) == expired
    await pool.replace_picker()
    await trial.splits()
    assert not kept, "no lease has expired"


async def prefill_engine_is_killed_between_the_legs(trial: Trial) -> None:
    """The decode engine computes a prompt whose blocks died with the prefill engine."""
    pool, body = trial.pool, trial.request(300)
    asked = await pool.begin(body)
    async with pool.stopped():
        await pool.leg_1_has_ended()
        await pool.engines[0].stop(signal.SIGKILL)
    await trial.right(body, asked)


async def prefill_engine_comes_back(trial: Trial) -> None:
    """A prefill engine that was started again is a new peer: it is connected, and then used."""
    pool = trial.pool
    before = await pool.counted(TRANSFERRED, 1)
    await pool.restart(0)
    await pool.until(READY, 2)
    while await pool.counted(TRANSFERRED, 1) == before:  # the new pair is connected by a transfer
        await asyncio.sleep(0.1)
    await pool.until(WARM, 1)
    await trial.splits_again()


async def prefill_engine_is_killed_before_leg_1(trial: Trial) -> None:
    """A request for a prefill engine that has died, which the picker does not know yet, is computed by the
    decode engine at once."""
    pool, body = trial.pool, trial.request()
    async with trial.falls_back("unreachable"):
        async with pool.stopped():
            asked = asyncio.create_task(pool.ask(COMPLETION, body))
            await pool.engines[0].stop(signal.SIGKILL)
        await trial.right(body, asked)


async def prefill_engine_is_gone(trial: Trial) -> None:
    """Without its prefill engine, ready at first and then not, requests are answered by the decode engine."""
    for _ in range(5):
        await trial.right(trial.request())
    await trial.pool.until_below(READY, 2)
    await trial.right(trial.request())


async def prefill_engine_is_killed_in_leg_1(trial: Trial) -> None:
    """A request whose prefill engine dies in leg 1 is computed by the decode engine."""
    pool, body = trial.pool, trial.request(300)
    async with trial.falls_back("unreachable"):
        asked = await pool.begin(body)
        await pool.engines[0].stop(signal.SIGKILL)
        await trial.right(body, asked)


async def decode_engine_is_killed_before_it_fetches(trial: Trial) -> None:
    """A request whose decode engine dies before it has the blocks goes to the other engine by the gateway's
    retry, and has the right answer there; so has the next request.

    Leg 1 is sent by hand, and leg 2 through Envoy: the picker sends on what has parameters of its own. Their
    port takes connections and never answers, so that no block has moved. (A prefill engine that stood still,
    so that nothing could be fetched, was sometimes aborted by UCX when it went on: decision 48.)
    """
    pool, body = trial.pool, trial.request(300)
    found = await pool.first_leg(body)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found |= {"remote_port": silent.getsockname()[1], "remote_engine_id": "elsewhere"}
        asked = asyncio.create_task(pool.ask(COMPLETION, body | {"kv_transfer_params": found}))
        while not await pool.counted(WAITING, 1):
            assert not asked.done(), await asked
            await asyncio.sleep(0.1)
        await pool.engines[1].stop(signal.SIGKILL)
        await trial.right(body, asked)
    await trial.right(trial.request())


async def decode_engine_comes_back(trial: Trial) -> None:
    """A decode engine that was started again is connected, and requests are split again."""
    pool = trial.pool
    await pool.restart(1)
    await pool.until(TRANSFERRED, 1, 1)
    await pool.until(WARM, 1)
    await trial.splits_again()


async def decode_engine_is_killed_while_it_generates(trial: Trial) -> None:
    """A client whose answer has begun sees it end without its last event; one that has nothing yet gets a
    whole answer from the other engine, and so does the next request."""
    pool = trial.pool
    long = trial.request() | {"max_tokens": 600}
    begun = asyncio.create_task(_stream(pool, long | {"stream": True}))
    whole = asyncio.create_task(pool.ask(COMPLETION, long))
    await pool.until(RUNNING, 2, 1)
    generated = r"vllm:generation_tokens_total\{.*"
    await pool.until(generated, await pool.counted(generated, 1) + 40, 1)
    await pool.engines[1].stop(signal.SIGKILL)
    data = await trial.timed(begun)
    assert data.error, "the stream ended as if it were whole"
    assert data.text.count("data: ") > 1
    assert "[DONE]" not in data.text
    await trial.right(long, whole)
    for _ in range(5):
        await trial.right(trial.request())


async def _stream(pool: PrefillDecode, body: dict[str, Any]) -> Answer:
    """Return what came of a streamed answer, and how it broke off."""
    data, status = b"", 0
    try:
        async with pool.client.post(f"{pool.envoy.url}{COMPLETION}", json=body) as response:
            status = response.status
            async for piece in response.content.iter_any():
                data += piece
    except aiohttp.ClientError as error:
        return Answer(status, data.decode(), (), {}, error=repr(error))
    return Answer(status, data.decode(), (), {})
