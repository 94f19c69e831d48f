"""The protocol end to end: kvist-epp as a process, real Envoy, simulated engines."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.data_plane.plane import subset_hint
from tests.data_plane.product import CHAT, MODEL, Product, product

from kvist_sim.envoy import Envoy, Gateway, Mode, config
from kvist_sim.envoy_settings import Responses
from kvist_sim.launch import HOST

FAST = ("--sim-time-scale", "20", "--num-gpu-blocks-override", "4000")
LORA = ("--enable-lora", "--lora-modules", f"tuned={MODEL}/tuned")
SYSTEM = "You are a patient librarian who answers in complete sentences and names the shelf. " * 12
BOTH: list[tuple[str, Mode, Responses]] = [
    ("fast", "buffered", "streamed"),
    ("grpc", "duplex", "duplex"),
    ("fast", "buffered", "buffered"),
]


def chat(question: str, **more: Any) -> dict[str, Any]:
    """A chat with a system prompt of some blocks."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages, "max_tokens": 4, **more}


async def _events(running: Product, body: dict[str, Any], **headers: str) -> list[Any]:
    """The SSE events of one request."""
    async with running.client.post(f"{running.envoy.url}{CHAT}", json=body, headers=headers) as response:
        assert response.status == 200
        lines = (await response.text()).split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(("transport", "mode", "responses"), BOTH)
async def test_renamed_requests_and_their_usage(
    tmp_path: Path, transport: str, mode: Mode, responses: Responses
) -> None:
    """A request renamed to an adapter goes to the one engine that has it; the client sees its own name, in
    JSON and in events; usage is counted exactly."""
    async with product(
        tmp_path,
        mode=mode,
        transport=transport,
        engines=3,
        flags=FAST,
        own_flags=((), LORA),
        picker_flags=("--observe-responses",),
        responses=responses,
    ) as running:
        await _knows(running, "tuned")
        rewrite = {"x-llm-d-model-name-rewrite": "tuned"}
        usages = []
        for number in range(4):
            status, answer, _ = await running.send(chat(f"q{number}", model="gpt"), **rewrite)
            assert (status, answer["model"]) == (200, "gpt")
            usages.append(answer["usage"])
        streamed = chat("s", model="gpt", stream=True, stream_options={"include_usage": True})
        events = await _events(running, streamed, **rewrite)
        assert {event["model"] for event in events} == {"gpt"}
        usages.append(events[-1]["usage"])
        await running.until("kvist_epp_observed_responses_total", len(usages))

        page = await running.page("/metrics")
        for kind, name in (("prompt", "prompt_tokens"), ("completion", "completion_tokens")):
            assert f'kvist_epp_usage_tokens_total{{kind="{kind}"}} {sum(u[name] for u in usages)}' in page
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert cached > 0
        assert f'kvist_epp_usage_tokens_total{{kind="cached"}} {cached}' in page
        assert f'kvist_epp_observed_responses_total{{outcome="usage"}} {len(usages)}' in page


async def _knows(running: Product, adapter: str) -> None:
    """Wait until the picker has read who serves the adapter."""
    while not any(adapter in row["adapters"] for row in (await running.page("/debug/fleet"))["endpoints"]):
        await asyncio.sleep(0.05)


async def test_adapters_go_where_they_are_loaded(tmp_path: Path) -> None:
    """Requests for an adapter that one of three engines has all succeed; an unknown model is routed, and the
    engine's 404 is returned."""
    async with product(tmp_path, engines=3, flags=FAST, own_flags=((), (), LORA)) as running:
        await _knows(running, "tuned")
        sends = [running.send(chat(f"q{number}", model="tuned")) for number in range(20)]
        assert {status for status, _, _ in await asyncio.gather(*sends)} == {200}
        assert (await running.send(chat("q", model="nobody's")))[0] == 404
        rows = (await running.explain(chat("q", model="tuned")))["endpoints"]
        assert [row["eligible"] for row in rows] == [True, False, False]


async def test_a_dead_engine_leaves_no_backlog_behind(tmp_path: Path) -> None:
    """Requests picked for an engine that was just killed are served by the next endpoint of their list; that
    is counted, and no backlog is left when they have ended."""
    async with product(tmp_path, engines=2, flags=FAST) as running:
        await running.send(chat("warm"))
        await running.until("kvist_epp_index_events_total", 1)
        best = (await running.explain(chat("next")))["endpoints"][0]["endpoint"]
        number = [one.hostport for one in running.engines].index(best)
        os.kill(running.engine_processes[number].pid, signal.SIGKILL)
        sends = [running.send(chat(f"q{n}")) for n in range(8)]
        assert {status for status, _, _ in await asyncio.gather(*sends)} == {200}
        await running.until("kvist_epp_served_elsewhere_total", 1)
        await running.until("kvist_epp_requests_ended_total", 9)
        assert await running.metric("kvist_epp_backlog_tokens") == 0


async def test_data_parallel_ranks_are_picked(tmp_path: Path) -> None:
    """The rank that holds the prefix is picked among two ranks behind one address, and its predicted cached
    tokens are those that the engine reports."""
    flags = (*FAST, "--data-parallel-size", "2")
    async with product(tmp_path, engines=1, flags=flags, ranks=2) as running:
        for number in range(6):
            body = chat(f"q{number}")
            row = (await running.explain(body))["endpoints"][0]
            stored = await running.metric("kvist_epp_index_events_total")
            _, answer, _ = await running.send(body)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == row["matched_tokens"]
            await running.until("kvist_epp_index_events_total", stored + 1)
        assert row["matched_tokens"] > 0


async def test_the_gateways_subset_is_obeyed(tmp_path: Path) -> None:
    """Several ports of one address are several endpoints: a subset with a port selects one, one without
    selects all, one that names none of them, nothing, or nonsense is answered 503."""
    async with product(tmp_path, engines=3, flags=FAST) as running:
        first, second, third = (one.hostport for one in running.engines)
        for hint, wanted in (
            ([HOST], [True, True, True]),  # first: equals take turns, those with a past do not
            ([second], [False, True, False]),
            (f" {first} , {third},192.0.2.1:80", [True, False, True]),
        ):
            before = [await _completed(running, number) for number in range(3)]
            assert {status for status, _, _ in await _with_hint(running, hint)} == {200}
            after = [await _completed(running, number) for number in range(3)]
            assert [old < new for old, new in zip(before, after, strict=True)] == wanted
        refused: tuple[Any, ...] = ([f"{HOST}:1"], [], "", 7, {"a": second})
        for hint in refused:
            for status, answer, headers in await _with_hint(running, hint):
                assert (status, answer["error"]["type"]) == (503, "service_unavailable")
                assert headers["x-kvist-dropped-reason"] == "rejected-no-endpoints"


async def _with_hint(running: Product, hint: Any) -> list[tuple[int, Any, Mapping[str, str]]]:
    """Answers to six different requests through a gateway with this subset hint."""
    endpoints = [one.hostport for one in running.engines]
    settings = config(Gateway(endpoints=endpoints, picker=running.picker.address, failure_mode_allow=False))
    subset_hint(hint)(settings)
    async with Envoy(settings) as envoy:
        through = replace(running, envoy=envoy)
        bodies = [{"model": "m", "prompt": f"{number}" * 400, "max_tokens": 2} for number in range(6)]
        return [await through.send(body, "/v1/completions") for body in bodies]


async def _completed(running: Product, number: int) -> float:
    """Requests that this engine has completed."""
    async with running.client.get(f"http://{running.engines[number].hostport}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))
