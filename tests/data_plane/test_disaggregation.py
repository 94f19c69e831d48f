"""Both legs of disaggregated requests through a real Envoy and a real picker; engines are the test's own."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.data_plane.connected_engines import Connected, connected

from kvist_sim.envoy import Mode

pytestmark = pytest.mark.timeout(120)

FALLBACKS = "kvist_epp_disaggregation_fallbacks_total"


def completion(text: str = "a prompt ", **members: Any) -> dict[str, Any]:
    """Return a completion."""
    return {"model": "m", "prompt": text * 50, "max_tokens": 20, **members}


async def check_kinds(running: Connected) -> None:
    """Send each kind of request; the decode engine gets the client's body and the description of the
    blocks."""
    prefill, decode = running.engines
    status, text = await running.send(completion(), **{"x-request-id": "mine"})
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, "answer")
    first, second = prefill.first[-1], decode.served[-1]
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert second.pop("kv_transfer_params") == {
        "do_remote_prefill": True,
        "remote_engine_id": f"e{prefill.port}",
        "blocks": [[1, 2]],
    }
    assert second == completion()
    one, other = prefill.headers[-1], decode.headers[-1]
    assert one["x-request-id"] == other["x-request-id"] == "mine"
    assert one["x-session-id"] == other["x-session-id"]

    status, text = await running.send(completion(stream=True, stream_options={"include_usage": True}))
    assert (status, text.count("data: ")) == (200, 3)
    assert prefill.first[-1]["stream_options"] is None

    messages = [{"role": "user", "content": "words and more words " * 30}]
    await running.send({"model": "m", "messages": messages}, "/v1/chat/completions")
    assert decode.served[-1]["messages"] == messages
    assert decode.served[-1]["kv_transfer_params"]["prompt_token_ids"][:2] == [0, 1]


async def check_large(running: Connected) -> None:
    """A body of 450 KB comes across whole, with its token ids left out if they are too long."""
    messages = [{"role": "user", "content": "words and " * 45_000}]
    assert (await running.send({"model": "m", "messages": messages}, "/v1/chat/completions"))[0] == 200
    assert running.engines[1].served[-1]["messages"] == messages
    assert "prompt_token_ids" not in running.engines[1].served[-1]["kv_transfer_params"]


async def check_not_split(running: Connected) -> None:
    """A request for one token, and one with parameters of its own, go to the decode engine unchanged."""
    prefill, decode = running.engines
    before = len(prefill.first)
    for body in (completion(max_tokens=1), completion(kv_transfer_params={"mine": 1})):
        assert (await running.send(body))[0] == 200
        assert decode.served[-1] == body
    assert len(prefill.first) == before


async def check_many(running: Connected) -> None:
    """Two hundred requests at once each get their own prompt's answer, and the books are empty afterwards."""
    prefill, decode = running.engines
    before = len(decode.served)
    bodies = [completion(f"number {number} ") for number in range(200)]
    answers = await asyncio.gather(*map(running.send, bodies))
    assert {status for status, _ in answers} == {200}
    served = decode.served[before:]
    assert sorted(one["prompt"] for one in served) == sorted(one["prompt"] for one in bodies)
    assert all("kv_transfer_params" in one for one in served)
    await running.until('kvist_epp_requests_ended_total{source="access-log"}', len(decode.served))
    assert await running.metric("kvist_epp_backlog_tokens") == 0
    assert len(prefill.first) >= 200


