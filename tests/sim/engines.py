"""Simulated engines for tests, in this process, on free ports."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvist_sim.engine import args, run

FAST = ("--port", "0", "--host", "127.0.0.1", "--sim-time-scale", "1000", "--enable-prompt-tokens-details")


@dataclass
class Client:
    """Speaks to one engine."""

    session: aiohttp.ClientSession
    running: run.Running

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON (or text) of a GET."""
        async with self.session.get(path) as response:
            return response.status, _content(await response.read())

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON (or text) of a POST."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        given = {"Content-Type": "application/json", **_dashed(headers)}
        async with self.session.post(path, data=raw, headers=given) as response:
            return response.status, _content(await response.read())

    async def complete(self, prompt: Any, max_tokens: int = 4, **more: Any) -> dict[str, Any]:
        """The answer to a completion."""
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | more
        status, answer = await self.post("/v1/completions", body)
        assert status == 200, answer
        return dict(answer)

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a streamed answer, without the end marker, which must be there."""
        async with self.session.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            blocks = (await response.read()).decode().split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        return [msgspec.json.decode(block.removeprefix("data: ")) for block in blocks[:-2]]

    async def metrics(self) -> dict[str, float]:
        """Samples by name and labels as they are on the page."""
        lines = str((await self.get("/metrics"))[1]).splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
        }


@asynccontextmanager
async def engine(*argv: str, **environ: str) -> AsyncIterator[Client]:
    """A running engine with model name ``m`` and a client."""
    async with run.started(args.read(["m", *FAST, *argv], environ)) as running:
        base = f"http://127.0.0.1:{running.port}"
        async with aiohttp.ClientSession(base) as session:
            yield Client(session, running)


def _content(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw.decode()


def _dashed(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
