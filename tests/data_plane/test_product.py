"""kvist-epp as users run it: a process behind a real Envoy, engines that publish KV events."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.data_plane.product import CHAT, Product, product

from kvist_sim.envoy import Mode
from kvist_sim.launch import HOST

COMBINATIONS = [
    pytest.param(transport, mode, id=f"{transport}-{mode}")
    for transport in ("fast", "grpc")
    for mode in ("buffered", "duplex")
]
FAST = ("--sim-time-scale", "20", "--num-gpu-blocks-override", "4000")
SYSTEM = "You are a patient librarian who answers in complete sentences and names the shelf. " * 12


def chat(question: str, system: str = SYSTEM, **more: Any) -> dict[str, Any]:
    """A chat with a system prompt of some blocks."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages, "max_tokens": 4, **more}


@pytest.mark.parametrize(("transport", "mode"), COMBINATIONS)
async def test_requests_follow_their_prefix(tmp_path: Path, transport: str, mode: Mode) -> None:
    """A system prompt seen once is found by the index, and predictions equal what engines report."""
    async with product(tmp_path, mode=mode, transport=transport, engines=3, flags=FAST) as running:
        status, _, _ = await running.send(chat("first"))
        assert status == 200
        await running.until("kvist_epp_index_events_total", 1)
        best = await matched(running, chat("second"))
        _, answer, _ = await running.send(chat("second"))

        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == best["matched_tokens"]
        await running.until("kvist_epp_requests_ended_total", 2)


@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_proxies_that_speak_http_1_0_are_served(tmp_path: Path, mode: Mode) -> None:
    """NGINX was one by default until 1.29.7. The answer, streamed or not, ends with the connection."""
    async with product(tmp_path, mode=mode, flags=FAST) as running:
        for stream, end in ((False, b"}"), (True, b"data: [DONE]")):
            body = json.dumps(chat("first", stream=stream)).encode()
            head = f"POST {CHAT} HTTP/1.0\r\nhost: a\r\ncontent-type: application/json\r\n"
            reader, writer = await asyncio.open_connection(HOST, running.envoy.port)
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.read()
            writer.close()

            assert answer.startswith((b"HTTP/1.0 200 ", b"HTTP/1.1 200 "))
            assert answer.rstrip().endswith(end)
            assert b"transfer-encoding" not in answer


@pytest.mark.parametrize(("transport", "mode"), COMBINATIONS)
async def test_a_killed_picker_cuts_no_response(tmp_path: Path, transport: str, mode: Mode) -> None:
    """SIGKILL while 50 responses stream: all 50 end well."""
    flags = ("--sim-step-seconds", "0.05", "--max-num-seqs", "64")
    async with product(tmp_path, mode=mode, transport=transport, flags=flags) as running:
        begun = asyncio.Semaphore(0)

        async def stream(number: int) -> bytes:
            body = chat(f"tell {number}", stream=True, max_tokens=60, ignore_eos=True)
            url = f"{running.envoy.url}{CHAT}"
            async with running.client.post(url, json=body) as response:
                assert response.status == 200
                first = await response.content.readany()
                begun.release()
                return first + await response.content.read()

        streams = [asyncio.create_task(stream(number)) for number in range(50)]
        for _ in streams:
            await begun.acquire()
        os.kill(running.picker.child.pid, signal.SIGKILL)
        answers = await asyncio.gather(*streams)

        assert [answer.rstrip().endswith(b"data: [DONE]") for answer in answers] == [True] * 50
        assert [answer.count(b"data: ") >= 60 for answer in answers] == [True] * 50


NESTED = b'{"model":"m","messages":' + b"[" * 5_000_000 + b"]" * 5_000_000 + b"}"
REFUSED = {
    "truncated": b'{"model":"m","messages":[{"role":"us',
    "nested": NESTED,
    "invalid-utf8": b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "no-json": b"GIF89a\x00\x01",
    "no-model": json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode(),
    "empty": b"",
    "nul": b"\x00" * 100,
}


