"""Prompts that wait for an endpoint whose sequences would become too slow, behind a real Envoy."""

import asyncio
from pathlib import Path

import pytest
from tests.data_plane.product import product
from tests.data_plane.test_queue import COMBINATIONS, chat, emptied

from kvist_sim.envoy import Mode

FLAGS = ("--sim-step-seconds", "0.02", "--num-gpu-blocks-override", "8000")
PACED = ("--tpot-target=0.05", "--prefill-tokens-per-second=1000")


@pytest.mark.parametrize(("transport", "mode"), COMBINATIONS)
async def test_what_an_engine_cannot_compute_in_time_waits_and_is_served(
    tmp_path: Path, transport: str, mode: Mode
) -> None:
    """Most of a dozen simultaneous long prompts are queued in the picker; all are answered, and the queue
    ends empty."""
    async with product(
        tmp_path, mode=mode, transport=transport, engines=2, flags=FLAGS, picker_flags=PACED
    ) as running:
        prompts = [f"{number} " + "a question never asked before " * 150 for number in range(12)]
        answers = await asyncio.gather(*[running.send(chat(prompt, 8)) for prompt in prompts])
        assert [status for status, *_ in answers] == [200] * 12
        assert await running.metric('kvist_epp_queue_seconds_count{outcome="picked"}') >= 4
        await running.until("kvist_epp_requests_ended_total", 12)
        await emptied(running)
        held = await running.page("/debug/held")
        assert (held["queued_requests"], held["attempts"], held["requests_in_flight"]) == (0, 0, 0)
