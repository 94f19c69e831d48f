"""Chats with pictures: predictions against what two real engines with a vision model report."""

import base64
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine import install, tiny
from tests.engine.mix import CHAT, MESSAGES, SENTENCES, Mix, Turn
from tests.engine.pool import Pool
from tests.engine.test_main_path import error, report, short
from tests.engine.vllm import VllmEngine

pytestmark = pytest.mark.timeout(1200)
REQUESTS = 100
PICTURES = 12


class PoolOfVision(Pool):
    """``Pool`` with a model that sees pictures."""

    def _build_model(self) -> Path:
        return tiny.vision(self._folder / "model")

    def _engine(self, number: int, ports: tuple[int, ...] = ()) -> VllmEngine:
        path = {"PYTHONPATH": str(install.torchvision())}
        return VllmEngine(self.model, "--max-model-len", "4096", ports=ports, environment=path)


class MixOfPictures(Mix):
    """A mix in which most chats have pictures, few of them new."""

    def next(self) -> Turn:
        """The next request."""
        turn = super().next()
        if turn.path == CHAT and turn.body["messages"][-1]["role"] == "user":
            last = turn.body["messages"][-1]
            last["content"] = self._with_pictures(last["content"])
        return turn

    def _with_pictures(self, text: str) -> str | list[dict[str, Any]]:
        shown = [picture(self.rng.randrange(PICTURES)) for _ in range(self.rng.choice((0, 1, 1, 2)))]
        if not shown:
            return text
        parts: list[dict[str, Any]] = [
            {"type": "text", "text": text},
            *({"type": "image_url", "image_url": one} for one in shown),
        ]
        self.rng.shuffle(parts)
        return parts


def screenshots(rng: random.Random, turns: int) -> Iterator[Turn]:
    """The requests of an agent of the Messages API that looks at a picture with each call of its tool."""
    text = " ".join(rng.choice(SENTENCES) for _ in range(6))
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    tools = [{"name": "look", "description": "Takes a picture.", "input_schema": {"type": "object"}}]
    for number in range(turns):
        thinking = {"type": rng.choice(("adaptive", "disabled"))}
        body = {"model": "m", "max_tokens": 8, "messages": list(messages), "tools": tools}
        yield Turn(MESSAGES, {**body, "thinking": thinking, "tool_choice": {"type": "none"}})
        use = {"type": "tool_use", "id": f"c{number}", "name": "look", "input": {"at": number}}
        source = picture(rng.randrange(PICTURES))["url"].partition("base64,")[2]
        shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": source}}
        content = [{"type": "text", "text": rng.choice(SENTENCES)}, shown]
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": content}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def picture(seed: int) -> dict[str, str]:
    """A PNG of its own size and colours, as a data URL."""
    rng = random.Random(seed)
    width, height = rng.randrange(60, 220), rng.randrange(60, 220)
    rows = b"".join(b"\0" + rng.randbytes(3) * width for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    data = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
    encoded = base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()
    return {"url": f"data:image/png;base64,{encoded}"}


async def test_hits_of_prompts_with_pictures_are_predicted(tmp_path: Path) -> None:
    """40 requests of agents whose tools return pictures, and 100 mixed ones, most with pictures, one at a
    time, each picture new to the picker once: predicted within 3 %, and the index stays trusted. A restarted
    picker learns pictures that engines have cached, and is within 3 %, too, once it has seen them."""
    async with PoolOfVision(tmp_path) as pool:
        agents = [screenshots(random.Random(seed), 10) for seed in range(4)]
        seen = [await pool.ask(turn) for turns in zip(*agents, strict=True) for turn in turns]
        report("pictures in results", seen)
        mix = MixOfPictures(1, "m")
        before = [await pool.ask(mix.next()) for _ in range(REQUESTS)]
        report("with pictures", before)
        await pool.restart_picker()
        learning = [await pool.ask(mix.next()) for _ in range(REQUESTS // 3)]
        report("after a restart", learning)
        after = [await pool.ask(mix.next()) for _ in range(REQUESTS // 3)]
        report("and later", after)
        approximate = (await pool.page("/debug/fleet"))["approximate"]
        known = (await pool.page("/debug/index"))["model"]["known_media"]

    assert sum(one.cached for one in seen) > 5_000
    assert sum(one.cached for one in before) > 10_000
    assert max(error(seen), error(before)) <= 0.03
    assert short(seen) == short(before) == short(after) == []
    assert error(after) <= 0.03
    assert approximate == {}
    assert known > PICTURES // 2
