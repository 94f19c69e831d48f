"""``/fleet`` of a real picker over engines that publish events."""

import asyncio
from pathlib import Path
from typing import Any

from tests.data_plane.product import CHAT, Product, product

from kvist_operator.reconcile.cache_reports import deletion_costs, kv_tokens, merge_reports, parse_report

FAST = ("--sim-time-scale", "20", "--num-gpu-blocks-override", "4000", "--block-size", "16")
SYSTEM = "You are a patient librarian who answers in complete sentences and names the shelf. " * 12


def chat(question: str) -> dict[str, Any]:
    """A system prompt of many blocks, and a question."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages, "max_tokens": 4}


async def engines(running: Product) -> dict[str, Any]:
    """Rows of ``/fleet`` by address."""
    return {row["endpoint"]: row for row in (await running.page("/fleet"))["endpoints"]}


async def test_a_prefix_saves_prefill_until_there_is_a_copy(tmp_path: Path) -> None:
    """A shared prefix on one engine raises the engine's ``worth_tokens`` with each request; once another
    engine has computed it too, the figure is 0. The operator's deletion costs follow from the page."""
    async with product(tmp_path, flags=FAST) as running:
        assert (await running.send(chat("first")))[0] == 200
        while not (rows := (await running.explain(chat("?")))["endpoints"])[0]["matched_tokens"]:
            await asyncio.sleep(0.05)
        holder, other = (row["endpoint"] for row in rows)
        shared = rows[0]["matched_tokens"]

        for number in range(1, 4):
            assert (await running.send(chat(f"question {number}")))[0] == 200
            found = await engines(running)
            while found[holder]["worth_tokens"] < number * shared:
                await asyncio.sleep(0.05)
                found = await engines(running)
        assert found[holder]["worth_tokens"] < 4 * shared
        assert found[other]["worth_tokens"] == 0
        assert found[holder]["exclusive_blocks"] >= shared // 16
        while (await engines(running))[holder]["kv_tokens"] is None:
            await asyncio.sleep(0.05)
        names = {row["pod"]: row["endpoint"] for row in found.values()}
        costs = await asked(running, list(names))
        assert {names[pod]: cost for pod, cost in costs.items()} == {
            holder: found[holder]["worth_tokens"],
            other: 0,
        }

        async with running.client.post(f"http://{other}{CHAT}", json=chat("a copy")) as response:
            assert response.status == 200
        while (found := await engines(running))[other]["blocks"].get("GPU", 0) < shared // 16:
            await asyncio.sleep(0.05)
        while (found := await engines(running))[holder]["worth_tokens"] > 3 * 16:
            await asyncio.sleep(0.05)
        assert found[other]["worth_tokens"] == 0
        assert found[holder]["blocks"]["GPU"] >= shared // 16


async def asked(running: Product, pods: list[str]) -> dict[str, int]:
    """Deletion costs by the operator's own reading; every engine has said how large its cache is."""
    url = f"http://127.0.0.1:{running.picker.metrics_port}/fleet"
    while True:
        async with running.client.get(url) as response:
            found = merge_reports([parse_report(await response.read())])
        if kv_tokens(found) is not None:
            break
        await asyncio.sleep(0.05)
    assert kv_tokens(found) == 4000 * 16
    return deletion_costs(found, pods)
