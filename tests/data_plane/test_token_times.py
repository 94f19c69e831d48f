"""TTFT and TPOT as the picker measures them, beside a client's own clock."""

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.data_plane.product import CHAT, Product, product
from tests.data_plane.test_product import chat

from kvist_sim.envoy import Mode
from kvist_sim.envoy_settings import Responses
from kvist_sim.launch import HOST

TOKENS = 25
STEP_SECONDS = 0.03
SLOW = (
    *("--sim-step-seconds", str(STEP_SECONDS), "--sim-prefill-tokens-per-second", "3000"),
    *("--max-num-batched-tokens", "256"),  # short steps: engines update their gauges after each one
)
USAGE = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}


async def _timed(running: Product, number: int) -> tuple[float, float]:
    """Stream one response; return the seconds to its first bytes, and from there to its end."""
    body = chat(f"{number} is the question", f"{number} " * 300, max_tokens=TOKENS, **USAGE)
    began = time.monotonic()
    async with running.client.post(
        f"{running.envoy.url}{CHAT}", json=body, headers={"x-request-id": f"request-{number}"}
    ) as response:
        assert response.status == 200
        assert await response.content.readany()
        first = time.monotonic()
        await response.read()
    return first - began, time.monotonic() - first


async def _exemplars(running: Product, name: str) -> set[str]:
    """Return the request ids that the buckets of a histogram show to a scraper of OpenMetrics."""
    url = f"http://{HOST}:{running.picker.metrics_port}/metrics"
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with running.client.get(url, headers=headers) as response:
        page = await response.text()
    return {
        sample.exemplar.labels["request_id"]
        for family in text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if family.name == name and sample.exemplar is not None
    }


@pytest.mark.parametrize(("mode", "responses"), [("duplex", "duplex"), ("buffered", "streamed")])
async def test_the_picker_s_times_are_the_client_s(tmp_path: Path, mode: Mode, responses: Responses) -> None:
    """The picker's TTFT lies within the client's and is most of it; TPOT agrees; each is counted once, with
    its prediction, and a document that is not streamed counts nowhere."""
    async with product(
        tmp_path,
        mode=mode,
        responses=responses,
        engines=2,
        flags=SLOW,
        picker_flags=("--observe-responses",),
    ) as running:
        status, _, _ = await running.send(chat("a document"))
        assert status == 200
        times = await asyncio.gather(*(_timed(running, number) for number in range(8)))
        await running.until("kvist_epp_observed_responses_total", 9)

        first = await running.metric("kvist_epp_time_to_first_token_seconds_sum")
        client = sum(first for first, _ in times)
        assert await running.metric("kvist_epp_time_to_first_token_seconds_count") == 8
        assert 0.5 * client < first < client

        token = await running.metric("kvist_epp_time_per_output_token_seconds_sum") / 8
        client = sum(rest for _, rest in times) / 8 / (TOKENS - 1)
        assert await running.metric("kvist_epp_time_per_output_token_seconds_count") == 8
        assert STEP_SECONDS / 2 < token < 2 * client
        assert client < 2 * token

        assert await running.metric("kvist_epp_predicted_time_to_first_token_seconds_count") == 9
        assert await running.metric("kvist_epp_time_to_first_token_ratio_count") == 8
        asked = {f"request-{number}" for number in range(8)}
        shown = await _exemplars(running, "kvist_epp_time_to_first_token_seconds")
        assert shown
        assert shown <= asked


async def test_an_evicted_prompt_that_comes_again_is_counted(tmp_path: Path) -> None:
    """A prompt that the engine evicted for others and computes again is counted, about once for each token;
    prompts that are new, or still cached, are not."""
    flags = ("--num-gpu-blocks-override", "800", "--max-model-len", "8000", "--sim-time-scale", "20")
    prompts = [chat("?", f"{number} " * 2_800) for number in range(3)]
    async with product(tmp_path, engines=1, flags=flags) as running:
        for prompt in (prompts[0], *prompts):
            status, answer, _ = await running.send(prompt)
            assert status == 200
        tokens = answer["usage"]["prompt_tokens"]
        assert 2 * tokens < 800 * 16 < 3 * tokens, "the third evicts a part of the first"
        await running.until("kvist_epp_index_events_total", 4)
        assert await running.metric("kvist_epp_evicted_requested_tokens_total") == 0
        await running.send(prompts[0])
        await running.until("kvist_epp_evicted_requested_tokens_total", 1)

        evicted = 3 * tokens - 800 * 16
        counted = await running.metric("kvist_epp_evicted_requested_tokens_total")
        assert evicted / 2 < counted < 2 * evicted
        assert await running.metric("kvist_epp_saved_prefill_tokens_total") > tokens / 2
