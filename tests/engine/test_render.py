"""The oracle: for each request, our prompt's bytes against the token ids of vLLM's own render endpoints."""

import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.engine import install, random_chats, tiny
from tests.engine.agent_shapes import AGENTS
from tests.engine.shapes import APIS
from tests.engine.vllm import RenderServers, render
from tests.models.folders import SHAPES

from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import Chat, parse
from kvist_epp.prompt.template import Template
from kvist_epp.prompt.tools import template_tools

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

CHAT = "/v1/chat/completions"
DUMP = "{{ messages | tojson }}|{{ tools | tojson }}"
EACH = "{% for m in messages %}"
PART = "{% for c in m.content %}{% endfor %}"
SHOW = "{% macro show(x) %}{% for c in x %}{% endfor %}{% endmacro %}"
END = "{% endfor %}"
LOOPS = (
    EACH + "{{ m.role }}" + END,
    EACH + PART + END,
    EACH + "{% for c in m['content'] %}{% endfor %}" + END,
    EACH + "{% for c in m['content'] | list %}{% endfor %}" + END,
    "{% for m in messages[1:] %}{% for c in m.content[:1] %}{% endfor %}" + END,
    "{% set rest = messages[1:] %}{% for m in rest %}" + PART + END,
    EACH + "{% set content = m.content %}{% for c in content %}{% endfor %}" + END,
    EACH + "{% set text = m.content %}{% for c in text %}{% endfor %}" + END,
    EACH + "{% for c in m.tool_calls or [] %}{% endfor %}" + END,
    SHOW + EACH + "{{ show(m.content) }}" + END,
    SHOW + EACH + "{{ show(x=m.content) }}" + END,
    "{% macro show(content) %}{% for c in content %}{% endfor %}{% endmacro %}" + EACH + END,
    "{% set first = messages[0] %}{% for c in first.content %}" + END,
    "{% for m in messages | selectattr('role', 'equalto', 'user') %}" + PART + END,
)
PARTS: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}],
    },
    {"role": "assistant", "content": "x", "reasoning": "r", "name": "n", "task": "t"},
    {"role": "developer", "content": "d"},
    {"role": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_id": "i"},
]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=(None, install.newest_code), ids=("installed", "newest")
)
async def servers(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Path, RenderServers]]:
    """The model folders and a render server for each, of the installed vLLM and of the newest."""
    home = tmp_path_factory.mktemp("models")
    models = [tiny.build(shape, home / shape) for shape in SHAPES]
    flags = ("--trust-request-chat-template", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    async with RenderServers(models, *flags, code=request.param and request.param()) as running:
        yield home, running


@cache
def loaded(folder: Path) -> Model:
    """A model, loaded once."""
    return Model.load(str(folder))


async def differences(
    model: Model, url: str, path: str, bodies: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, Any], int]:
    """The requests whose prompts differ, ours and the engine's, and how many the engine took."""
    wrong: dict[str, Any] = {}
    taken = 0
    connector = aiohttp.TCPConnector(force_close=True)  # vLLM closes connections after some of its errors
    async with aiohttp.ClientSession(connector=connector) as client:
        for label, body in bodies.items():
            body = {"model": "m", **body}
            ids = await render(client, url, path, body)
            ours = model.prompts(parse(path, json.dumps(body).encode()))
            theirs = [model.vocabulary.join(one) for one in ids]
            taken += bool(ids)
            if ids and ours != theirs:
                wrong[label] = (ours, theirs)
    return wrong, taken


every_request = pytest.mark.parametrize(
    ("path", "bodies"),
    [*APIS.items(), *AGENTS.items()],
    ids=[*APIS, *(f"agents {path}" for path in AGENTS)],
)
"""Runs a test with the requests of each API, and with those of agents."""


async def assert_equal(
    model: Model, url: str, path: str, bodies: Mapping[str, dict[str, Any]], least: int
) -> None:
    """The engine takes more than ``least`` of these requests, and each of them has the same prompt here."""
    wrong, taken = await differences(model, url, path, bodies)
    assert (json.dumps(wrong, default=repr, indent=1), taken > least) == ("{}", True)


@pytest.mark.parametrize(
    ("path", "bodies", "share"),
    [*((path, APIS[path], 2) for path in APIS), *((path, AGENTS[path], 4) for path in AGENTS)],
    ids=[*APIS, *(f"agents {path}" for path in AGENTS)],
)
@pytest.mark.parametrize("shape", SHAPES)
async def test_prompts_equal_what_the_engine_tokenises(
    servers: tuple[Path, RenderServers], shape: str, path: str, bodies: dict[str, dict[str, Any]], share: int
) -> None:
    """Every request the engine takes gives the same bytes here; those it refuses do no harm. It takes half of
    all, and a quarter of those of Codex and Claude Code."""
    home, running = servers
    wrong, taken = await differences(loaded(home / shape), running.urls[shape], path, bodies)
    assert (wrong, taken > len(bodies) // share) == ({}, True)


@pytest.mark.parametrize(("path", "make"), random_chats.APIS.items())
async def test_random_requests_equal_what_the_engine_tokenises(
    servers: tuple[Path, RenderServers], path: str, make: Callable[[random.Random], dict[str, Any]]
) -> None:
    """Roles, reasoning, calls and results in any order give the same bytes."""
    home, running = servers
    bodies = random_chats.bodies(make, 2)
    wrong, taken = await differences(loaded(home / "chatml"), running.urls["chatml"], path, bodies)
    assert (wrong, taken > 60) == ({}, True)


@pytest.mark.parametrize("loop", LOOPS)
async def test_messages_reach_the_template_as_the_engine_hands_them_over(
    servers: tuple[Path, RenderServers], loop: str
) -> None:
    """The style of contents is recognised, and messages and tools have the same fields in the same order."""
    tools: list[dict[str, Any]] = [{"function": {"parameters": {}, "name": "f"}, "type": "function"}]
    body = {"model": "m", "messages": PARTS, "tools": tools, "chat_template": loop + DUMP}
    home, running = servers
    async with aiohttp.ClientSession() as client:
        ids = await render(client, running.urls["chatml"], CHAT, body)
    model = loaded(home / "chatml")
    ours = Template(loop + DUMP, {"eos_token": "<|im_end|>"}).render(Chat(PARTS, template_tools(tools)))
    assert [ours.encode()] == [model.vocabulary.join(one) for one in ids]
