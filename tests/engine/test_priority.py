"""Effect of the priority that the picker passes on to the engine."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from tests.engine import tiny
from tests.engine.vllm import VllmEngine

from kvist_epp.engines.vllm.engine_metrics import parse_metrics
from kvist_epp.flowcontrol.priorities import engine_priority
from kvist_epp.names import ENGINE_PRIORITY_HEADER

PATH = "/v1/chat/completions"


class Line:
    """Requests to one engine, and the order in which they were answered."""

    def __init__(self, engine: VllmEngine, client: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.client = client
        self.answered: list[str] = []

    async def send(self, name: str, priority: int | None, tokens: int = 4) -> None:
        """One request, to its end."""
        headers = {} if priority is None else {ENGINE_PRIORITY_HEADER: engine_priority(priority)}
        messages = [{"role": "user", "content": name}]
        body = {"model": "m", "messages": messages, "max_tokens": tokens, "ignore_eos": True}
        async with self.client.post(f"{self.engine.url}{PATH}", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            await response.read()
        self.answered.append(name)

    async def until(self, *, running: int, waiting: int) -> None:
        """Wait until the engine says that it has so many; the test's time limit bounds it."""
        while True:
            async with self.client.get(f"{self.engine.url}/metrics") as response:
                sample = parse_metrics(await response.text())
            if (sample.running, sample.waiting) == (running, waiting):
                return
            await asyncio.sleep(0.05)


@pytest.mark.timeout(900)
async def test_a_higher_priority_goes_first_in_the_engine(tmp_path: Path) -> None:
    """With --scheduling-policy priority and one slot, vLLM takes up first what matters most to the picker."""
    folder = tiny.build("llama3", tmp_path / "llama3")
    flags = ("--scheduling-policy", "priority", "--max-num-seqs", "1")
    async with VllmEngine(folder, *flags) as engine, aiohttp.ClientSession() as client:
        line = Line(engine, client)
        tasks = [asyncio.create_task(line.send("running", None, tokens=2000))]
        await line.until(running=1, waiting=0)
        for number, (name, priority) in enumerate([("low", -1), ("plain", None), ("high", 5)], 1):
            tasks.append(asyncio.create_task(line.send(name, priority)))
            await line.until(running=1, waiting=number)
        await asyncio.gather(*tasks)

    assert line.answered == ["running", "high", "plain", "low"]
