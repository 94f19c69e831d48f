"""The engine harness itself: a real vLLM serves, publishes its events, and leaves nothing behind."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from tests.engine import install, tiny
from tests.engine.vllm import VllmEngine

from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import parse

PATH = "/v1/chat/completions"


def chat(question: str) -> dict[str, Any]:
    """A chat of a few blocks."""
    return {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": f"{question} " * 60}]}


async def ask(engine: VllmEngine, body: dict[str, Any]) -> dict[str, Any]:
    """Send a chat and return the engine's answer."""
    async with aiohttp.ClientSession() as client, client.post(f"{engine.url}{PATH}", json=body) as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def first_stored(engine: VllmEngine) -> dict[str, Any]:
    """Return the first block event of the engine, requested from its replay buffer until it is there."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(engine.replay)
        while True:
            await socket.send_multipart([b"", (0).to_bytes(8, "big")])
            while (payload := (await socket.recv_multipart())[-1]) != b"":
                for event in msgspec.msgpack.decode(payload)[1]:
                    if event["type"] == "BlockStored":
                        return dict(event)


@pytest.mark.timeout(900)
async def test_blocks_of_a_served_request_are_the_bytes_of_its_rendered_prompt(tmp_path: Path) -> None:
    """Cached blocks, decoded, are the prompt that we render; a repeat is a cache hit; SIGKILL leaves no
    process."""
    folder = tiny.build("llama3", tmp_path / "llama3")
    model = Model.load(str(folder))
    before = set(psutil.Process().children(recursive=True))
    async with VllmEngine(folder) as engine:
        first = await ask(engine, chat("Where does the twig grow?"))
        stored = await asyncio.wait_for(first_stored(engine), 60)
        again = await ask(engine, chat("Where does the twig grow?"))
        await engine.stop(signal.SIGKILL)
    left = set(psutil.Process().children(recursive=True)) - before
    [prompt] = model.prompts(parse(PATH, json.dumps(chat("Where does the twig grow?")).encode()))
    blocks = model.vocabulary.join(stored["token_ids"])
    cached = len(stored["token_ids"]) // 32 * 32
    assert (len(blocks) > 500, prompt.startswith(blocks), left) == (True, True, set())
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert first["usage"]["prompt_tokens"] == again["usage"]["prompt_tokens"]


def test_requirements_leave_out_what_a_cpu_engine_never_imports() -> None:
    """Extras and the packages without a plain wheel go; everything else stays, markers included."""
    lines = [
        "regex",
        "torch==2.13.0+cpu; x",
        "torchaudio; y",
        'zentorch==1; extra == "zen"',
        "numba==0.65.0; z",
    ]
    assert install.requirements(lines) == ["regex", "numba==0.65.0; z"]