async def test_bad_input_is_answered_and_survived(tmp_path: Path) -> None:
    """Each bad body gets the answer of the table, is counted, and the picker goes on."""
    async with product(tmp_path, flags=FAST) as running:
        before = await running.metric("kvist_epp_requests_total")
        for name, body in REFUSED.items():
            status, answer, headers = await running.send(body)
            assert (name, status) == (name, 400)
            assert answer["error"]["type"] == "invalid_request_error"
            assert headers["x-kvist-dropped-reason"].startswith("bad-")
        assert await running.metric("kvist_epp_requests_total") == before + len(REFUSED)

        routed = {
            "/v1/unknown": b'{"a": 1}',
            "/upload": b"\x00\x01",
            CHAT + "?x=1": json.dumps(chat("q")).encode(),
        }
        statuses = [(await running.send(body, path))[0] for path, body in routed.items()]
        assert statuses == [404, 404, 200]
        nul = json.dumps(chat("a\x00b")).encode()
        assert (await running.send(nul))[0] == 200


async def test_bad_endpoints_files_keep_the_old_fleet(tmp_path: Path) -> None:
    """A file with duplicates is refused, said and counted; the old fleet goes on; a good file is taken."""
    async with product(tmp_path, flags=FAST) as running:
        good = json.loads(running.file.read_text())
        running.file.write_text(json.dumps({"endpoints": good["endpoints"] * 2}))
        await running.until("kvist_epp_bad_endpoints_files_total", 1)
        page = await running.page("/debug/fleet")
        assert len(page["endpoints"]) == 2
        assert "is used twice" in page["discovery"]["problem"]
        assert (await running.send(chat("still there")))[0] == 200

        running.file.write_text(json.dumps({"endpoints": good["endpoints"][:1]}))
        while len((await running.page("/debug/fleet"))["endpoints"]) != 1:
            await asyncio.sleep(0.05)
        assert (await running.send(chat("one left")))[0] == 200


async def test_an_engine_that_sends_garbage_is_counted(tmp_path: Path) -> None:
    """Garbage, half a msgpack and hashes of a wrong type are counted; other engines' events go on."""
    async with product(tmp_path, flags=FAST) as running:
        with zmq.Context() as context, context.socket(zmq.PUB) as liar:
            port = liar.bind_to_random_port(f"tcp://{HOST}")
            fleet = json.loads(running.file.read_text())
            fleet["endpoints"][0] |= {"kvEvents": f"tcp://{HOST}:{port}", "kvReplay": "none"}
            running.file.write_text(json.dumps(fleet))
            seq = 0
            while await running.metric("kvist_epp_index_undecodable_total") < 3:
                for payload in GARBAGE:
                    liar.send_multipart([b"", seq.to_bytes(8, "big"), payload])
                    seq += 1
                await asyncio.sleep(0.05)
            address = f"{HOST}:{fleet['endpoints'][1]['port']}"
            async with running.client.post(f"http://{address}{CHAT}", json=chat("past the picker")) as answer:
                assert answer.status == 200
            assert (await matched(running, chat("next")))["endpoint"] == address


GARBAGE = (
    b"not msgpack at all",
    bytes.fromhex("93cb41d954fd2f000000"),
    msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": ["no hash"], "token_ids": {}}], 0]),
)


async def matched(running: Product, body: dict[str, Any]) -> Any:
    """The best row of /debug/pick once it holds some of the prompt; the test's time limit bounds it."""
    while not (row := (await running.explain(body))["endpoints"][0])["matched_tokens"]:
        await asyncio.sleep(0.05)
    return row


async def test_a_terminated_picker_drains(tmp_path: Path) -> None:
    """SIGTERM: requests under way are answered, the process ends by itself with 0 and says so."""
    async with product(tmp_path, flags=FAST) as running:
        sends = [asyncio.create_task(running.send(chat(f"q{n}"))) for n in range(20)]
        await asyncio.sleep(0)
        os.kill(running.picker.child.pid, signal.SIGTERM)
        statuses = [status for status, _, _ in await asyncio.gather(*sends)]
        assert statuses == [200] * 20
        assert await asyncio.to_thread(running.picker.child.process.wait, 20) == 0
