"""The oracle for gpt-oss: our prompts against the token ids of vLLM's own render endpoints."""

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.engine import tiny
from tests.engine.shapes import APIS, WEATHER
from tests.engine.test_render import differences
from tests.engine.vllm import RenderServers

from kvist_epp.prompt.model import Model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Model, str]]:
    """The model, and the URL of a render server for it."""
    folder: Path = tiny.harmony(tmp_path_factory.mktemp("models") / "gpt-oss")
    async with RenderServers(
        [folder], "--enable-auto-tool-choice", "--tool-call-parser", "openai"
    ) as running:
        yield Model.load(str(folder)), running.urls["gpt-oss"]


@pytest.mark.parametrize("path", APIS)
async def test_prompts_of_gpt_oss_equal_what_the_engine_tokenises(
    server: tuple[Model, str], path: str
) -> None:
    """Every request that the engine takes gives the same bytes here; those it refuses do no harm."""
    model, url = server
    wrong, taken = await differences(model, url, path, APIS[path])
    assert (json.dumps(wrong, default=repr, indent=1), taken > len(APIS[path]) // 2) == ("{}", True)


async def test_random_chats_of_gpt_oss_equal_what_the_engine_tokenises(server: tuple[Model, str]) -> None:
    """Chats of any order of roles, reasoning, calls and tools give the same bytes."""
    model, url = server
    generator = random.Random(1)
    bodies = {str(number): _chat(generator) for number in range(300)}
    wrong, taken = await differences(model, url, "/v1/chat/completions", bodies)
    assert (json.dumps(wrong, default=repr, indent=1), taken > 250) == ("{}", True)


def _chat(generator: random.Random) -> dict[str, Any]:
    messages = [_message(generator) for _ in range(generator.randrange(1, 9))]
    body: dict[str, Any] = {"messages": messages}
    if generator.random() < 0.5:
        body["tools"] = [WEATHER]
    if generator.random() < 0.3:
        body["reasoning_effort"] = generator.choice(("low", "medium", "high"))
    return body


def _message(generator: random.Random) -> dict[str, Any]:
    role = generator.choice(("user", "assistant", "assistant", "tool", "system", "developer"))
    words = ("", "A leaf.", "Größe <|end|> 🌿", " \n")
    content: Any = generator.choice(words)
    if generator.random() < 0.3:
        content = [{"type": "text", "text": generator.choice(words)} for _ in range(generator.randrange(4))]
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "tool":
        return {**message, "tool_call_id": generator.choice(("a", "b", "unknown"))}
    if role == "assistant" and generator.random() < 0.4:
        message["reasoning"] = generator.choice(words)
    if role == "assistant" and generator.random() < 0.4:
        message["tool_calls"] = [_call(generator) for _ in range(generator.randrange(3))]
        message["content"] = generator.choice((None, content))
    return message


def _call(generator: random.Random) -> dict[str, Any]:
    arguments = generator.choice(('{"city":"Oslo"}', '{"city": "Göteborg", "days": 1.0}', "", "{broken"))
    function = {"name": generator.choice(("get_weather", "ping")), "arguments": arguments}
    return {"id": generator.choice("ab"), "type": "function", "function": function}
