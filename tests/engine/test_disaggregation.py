"""Disaggregated requests on real parts: two engines with NIXL over TCP, the picker, Envoy, a lone engine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.engine.disaggregation_faults import Trial
from tests.engine.disaggregation_mix import KINDS, compare, requests
from tests.engine.mix import COMPLETION
from tests.engine.prefill_decode import (
    BLOCK,
    FALLBACKS,
    LEASE_SECONDS,
    SPLIT,
    TRANSFERRED,
    WARM,
    PrefillDecode,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

LATE = FALLBACKS % "(lease|timeout)"
ANSWER = {"model": "m", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PrefillDecode]:
    """The engines are connected."""
    async with PrefillDecode(Path(tmp_path_factory.mktemp("pd"))) as running:
        await running.until(WARM, 1)
        yield running


async def test_answers_are_a_lone_engines(pool: PrefillDecode) -> None:
    """Text, logprobs and usage of 24 requests of every kind are those of one engine alone, and blocks were
    transferred for all but a few that a busy machine kept longer than their lease."""
    before = await pool.counted(TRANSFERRED, 1)
    assert set(await compare(Trial(pool), requests(pool, 24))) == KINDS

    assert await pool.counted(SPLIT) == 24
    late = await pool.counted(LATE)
    assert await pool.counted(FALLBACKS % ".*") == late <= 6
    assert await pool.counted(TRANSFERRED, 1) - before > 24 * BLOCK


async def test_cached_prefixes_are_used_and_the_index_stays_trusted(pool: PrefillDecode) -> None:
    """A prompt that is asked for again is cached at both endpoints, and neither leaves precise mode."""
    prompt = pool.words(300)
    await pool.ask(COMPLETION, ANSWER | {"prompt": prompt})
    await asyncio.sleep(1)
    before = await pool.counted(TRANSFERRED, 1)
    again = await pool.ask(COMPLETION, ANSWER | {"prompt": prompt + pool.words(20)})

    assert again.cached > 300
    assert 0 < await pool.counted(TRANSFERRED, 1) - before < 200
    assert await pool.is_trusted()
    assert await pool.counted("kvist_epp_backlog_tokens.*") < BLOCK * 4


async def test_expired_blocks_are_never_used(pool: PrefillDecode) -> None:
    """A picker that stood still from leg 1 until the blocks had another prompt's content lets the decode
    engine compute the prompt: the answer is right."""
    body = ANSWER | {"prompt": pool.words(700)}
    before = await pool.counted(LATE)
    asked = await pool.begin(body)
    async with pool.stopped():
        await pool.leg_1_has_ended()
        await asyncio.sleep(LEASE_SECONDS * 1.2)
        await pool.overwrite(0)
    answer = await asked

    assert answer.same(await pool.alone(COMPLETION, body)), answer
    assert await pool.counted(LATE) == before + 1


async def test_without_a_deadline_the_answer_would_be_wrong(pool: PrefillDecode) -> None:
    """Two legs sent by hand with the same delay give status 200 and another prompt's text: the test above
    can fail."""
    body = ANSWER | {"prompt": pool.words(700)}
    found = await pool.first_leg(body)
    await asyncio.sleep(LEASE_SECONDS * 1.5)
    await pool.overwrite(0)
    answer = await pool.direct(1, body | {"kv_transfer_params": found})

    assert answer.status == 200
    assert not answer.same(await pool.alone(COMPLETION, body))


async def test_a_client_that_leaves_in_leg_1_stops_the_prefill(pool: PrefillDecode) -> None:
    """The prefill engine aborts the request of a client that has left, and no place is kept for it."""
    asked = await pool.begin(ANSWER | {"prompt": pool.words(700)})
    asked.cancel()
    await pool.until(r'kvist_epp_requests_total\{outcome="rejected-context-cancelled"\}', 1)
    while await pool.counted(r"vllm:num_requests_(running|waiting)\{.*", 0):
        await asyncio.sleep(0.1)

    after = await pool.ask(COMPLETION, ANSWER | {"prompt": pool.words(50)})
    assert after.status == 200
    assert await pool.counted(r"kvist_epp_backlog_tokens.*") < BLOCK * 4
