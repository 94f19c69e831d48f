"""Kimi K2.5: our prompts against the token ids of a vLLM that runs code beside the model, and its tools."""

import random
import runpy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.engine import install, random_chats, tiny
from tests.engine.random_tools import function
from tests.engine.test_render import assert_equal, every_request, loaded
from tests.engine.vllm import RenderServers

from kvist_epp.prompt.kimi_tools import declare_tools
from kvist_epp.prompt.tools import with_sorted_fields

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Path, str]]:
    """The folder of the model, and the URL of a render server for it."""
    folder = tiny.kimi(tmp_path_factory.mktemp("models") / "kimi", install.kimi_declarations())
    flags = ("--trust-remote-code", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    async with RenderServers([folder], *flags, code=install.newest_code()) as running:
        yield folder, running.urls["kimi"]


@every_request
async def test_prompts_equal_what_the_engine_tokenises(
    server: tuple[Path, str], path: str, bodies: dict[str, dict[str, Any]]
) -> None:
    """Every request that the engine takes gives the same bytes here; those it refuses do no harm."""
    folder, url = server
    await assert_equal(loaded(folder), url, path, bodies, len(bodies) // 2)


@pytest.mark.parametrize(("path", "make"), random_chats.APIS.items())
async def test_random_requests_equal_what_the_engine_tokenises(
    server: tuple[Path, str], path: str, make: Callable[[random.Random], dict[str, Any]]
) -> None:
    """Roles, reasoning, calls and results in any order give the same bytes."""
    folder, url = server
    await assert_equal(loaded(folder), url, path, random_chats.bodies(make, 1), 50)


async def test_declarations_of_random_tools_equal_those_of_the_models_code() -> None:
    """Types, comments, references and defaults give the same text, and both fail for the same schemas."""
    generator = random.Random(1)
    declare = runpy.run_path(str(install.kimi_declarations()))["encode_tools_to_typescript_style"]
    wrong, failed = [], 0
    for _ in range(5_000):
        tools = with_sorted_fields([function(generator)])
        try:
            expected = declare(tools)
        except Exception:  # noqa: BLE001 - whatever it raises, the template then writes JSON
            expected, failed = None, failed + 1
        if declare_tools(tools, 1_000_000) != expected:
            wrong.append(tools)
    assert (wrong, 500 < failed < 2_500) == ([], True)
