"""Flow control behind a real Envoy: simulated engines of one slot, more requests than that."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.data_plane.product import Product, product

from kvist_sim.envoy import Mode

COMBINATIONS = [
    pytest.param(transport, mode, id=f"{transport}-{mode}")
    for transport in ("fast", "grpc")
    for mode in ("buffered", "duplex")
]
ONE_SLOT = {"kvist.dev/max-num-seqs": "1"}
FLAGS = ("--max-num-seqs", "1", "--sim-step-seconds", "0.02", "--num-gpu-blocks-override", "4000")
Answer = tuple[int, Any, Mapping[str, str]]


def chat(question: str, tokens: int = 4) -> dict[str, Any]:
    """A chat whose answer takes a step for each token."""
    messages = [{"role": "user", "content": question}]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "ignore_eos": True}


class Crowd:
    """Requests under way, and the order in which they were answered."""

    def __init__(self, running: Product) -> None:
        self.running = running
        self.answered: list[str] = []
        self.tasks: dict[str, asyncio.Task[Answer]] = {}

    async def runs(self, name: str, tokens: int = 4) -> None:
        """Send one and wait until the engine has it."""
        before = await self.running.metric("kvist_epp_requests_total")
        self._send(name, tokens, 0)
        await self.running.until("kvist_epp_requests_total", before + 1)

    async def waits(self, name: str, priority: int = 0, tokens: int = 4) -> None:
        """Send one and wait until it waits."""
        before = await self.running.metric("kvist_epp_queue_requests")
        self._send(name, tokens, priority)
        await self.running.until("kvist_epp_queue_requests", before + 1)

    async def answer(self, name: str) -> Answer:
        """Wait for the named request's answer."""
        return await self.tasks[name]

    def _send(self, name: str, tokens: int, priority: int) -> None:
        self.tasks[name] = asyncio.create_task(self._answer(name, tokens, priority))

    async def _answer(self, name: str, tokens: int, priority: int) -> Answer:
        headers = {"x-kvist-priority": str(priority)} if priority else {}
        answer = await self.running.send(chat(name, tokens), **headers)
        self.answered.append(name)
        return answer


async def emptied(running: Product) -> None:
    """Wait until the queue is empty; the test's time limit bounds it."""
    while await running.metric("kvist_epp_queue_requests"):
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(("transport", "mode"), COMBINATIONS)
async def test_overload_waits_and_is_served_by_priority(tmp_path: Path, transport: str, mode: Mode) -> None:
    """With one slot, the other requests are queued, the most urgent goes first, and a client that disconnects
    leaves the queue at once."""
    async with product(
        tmp_path, mode=mode, transport=transport, engines=1, flags=FLAGS, labels=ONE_SLOT
    ) as running:
        crowd = Crowd(running)
        await crowd.runs("running", tokens=100)
        for name, priority in (("low", -1), ("gone", 9), ("normal", 0), ("high", 5)):
            await crowd.waits(name, priority)
        page = await running.page("/debug/queue")
        assert [(level["priority"], level["requests"]) for level in page["levels"]] == [
            *((9, 1), (5, 1), (0, 1), (-1, 1)),
        ]
        assert (page["full_endpoints"], page["requests"], page["pool_empty"]) == (1, 4, False)

        crowd.tasks["gone"].cancel()
        await running.until('kvist_epp_requests_total{outcome="rejected-context-cancelled"}', 1)
        assert await running.metric("kvist_epp_queue_requests") == 3

        names = ("running", "low", "normal", "high")
        assert [(await crowd.answer(name))[0] for name in names] == [200] * 4
        assert crowd.answered == ["running", "high", "normal", "low"]
        await running.until("kvist_epp_requests_ended_total", 4)
        await emptied(running)
        held = await running.page("/debug/held")
        assert (held["queued_requests"], held["attempts"], held["requests_in_flight"]) == (0, 0, 0)


