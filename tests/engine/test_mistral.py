"""Mistral's own tokenizer: our prompts against the token ids of vLLM's render endpoints, and its hits."""

import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.engine import install, random_chats, tiny
from tests.engine.pool import FLAGS, Pool
from tests.engine.shapes import WEATHER, text
from tests.engine.test_main_path import predicted_hits
from tests.engine.test_render import assert_equal, every_request, loaded
from tests.engine.vllm import RenderServers, VllmEngine
from tests.models.folders import MISTRAL_VERSIONS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Path, RenderServers]]:
    """The folder of the models, and a render server for each."""
    home = tmp_path_factory.mktemp("models")
    models = [tiny.mistral(version, home / version) for version in MISTRAL_VERSIONS]
    async with RenderServers(models, code=install.newest_code()) as running:
        yield home, running


@pytest.mark.parametrize("version", MISTRAL_VERSIONS)
@every_request
async def test_prompts_equal_what_the_engine_tokenises(
    servers: tuple[Path, RenderServers], path: str, bodies: dict[str, dict[str, Any]], version: str
) -> None:
    """Every request that the engine takes gives the same bytes here; those it refuses do no harm."""
    home, running = servers
    await assert_equal(loaded(home / version), running.urls[version], path, bodies, len(bodies) // 3)


def lawful(generator: random.Random) -> dict[str, Any]:
    """A chat in an order of roles that mistral-common takes; most random ones are refused."""
    messages = [{"role": "system", "content": _content(generator)} for _ in range(generator.randrange(3))]
    numbers = iter(range(100))
    for _ in range(generator.randrange(1, 4)):
        messages += [
            {"role": "user", "content": _content(generator)} for _ in range(generator.randrange(1, 3))
        ]
        for _ in range(generator.randrange(3)):
            messages += _answer(generator, numbers)
        if generator.random() < 0.5:
            messages.append({"role": "assistant", "content": "Good."})
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": "And?"})
    body: dict[str, Any] = {"messages": messages}
    if generator.random() < 0.5:
        body["tools"] = [WEATHER]
    if generator.random() < 0.3:
        body["reasoning_effort"] = generator.choice(("none", "high"))
    return body


def _answer(generator: random.Random, numbers: Iterator[int]) -> list[dict[str, Any]]:
    """An answer with up to two calls, and their results in any order."""
    count = generator.randrange(3)
    identifiers = [f"call-{next(numbers):09}" for _ in range(count)]
    answer: dict[str, Any] = {"role": "assistant", "content": _content(generator, "Well.  ")}
    if count:
        arguments = ('{"city": "Göteborg", "days": 1.0}', "")
        answer["tool_calls"] = [
            {
                "id": identifier,
                "type": "function",
                "function": {"name": "f", "arguments": generator.choice(arguments)},
            }
            for identifier in identifiers
        ]
        answer["content"] = generator.choice((None, answer["content"]))
    if generator.random() < 0.2:
        answer["reasoning"] = generator.choice(("", "Hm. "))
    results = [
        {"role": "tool", "tool_call_id": one, "content": _content(generator, '{"a":  1}')}
        for one in identifiers
    ]
    generator.shuffle(results)
    return [answer, *results]


def _content(generator: random.Random, word: str = "") -> Any:
    words = (*random_chats.WORDS, word)
    if generator.random() < 0.6:
        return generator.choice(words)
    parts = [text(generator.choice(words)) for _ in range(generator.randrange(4))]
    if generator.random() < 0.2:
        thought = {"type": "thinking", "thinking": "So.", "closed": generator.random() < 0.7}
        parts.insert(generator.randrange(len(parts) + 1), thought)
    return parts


@pytest.mark.parametrize("version", MISTRAL_VERSIONS)
@pytest.mark.parametrize(
    ("path", "make", "least"),
    [
        *((path, make, 2) for path, make in random_chats.APIS.items()),
        ("/v1/chat/completions", lawful, 30),
    ],
    ids=[*random_chats.APIS, "lawful"],
)
async def test_random_requests_equal_what_the_engine_tokenises(
    servers: tuple[Path, RenderServers],
    path: str,
    make: Callable[[random.Random], dict[str, Any]],
    least: int,
    version: str,
) -> None:
    """Messages that are merged, calls, thoughts and results in any order give the same bytes."""
    home, running = servers
    bodies = random_chats.bodies(make, 1)
    await assert_equal(loaded(home / version), running.urls[version], path, bodies, least)


class PoolOfMistral(Pool):
    """``Pool`` with a model that has no other tokenizer than Mistral's."""

    def _build_model(self) -> Path:
        return tiny.mistral("v13", self._folder / "model")

    def _engine(self, number: int, ports: tuple[int, ...] = ()) -> VllmEngine:
        return VllmEngine(self.model, *FLAGS, ports=ports)


async def test_hits_of_mistral_are_predicted(tmp_path: Path) -> None:
    """60 mixed requests one at a time through Envoy and the picker to real engines are predicted, with no
    more than a block missing, and the index stays trusted."""
    async with PoolOfMistral(tmp_path) as pool:
        await predicted_hits(pool, "Mistral", 60)
