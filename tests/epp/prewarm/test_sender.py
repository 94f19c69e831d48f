"""What is sent to engines, and how their answers are read."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.prewarm.sender import Answer, Sender, as_text, judged


class Engine:
    """Keeps what it is asked and answers as it is told."""

    def __init__(self) -> None:
        self.status = 200
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.endpoint = Endpoint("e", "t", "127.0.0.1", 9)

    async def answer(self, request: web.Request) -> web.Response:
        """``/v1/completions``."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((headers, json.loads(await request.read())))
        return web.json_response({}, status=self.status)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """One that listens."""
    found, app = Engine(), web.Application()
    app.router.add_post("/v1/completions", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.endpoint = Endpoint("e", "t", "127.0.0.1", runner.addresses[0][1])
    yield found
    await runner.cleanup()


async def test_one_token_of_the_text_as_it_is(engine: Engine) -> None:
    """No special token is added, one token is asked for, and the step has its id everywhere."""
    async with Sender() as sender:
        assert await sender.ask(engine.endpoint, "id-1", "Zoë <|im_start|>".encode(), "m") is Answer.DONE
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


async def test_last_of_all_where_engines_have_priorities(engine: Engine) -> None:
    """vLLM's lowest goes first."""
    async with Sender(last=True) as sender:
        await sender.ask(engine.endpoint, "id-1", b"text", None)
    [(headers, body)] = engine.requests
    assert headers["x-vllm-priority"] == str(2**31 - 1)
    assert "model" not in body


async def test_the_key_is_read_each_time(engine: Engine, tmp_path: Path) -> None:
    """A Secret that changes is taken up; a file that is away is a failure that may pass."""
    file = tmp_path / "key"
    async with Sender(key_file=str(file)) as sender:
        assert await sender.ask(engine.endpoint, "id", b"text", None) is Answer.FAILED
        for key in ("one\n", "two"):
            file.write_text(key)
            assert await sender.ask(engine.endpoint, "id", b"text", None) is Answer.DONE
    assert [headers["authorization"] for headers, _ in engine.requests] == ["Bearer one", "Bearer two"]


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, Answer.DONE),
        (400, Answer.UNFIT),
        (401, Answer.DENIED),
        (403, Answer.DENIED),
        (404, Answer.UNFIT),
        (429, Answer.FAILED),
        (500, Answer.FAILED),
        (503, Answer.FAILED),
        (307, Answer.FAILED),
    ],
)
async def test_statuses(engine: Engine, status: int, answer: Answer) -> None:
    """What may pass is tried again, what will not is not."""
    engine.status = status
    async with Sender() as sender:
        assert await sender.ask(engine.endpoint, "id", b"text", None) is answer
    assert judged(status) is answer


async def test_nobody_there() -> None:
    """A refused connection is a failure, not an exception."""
    async with Sender() as sender:
        assert await sender.ask(Endpoint("e", "t", "127.0.0.1", 9), "id", b"text", None) is Answer.FAILED


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
    """A character cut in two at the end is left out; bytes that are no text cannot be asked for."""
    assert as_text(text) == said