async def check_half_leave(running: Connected) -> None:
    """Half of two hundred legs end because their clients leave, the others are answered, and there are never
    more connections than legs."""
    prefill, decode = running.engines
    prefill.prefill, before = "hold", len(decode.served)
    bodies = [completion(f"holds {number} ") for number in range(200)]
    asked = [asyncio.create_task(running.send(body)) for body in bodies]
    while prefill.held < 200:
        await asyncio.sleep(0.02)
    for task in asked[::2]:
        task.cancel()
    while prefill.held > 100:
        await asyncio.sleep(0.02)
    prefill.prefill = "ok"
    prefill.released.set()
    assert {status for status, _ in await asyncio.gather(*asked[1::2])} == {200}
    served = decode.served[before:]
    assert sorted(one["prompt"] for one in served) == sorted(one["prompt"] for one in bodies[1::2])
    assert all("kv_transfer_params" in one for one in served)
    assert prefill.held == 0
    scrapes = 2
    assert prefill.most_connections <= 200 + scrapes
    await running.until('kvist_epp_requests_total{outcome="rejected-context-cancelled"}', 100)
    await running.until('kvist_epp_requests_ended_total{source="access-log"}', len(decode.served))
    assert await running.metric("kvist_epp_backlog_tokens") == 0


async def check_client_leaves(running: Connected) -> None:
    """A client that leaves in leg 1 closes the connection to the prefill engine, and leaves no request."""
    prefill, decode = running.engines
    prefill.prefill, served = "hang", len(decode.served)
    cancelled = 'kvist_epp_requests_total{outcome="rejected-context-cancelled"}'
    already = await running.metric(cancelled)
    asked = asyncio.create_task(running.send(completion("leaves ")))
    before = len(prefill.first)
    while len(prefill.first) == before:
        await asyncio.sleep(0.02)
    asked.cancel()
    await prefill.left.wait()
    await running.until(cancelled, already + 1)
    assert len(decode.served) == served
    assert await running.metric("kvist_epp_backlog_tokens") == 0
    prefill.prefill = "ok"


async def check_failures(running: Connected) -> None:
    """A prefill engine that breaks the connection costs no request: the decode engine gets the client's
    body."""
    prefill, decode = running.engines
    prefill.prefill = "close"
    body = completion("fails ")
    assert (await running.send(body))[0] == 200
    assert decode.served[-1] == body
    assert await running.metric(f'{FALLBACKS}{{reason="unreachable"}}') == 1
    tried = len(prefill.first)
    assert (await running.send(completion("rests ")))[0] == 200
    assert len(prefill.first) == tried


async def test_a_refused_leg_1(tmp_path: Path) -> None:
    """Whatever status leg 1 has, the decode engine gets the client's own body; an endpoint rests after 429
    and 500, which say something of the engine, and not after 400."""
    async with connected(tmp_path, "buffered") as running:
        prefill, decode = running.engines
        for status, reason in ((400, "refused"), (429, "error"), (500, "error")):
            prefill.prefill, tried = str(status), len(prefill.first)
            before = await running.metric(f'{FALLBACKS}{{reason="{reason}"}}')
            while len(prefill.first) == tried:  # until it has rested from the failure before
                body = completion(f"refused {status} ")
                assert (await running.send(body))[0] == 200
                assert decode.served[-1] == body
            assert await running.metric(f'{FALLBACKS}{{reason="{reason}"}}') == before + 1
            prefill.prefill, tried = "ok", len(prefill.first)
            assert (await running.send(completion("next ")))[0] == 200
            assert len(prefill.first) == tried + (reason == "refused")


async def test_both_legs(tmp_path: Path, mode: Mode) -> None:
    """Split requests of every kind, of 450 KB, and 200 at once, get their answers, and neither clients that
    leave nor an engine that fails leave anything behind."""
    async with connected(tmp_path, mode) as running:
        await check_kinds(running)
        await check_large(running)
        await check_not_split(running)
        await check_many(running)
        await check_half_leave(running)
        await check_client_leaves(running)
        await check_failures(running)


async def test_a_sidecar_gets_its_header(tmp_path: Path) -> None:
    """With --disaggregation=sidecar the decode endpoint gets the header of llm-d's sidecar, in place of a
    client's, and the picker asks no engine."""
    async with connected(tmp_path, "buffered", "sidecar") as running:
        prefill, decode = running.engines
        assert (await running.send(completion(), **{"x-prefiller-host-port": "10.9.9.9:1"}))[0] == 200
        assert decode.headers[-1]["x-prefiller-host-port"] == prefill.hostport
        assert decode.served == [completion()]
        assert prefill.first == []
