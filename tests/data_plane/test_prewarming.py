"""Prewarming by a real picker over simulated engines: an endpoint that joins, and one that leaves."""

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.data_plane.product import CHAT, Product, product

from kvist_epp.names import TENANT_HEADERS
from kvist_sim.launch import endpoints_file

ENGINES = ("--sim-time-scale", "20", "--num-gpu-blocks-override", "4000", "--block-size", "16")
SYSTEM = "You are a patient librarian who answers in complete sentences and names the shelf. " * 40
DONE = 'kvist_epp_prewarm_steps_total{outcome="done"}'


def chat(question: str) -> dict[str, Any]:
    """Return a chat with a system prompt of many blocks, and a question."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages, "max_tokens": 4}


def list_engines(running: Product, *numbers: int) -> None:
    """Write these engines, and no others, to the endpoints file."""
    listed = endpoints_file(running.engines)["endpoints"]
    fresh = running.file.with_suffix(".fresh")
    fresh.write_text(json.dumps({"endpoints": [listed[number] for number in numbers]}))
    fresh.replace(running.file)


async def until_pool(running: Product, count: int) -> None:
    """Wait until this number of engines may be picked."""
    while len((await running.page("/debug/fleet"))["endpoints"]) != count:
        await asyncio.sleep(0.05)
    await running.until("kvist_epp_index_trust", count)


async def ask(running: Product, *tenants: str, **body: Any) -> None:
    """Send a chat of each tenant through Envoy."""
    for tenant in tenants:
        headers = {TENANT_HEADERS[0]: tenant}
        assert (await running.send({**chat(f"I am {tenant}"), **body}, **headers))[0] == 200
        await asyncio.sleep(0.1)


async def matched(running: Product) -> dict[str, int]:
    """Return how many tokens of the system prompt each engine holds, according to the picker."""
    rows = (await running.explain(chat("?")))["endpoints"]
    return {row["endpoint"]: row["matched_tokens"] for row in rows}


async def until_prewarmed(running: Product) -> None:
    """Wait until the log says that prewarming has ended."""
    while "prewarming ends" not in running.picker.child.log.read_text():
        await asyncio.sleep(0.05)


async def cached_directly(running: Product, number: int) -> int:
    """Return the cached tokens of a chat that is sent to an engine without the picker."""
    async with running.client.post(
        f"http://{running.engines[number].hostport}{CHAT}", json=chat("cached_directly")
    ) as response:
        found = await response.json()
    return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_an_endpoint_that_joins_holds_hot_prefixes_before_its_first_request(tmp_path: Path) -> None:
    """The first request finds every block of the shared prompt cached, and the metrics count the tokens."""
    async with product(tmp_path, engines=2, flags=ENGINES) as running:
        list_engines(running, 0)
        await until_pool(running, 1)
        await ask(running, "one", "two", "three")
        list_engines(running, 0, 1)
        await until_prewarmed(running)

        old, new = (engine.hostport for engine in running.engines)
        found = await matched(running)
        assert found[old] == found[new] > 300
        assert await cached_directly(running, 1) == found[old]
        assert await running.metric("kvist_epp_prewarm_tokens_total") == found[old]
        assert await running.metric(DONE.partition("{")[0]) >= 2
        owed = (await running.page("/debug/fleet"))["endpoints"]
        assert [row["requests"] for row in owed] == [0, 0]


async def test_prefixes_of_an_endpoint_that_leaves_are_computed_on_another(tmp_path: Path) -> None:
    """The endpoint that stays holds the shared prompt, although it never got a request for it."""
    async with product(tmp_path, engines=2, flags=ENGINES) as running:
        await until_pool(running, 2)
        await ask(running, "one", "two", "three")
        found = await matched(running)
        numbers = {engine.hostport: number for number, engine in enumerate(running.engines)}
        holder, other = sorted(found, key=lambda endpoint: -found[endpoint])
        assert (found[holder] > 300, found[other]) == (True, 0)

        list_engines(running, numbers[other])
        await until_prewarmed(running)
        assert await matched(running) == {other: found[holder]}
        assert await cached_directly(running, numbers[other]) == found[holder]


async def test_prefixes_that_are_not_shared_are_not_requested(tmp_path: Path) -> None:
    """A prompt of a single tenant, or one with a salt, is not computed on the endpoint that joins."""
    async with product(tmp_path, engines=2, flags=ENGINES) as running:
        list_engines(running, 0)
        await until_pool(running, 1)
        await ask(running, "one", "one", "one")
        await ask(running, "one", "two", "three", cache_salt="ours")
        list_engines(running, 0, 1)
        await until_pool(running, 2)
        await asyncio.sleep(1)
        assert await running.metric("kvist_epp_prewarm_prefixes_total") == 0
        assert (await matched(running))[running.engines[1].hostport] == 0


async def test_an_engine_that_requires_an_api_key(tmp_path: Path) -> None:
    """Without the key prewarming stops with a hint in the log, and requests are served as before; with the
    key the prompt is computed."""
    (key := tmp_path / "key").write_text("secret\n")
    keyed = (*ENGINES, "--api-key", "secret")
    for number, flags in enumerate(((), (f"--engine-key-file={key}",))):
        (folder := tmp_path / str(number)).mkdir()
        async with product(folder, engines=2, flags=keyed, picker_flags=flags) as running:
            list_engines(running, 0)
            await until_pool(running, 1)
            for tenant in ("one", "two", "three"):
                headers = {TENANT_HEADERS[0]: tenant, "authorization": "Bearer secret"}
                assert (await running.send(chat(f"I am {tenant}"), **headers))[0] == 200
                await asyncio.sleep(0.1)
            list_engines(running, 0, 1)
            if flags:
                await until_prewarmed(running)
                assert (await matched(running))[running.engines[1].hostport] > 300
            else:
                while "--engine-key-file" not in running.picker.child.log.read_text():
                    await asyncio.sleep(0.05)
                await asyncio.sleep(1)
                assert await running.metric("kvist_epp_prewarm_steps_total") == 1
