"""DeepSeek V3.2, V4 and V4.1: our prompts against the token ids of vLLM's render endpoints, and its hits."""

import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.engine import install, random_chats, tiny
from tests.engine.pool import FLAGS, Pool
from tests.engine.shapes import WEATHER
from tests.engine.test_main_path import predicted_hits
from tests.engine.test_render import assert_equal, every_request, loaded
from tests.engine.vllm import RenderServers, VllmEngine
from tests.models import folders, vocabularies
from tests.models.folders import DEEPSEEK_CODED
from tokenizers import Tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Path, RenderServers]]:
    """The folder of the models, and a render server for each."""
    home = tmp_path_factory.mktemp("models")
    models = [tiny.deepseek(version, home / version) for version in DEEPSEEK_CODED]
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    async with RenderServers(models, *flags, code=install.newest_code()) as running:
        yield home, running


REORDERED: dict[str, Any] = {"type": "function", "function": {"strict": True, "parameters": {}, "name": "f"}}
"""A tool whose fields the engine puts into another order."""
VARIABLES: tuple[dict[str, Any], ...] = (
    *({"thinking": True}, {"thinking": False}, {"enable_thinking": True}, {"enable_thinking": False}),
    *({"thinking": True, "drop_thinking": False}, {"reasoning_effort": "none"}, {"reasoning_effort": "max"}),
    *({"thinking": True, "reasoning_effort": "xhigh"}, {"reasoning_effort": 60}, {"drop_thinking": False}),
)


def varied(generator: random.Random) -> dict[str, Any]:
    """A random chat whose template variables, roles and tasks are those of DeepSeek."""
    body = random_chats.chat(generator)
    if generator.random() < 0.8:
        body["chat_template_kwargs"] = generator.choice(VARIABLES)
    for message in body["messages"]:
        if generator.random() < 0.1:
            message["task"] = generator.choice(("action", "title", "unknown"))
        if message["role"] == "developer" and generator.random() < 0.5:
            message["tools"] = [generator.choice((WEATHER, REORDERED))]
        if message["role"] == "system" and generator.random() < 0.3:
            message["role"] = "latest_reminder"
    return body


@pytest.mark.parametrize("version", DEEPSEEK_CODED)
@every_request
async def test_prompts_equal_what_the_engine_tokenises(
    servers: tuple[Path, RenderServers], path: str, bodies: dict[str, dict[str, Any]], version: str
) -> None:
    """Every request that the engine takes gives the same bytes here, those of Codex and Claude Code, too;
    those it refuses do no harm."""
    home, running = servers
    await assert_equal(loaded(home / version), running.urls[version], path, bodies, len(bodies) // 2)


@pytest.mark.parametrize("version", DEEPSEEK_CODED)
@pytest.mark.parametrize(
    ("path", "make", "seed"),
    [
        *((path, make, 1) for path, make in random_chats.APIS.items()),
        *(("/v1/chat/completions", varied, seed) for seed in (2, 3)),
    ],
    ids=[*random_chats.APIS, "varied 2", "varied 3"],
)
async def test_random_requests_equal_what_the_engine_tokenises(
    servers: tuple[Path, RenderServers],
    path: str,
    make: Callable[[random.Random], dict[str, Any]],
    seed: int,
    version: str,
) -> None:
    """Roles, reasoning, calls and results in any order give the same bytes."""
    home, running = servers
    bodies = random_chats.bodies(make, seed)
    await assert_equal(loaded(home / version), running.urls[version], path, bodies, 15)


class PoolOfDeepseek(Pool):
    """``Pool`` whose engines write chats as V4 does, for a model that they can run on a CPU."""

    _picker_flags = ("--tokenizer-mode=deepseek_v4",)

    def _build_model(self) -> Path:
        vocabulary = Tokenizer.from_str(vocabularies.qwen().to_str())
        return tiny.add_weights_config(folders.write_deepseek("v4", self._folder / "model", vocabulary))

    def _engine(self, number: int, ports: tuple[int, ...] = ()) -> VllmEngine:
        return VllmEngine(self.model, *FLAGS, "--tokenizer-mode=deepseek_v4", ports=ports)


async def test_hits_of_deepseek_are_predicted(tmp_path: Path) -> None:
    """60 mixed requests one at a time through Envoy and the picker to real engines are predicted, with no
    more than a block missing, and the index stays trusted."""
    async with PoolOfDeepseek(tmp_path) as pool:
        await predicted_hits(pool, "DeepSeek", 60)
