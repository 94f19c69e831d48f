"""Flags of engines that change chats before a template sees them: our prompts against vLLM's own."""

import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.engine import install, random_chats, tiny
from tests.engine.test_render import assert_equal
from tests.engine.vllm import RenderServers

from kvist_epp.app.model_loader import chats_of
from kvist_epp.prompt.model import Model
from kvist_epp.settings.settings import Settings

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

TEMPLATE = (
    "{{ reasoning_effort }}|{{ enable_thinking }}|{{ tools | tojson if tools is defined }}|"
    "{{ messages | tojson }}"
)
"""Shows what engines change."""
IGNORANT = "{{ 'short' if reasoning_effort == 'low' else 'long' }}|{{ messages | tojson }}"
"""Takes an effort of "none" for one to think long."""
FLAGS = (
    "--exclude-tools-when-tool-choice-none",
    '--reasoning-effort-map={"medium": "low", "none": "minimal", "xhigh": "max"}',
)
HERMES = ("--tool-call-parser=hermes", f"--chat-template={TEMPLATE}")
GIVEN: dict[str, tuple[str, ...]] = {
    "plain": HERMES,
    "flags": (*HERMES, *FLAGS),
    "high": (*HERMES, *FLAGS, "--anthropic-disabled-thinking-effort=high"),
    "ignorant": (HERMES[0], f"--chat-template={IGNORANT}"),
    "gpt-oss": ("--tool-call-parser=openai", *FLAGS),
}
"""The flags of each server by its name."""


def picker_flags(given: tuple[str, ...]) -> list[str]:
    """The picker's flags of the same meaning."""
    return [f"{flag}=true" if flag == FLAGS[0] else flag for flag in given[1:]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, tuple[Model, str]]]:
    """A model with the chat settings of each set of flags, and the URL of a render server with the same."""
    home: Path = tmp_path_factory.mktemp("models")
    folders = [
        tiny.harmony(home / name) if name == "gpt-oss" else tiny.build("chatml", home / name)
        for name in GIVEN
    ]
    code = install.newest_code()
    async with RenderServers(folders, "--enable-auto-tool-choice", code=code, own=GIVEN) as running:
        yield {
            folder.name: (
                Model.load(str(folder), chats_of(Settings.from_args(picker_flags(GIVEN[folder.name])))),
                running.urls[folder.name],
            )
            for folder in folders
        }


def chosen(make: Callable[[random.Random], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Random requests, most with an effort, variables, tools and a choice of tools."""
    generator = random.Random(5)
    bodies = random_chats.bodies(make, 5)
    for body in bodies.values():
        effort = generator.choice(("none", "minimal", "low", "medium", "high", "xhigh", "max", None))
        if "input" in body:
            body["reasoning"] = {"effort": effort}
        elif make is random_chats.chat and effort:
            body["reasoning_effort"] = effort
        if generator.random() < 0.3:
            thinking = generator.choice((True, False, None))
            body["chat_template_kwargs"] = {"enable_thinking": thinking, "reasoning_effort": "medium"}
        if body.get("tools") and make is not random_chats.messages:
            body["tool_choice"] = generator.choice(("auto", "none"))
    return bodies


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize(("path", "make"), random_chats.APIS.items())
async def test_the_flags_of_the_engines_change_prompts_as_they_do_there(
    servers: dict[str, tuple[Model, str]],
    path: str,
    make: Callable[[random.Random], dict[str, Any]],
    name: str,
) -> None:
    """Efforts, thinking that is off, and tools that must not be called give the same bytes with every flag,
    and without any."""
    model, url = servers[name]
    bodies = chosen(make)
    assert '"none"' in json.dumps(bodies)
    await assert_equal(model, url, path, bodies, 30)
