"""Warm hand-over by a real picker over simulated engines: a pod that joins, and one that goes."""

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
    """A system prompt of many blocks, and a question."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages, "max_tokens": 4}


def are_the_pool(running: Product, *numbers: int) -> None:
    """From now on these engines are in the endpoints file."""
    listed = endpoints_file(running.engines)["endpoints"]
    fresh = running.file.with_suffix(".fresh")
    fresh.write_text(json.dumps({"endpoints": [listed[number] for number in numbers]}))
    fresh.replace(running.file)


async def until_pool(running: Product, count: int) -> None:
    """Until so many engines may be picked."""
    while len((await running.page("/debug/fleet"))["endpoints"]) != count:
        await asyncio.sleep(0.05)
    await running.until("kvist_epp_index_trust", count)


async def ask(running: Product, *tenants: str, **body: Any) -> None:
    """Each of them asks through Envoy."""
    for tenant in tenants:
        headers = {TENANT_HEADERS[0]: tenant}
        assert (await running.send({**chat(f"I am {tenant}"), **body}, **headers))[0] == 200
        await asyncio.sleep(0.1)


async def matched(running: Product) -> dict[str, int]:
    """Tokens of the system prompt that each engine holds, by the picker."""
    rows = (await running.explain(chat("?")))["endpoints"]
    return {row["endpoint"]: row["matched_tokens"] for row in rows}


async def until_handed_over(running: Product) -> None:
    """Until the log tells of the end."""
    while "prewarming ends" not in running.picker.child.log.read_text():
        await asyncio.sleep(0.05)


async def straight(running: Product, number: int) -> int:
    """Cached tokens of a chat that goes to this engine past the picker."""
    async with running.client.post(
        f"http://{running.engines[number].hostport}{CHAT}", json=chat("straight")
    ) as response:
        found = await response.json()
    return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_pod_that_joins_holds_what_is_hot_before_anybody_asks(tmp_path: Path) -> None:
    """Its first request of all finds every block of the shared prompt cached, as where it was computed; the
    page counts what was given."""
    async with product(tmp_path, engines=2, flags=ENGINES) as running:
        are_the_pool(running, 0)
        await until_pool(running, 1)
        await ask(running, "one", "two", "three")
        are_the_pool(running, 0, 1)
        await until_handed_over(running)

        old, new = (engine.hostport for engine in running.engines)
        found = await matched(running)
        assert found[old] == found[new] > 300
        assert await straight(running, 1) == found[old]
        assert await running.metric("kvist_epp_prewarm_tokens_total") == found[old]
        assert await running.metric(DONE.partition("{")[0]) >= 2
        owed = (await running.page("/debug/fleet"))["endpoints"]
        assert [row["requests"] for row in owed] == [0, 0]


async def test_a_pod_that_goes_hands_on_what_only_it_holds(tmp_path: Path) -> None:
    """The one that stays has the shared prompt, although it never got a request for it."""
    async with product(tmp_path, engines=2, flags=ENGINES) as running:
        await until_pool(running, 2)
        await ask(running, "one", "two", "three")
        found = await matched(running)
        numbers = {engine.hostport: number for number, engine in enumerate(running.engines)}
        holder, other = sorted(found, key=lambda endpoint: -found[endpoint])
        assert (found[holder] > 300, found[other]) == (True, 0)

        are_the_pool(running, numbers[other])
        await until_handed_over(running)
        assert await matched(running) == {other: found[holder]}
        assert await straight(running, numbers[other]) == found[holder]


async def test_what_is_not_shared_stays_where_it_is(tmp_path: Path) -> None:
    """One tenant alone, or a salt: nothing is asked of the pod that joins."""
    async with product(tmp_path, engines=2, flags=ENGINES) as running:
        are_the_pool(running, 0)
        await until_pool(running, 1)
        await ask(running, "one", "one", "one")
        await ask(running, "one", "two", "three", cache_salt="ours")
        are_the_pool(running, 0, 1)
        await until_pool(running, 2)
        await asyncio.sleep(1)
        assert await running.metric("kvist_epp_prewarm_prefixes_total") == 0
        assert (await matched(running))[running.engines[1].hostport] == 0


async def test_an_engine_that_wants_a_key(tmp_path: Path) -> None:
    """Without one nothing is asked after the first refusal, and the log says how to give it; requests are
    served as ever. With it the prompt is handed over."""
    (key := tmp_path / "key").write_text("secret\n")
    keyed = (*ENGINES, "--api-key", "secret")
    for number, flags in enumerate(((), (f"--engine-key-file={key}",))):
        (folder := tmp_path / str(number)).mkdir()
        async with product(folder, engines=2, flags=keyed, picker_flags=flags) as running:
            are_the_pool(running, 0)
            await until_pool(running, 1)
            for tenant in ("one", "two", "three"):
                headers = {TENANT_HEADERS[0]: tenant, "authorization": "Bearer secret"}
                assert (await running.send(chat(f"I am {tenant}"), **headers))[0] == 200
                await asyncio.sleep(0.1)
            are_the_pool(running, 0, 1)
            if flags:
                await until_handed_over(running)
                assert (await matched(running))[running.engines[1].hostport] > 300
            else:
                while "--engine-key-file" not in running.picker.child.log.read_text():
                    await asyncio.sleep(0.05)
                await asyncio.sleep(1)
                assert await running.metric("kvist_epp_prewarm_steps_total") == 1
