"""The oracle for gpt-oss: our prompts against the token ids of vLLM's own render endpoints."""

import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.engine import install, random_chats, tiny
from tests.engine.pool import Pool
from tests.engine.test_main_path import predicted_hits
from tests.engine.test_render import assert_equal, every_request
from tests.engine.vllm import RenderServers, VllmEngine

from kvist_epp.prompt.model import Model

FLAGS = ("--dtype", "bfloat16", "--max-model-len", "4096")
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Model, str]]:
    """The model, and the URL of a render server for it."""
    folder: Path = tiny.harmony(tmp_path_factory.mktemp("models") / "gpt-oss")
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "openai")
    async with RenderServers([folder], *flags, code=install.newest_code()) as running:
        yield Model.load(str(folder)), running.urls["gpt-oss"]


@every_request
async def test_prompts_of_gpt_oss_equal_what_the_engine_tokenises(
    server: tuple[Model, str], path: str, bodies: dict[str, dict[str, Any]]
) -> None:
    """Every request that the engine takes gives the same bytes here, those of Codex and Claude Code, too;
    those it refuses do no harm."""
    model, url = server
    await assert_equal(model, url, path, bodies, len(bodies) // 2)


@pytest.mark.parametrize(("path", "make"), random_chats.APIS.items())
async def test_random_requests_to_gpt_oss_equal_what_the_engine_tokenises(
    server: tuple[Model, str], path: str, make: Callable[[random.Random], dict[str, Any]]
) -> None:
    """Roles, reasoning, calls and results in any order give the same bytes."""
    model, url = server
    await assert_equal(model, url, path, random_chats.bodies(make, 1), 50)


class PoolOfGptOss(Pool):
    """``Pool`` with such a model."""

    def _build_model(self) -> Path:
        return tiny.harmony(self._folder / "model")

    def _engine(self, number: int, ports: tuple[int, ...] = ()) -> VllmEngine:
        return VllmEngine(self.model, *FLAGS, ports=ports)


async def test_hits_of_gpt_oss_are_predicted(tmp_path: Path) -> None:
    """60 mixed requests one at a time through Envoy and the picker to real engines are predicted, with no
    more than a block missing, and the index stays trusted."""
    async with PoolOfGptOss(tmp_path) as pool:
        await predicted_hits(pool, "gpt-oss", 60)