async def test_sheddable_requests_give_way_and_overdue_ones_are_refused(tmp_path: Path) -> None:
    """A full queue sheds the negative level first, then refuses; who waits too long gets 429, and when to
    come again."""
    limits = ("--queue-requests=1", "--queue-seconds=1.5")
    async with product(tmp_path, engines=1, flags=FLAGS, labels=ONE_SLOT, picker_flags=limits) as running:
        crowd = Crowd(running)
        await crowd.runs("running", tokens=200)
        await crowd.waits("low", -1)
        late = asyncio.create_task(running.send(chat("late")))
        shed = await crowd.answer("low")
        refused = await running.send(chat("refused"))

        for answer, reason in (
            (shed, "evicted-priority"),
            (refused, "rejected-saturated"),
            (await late, "rejected-ttl-expired"),
        ):
            status, body, headers = answer
            assert (status, body["error"]["code"]) == (429, reason)
            assert headers["x-kvist-dropped-reason"] == headers["x-llm-d-request-dropped-reason"] == reason
            assert 1 <= int(headers["retry-after"]) <= 60
        assert (await crowd.answer("running"))[0] == 200
        bad = await running.send(chat("bad"), **{"x-kvist-priority": "urgent"})
        assert (bad[0], bad[1]["error"]["code"]) == (400, "bad-priority")


@pytest.fixture
async def empty_pool(tmp_path: Path) -> AsyncIterator[Product]:
    """An engine that is not listed."""
    async with product(tmp_path, engines=1, flags=FLAGS, labels=ONE_SLOT) as running:
        listed = running.file.read_text()
        running.file.write_text('{"endpoints": []}')
        while (await running.page("/debug/fleet"))["endpoints"]:
            await asyncio.sleep(0.02)
        running.file.with_name("listed.json").write_text(listed)
        yield running


async def test_a_pool_scales_from_zero(empty_pool: Product) -> None:
    """A request for a pool without endpoints waits, the metric that scales the pool moves, and the first
    endpoint gets it."""
    running = empty_pool
    request = asyncio.create_task(running.send(chat("first")))
    await running.until("kvist_epp_queue_requests", 1)
    assert (await running.page("/debug/queue"))["pool_empty"] is True
    async with running.client.get(f"http://127.0.0.1:{running.picker.metrics_port}/readyz") as ready:
        assert ready.status == 200

    running.file.write_text(running.file.with_name("listed.json").read_text())
    status, body, _ = await request
    assert (status, body["usage"]["completion_tokens"]) == (200, 4)


async def test_a_pool_that_stays_empty_is_reported(tmp_path: Path) -> None:
    """After --empty-pool-seconds, requests get 503 with the reason; those without a body get it at once."""
    async with product(
        tmp_path, engines=1, flags=FLAGS, picker_flags=("--empty-pool-seconds=0.5",)
    ) as running:
        running.file.write_text('{"endpoints": []}')
        while (await running.page("/debug/fleet"))["endpoints"]:
            await asyncio.sleep(0.02)
        for status, body, headers in (await running.send(chat("x")), await listing(running)):
            assert (status, headers["x-kvist-dropped-reason"]) == (503, "rejected-no-endpoints")
            assert body["error"]["type"] == "service_unavailable"


async def listing(running: Product) -> Answer:
    """Send GET /v1/models and return the answer."""
    async with running.client.get(f"{running.envoy.url}/v1/models") as response:
        return response.status, json.loads(await response.text()), response.headers


async def test_a_queued_request_at_the_end_of_a_drain_is_served(tmp_path: Path) -> None:
    """SIGTERM while requests wait: who finds no room in the drain time goes to a full engine, the sheddable
    get 503."""
    async with product(
        tmp_path, engines=1, flags=FLAGS, labels=ONE_SLOT, picker_flags=("--drain-timeout=3",)
    ) as running:
        crowd = Crowd(running)
        await crowd.runs("running", tokens=400)
        await crowd.waits("served")
        await crowd.waits("refused", -1)
        os.kill(running.picker.child.pid, signal.SIGTERM)

        status, body, headers = await crowd.answer("refused")
        assert (status, body["error"]["code"]) == (503, "rejected-shutting-down")
        assert headers["x-kvist-dropped-reason"] == "rejected-shutting-down"
        assert (await crowd.answer("served"))[0] == (await crowd.answer("running"))[0] == 200
        assert await asyncio.to_thread(running.picker.child.process.wait, 20) == 0
