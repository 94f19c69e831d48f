"""Requests that are sent to engines, and how their answers are read."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.prewarm.prewarm_client import PrewarmClient, PrewarmOutcome, decode_prefix, outcome_of


class Engine:
    """An engine that records requests and answers with a given status."""

    def __init__(self) -> None:
        self.status = 200
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.endpoint = Endpoint("e", "t", "127.0.0.1", 9)

    async def answer(self, request: web.Request) -> web.Response:
        """Handle a request to ``/v1/completions``."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((headers, json.loads(await request.read())))
        return web.json_response({}, status=self.status)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """Start an engine."""
    found, app = Engine(), web.Application()
    app.router.add_post("/v1/completions", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.endpoint = Endpoint("e", "t", "127.0.0.1", runner.addresses[0][1])
    yield found
    await runner.cleanup()


async def test_the_request_is_the_text_unchanged_and_one_token(engine: Engine) -> None:
    """No special token is added, one token is requested, and the step's id is in all headers."""
    async with PrewarmClient() as client:
        assert (
            await client.send(engine.endpoint, "id-1", "Zoë <|im_start|>".encode(), "m")
            is PrewarmOutcome.DONE
        )
    [(headers, body)] = engine.requests
    assert body == {
        "model": "m",
        "prompt": "Zoë <|im_start|>",
        "max_tokens": 1,
        "temperature": 0,
        "add_special_tokens": False,
    }
    assert (headers["x-request-id"], headers["x-session-id"]) == ("id-1", "id-1")
    assert "authorization" not in headers
    assert "x-vllm-priority" not in headers


async def test_the_lowest_priority_where_engines_have_priorities(engine: Engine) -> None:
    """For vLLM a lower number goes first, so that the header has the largest number."""
    async with PrewarmClient(lowest_priority=True) as client:
        await client.send(engine.endpoint, "id-1", b"text", None)
    [(headers, body)] = engine.requests
    assert headers["x-vllm-priority"] == str(2**31 - 1)
    assert "model" not in body


async def test_the_key_is_read_each_time(engine: Engine, tmp_path: Path) -> None:
    """A Secret that changes takes effect; a missing file is a failure that may pass."""
    file = tmp_path / "key"
    async with PrewarmClient(key_file=str(file)) as client:
        assert await client.send(engine.endpoint, "id", b"text", None) is PrewarmOutcome.FAILED
        for key in ("one\n", "two"):
            file.write_text(key)
            assert await client.send(engine.endpoint, "id", b"text", None) is PrewarmOutcome.DONE
    assert [headers["authorization"] for headers, _ in engine.requests] == ["Bearer one", "Bearer two"]


async def test_an_engine_with_the_key_before_is_asked_with_it(engine: Engine, tmp_path: Path) -> None:
    """After a change of the file an engine that rejects the new key gets the one before."""
    file = tmp_path / "key"
    async with PrewarmClient(key_file=str(file)) as client:
        file.write_text("one")
        assert await client.send(engine.endpoint, "id", b"text", None) is PrewarmOutcome.DONE
        file.write_text("two")
        engine.status = 401
        assert await client.send(engine.endpoint, "id", b"text", None) is PrewarmOutcome.DENIED
    tried = [headers["authorization"] for headers, _ in engine.requests]
    assert tried == ["Bearer one", "Bearer two", "Bearer one"]


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, PrewarmOutcome.DONE),
        (400, PrewarmOutcome.UNFIT),
        (401, PrewarmOutcome.DENIED),
        (403, PrewarmOutcome.DENIED),
        (404, PrewarmOutcome.UNFIT),
        (429, PrewarmOutcome.FAILED),
        (500, PrewarmOutcome.FAILED),
        (503, PrewarmOutcome.FAILED),
        (307, PrewarmOutcome.FAILED),
    ],
)
async def test_statuses(engine: Engine, status: int, answer: PrewarmOutcome) -> None:
    """A failure that may pass is distinguished from one that will not."""
    engine.status = status
    async with PrewarmClient() as client:
        assert await client.send(engine.endpoint, "id", b"text", None) is answer
    assert outcome_of(status) is answer


async def test_a_refused_connection() -> None:
    """A refused connection is a failure, not an exception."""
    async with PrewarmClient() as client:
        assert (
            await client.send(Endpoint("e", "t", "127.0.0.1", 9), "id", b"text", None)
            is PrewarmOutcome.FAILED
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"plain", "plain"),
        ("Zoë".encode()[:-1], "Zo"),
        ("a🙂".encode()[:-2], "a"),
        (b"a\xffb", None),
        ("ë".encode()[:1], None),
    ],
)
def test_blocks_end_where_tokens_do(text: bytes, said: str | None) -> None:
    """A character that is cut at the end is left out; bytes that are not UTF-8 cannot be requested."""
    assert decode_prefix(text) == said
