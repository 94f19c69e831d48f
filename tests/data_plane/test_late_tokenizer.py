"""A picker whose tokenizer is on a hub that is away when it starts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.data_plane.product import MODEL, Product, product
from tests.fakes.hub import hub_with

from kvist_sim.ports import free_ports

FILES = {path.name: path.read_bytes() for path in Path(MODEL).iterdir() if path.is_file()}
FAST = ("--sim-time-scale", "20", "--num-gpu-blocks-override", "4000")
SYSTEM = "You are a patient librarian who answers in complete sentences and names the shelf. " * 12


def chat(question: str) -> dict[str, Any]:
    """A system prompt of many blocks, and a question."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages, "max_tokens": 4}


async def test_it_serves_without_and_is_precise_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are served in approximate mode, pages and metrics say why; once the hub answers the picker is
    precise without a restart: predictions equal what engines report, and no event is called a lie."""
    [port] = free_ports(1)
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    flags = ("--model=hf://kvist/twig",)
    async with product(tmp_path, engines=2, flags=FAST, picker_flags=flags) as running:
        assert await running.metric("kvist_epp_tokenizer_missing") == 1
        assert "warning: cannot fetch hf://kvist/twig" in await ready_page(running)
        assert (await running.send(chat("first")))[0] == 200
        row = (await running.explain(chat("first")))["endpoints"][0]
        assert (row["matched_tokens"] > 0, (await running.page("/debug/index"))["publishers"]) == (True, {})

        with hub_with(FILES, port):
            while await running.metric("kvist_epp_tokenizer_missing"):
                await asyncio.sleep(0.1)
        while await running.metric("kvist_epp_index_trust") < 2:
            await asyncio.sleep(0.1)
        assert await ready_page(running) == "ok\n"

        best = (await running.explain(chat("second")))["endpoints"][0]
        _, answer, _ = await running.send(chat("second"))
        assert best["matched_tokens"] > 0
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == best["matched_tokens"]
        assert (await running.explain(chat("third")))["mode"] == "precise"
        await running.until("kvist_epp_requests_ended_total", 2)
        assert await running.metric("kvist_epp_index_trust") == 2


async def ready_page(running: Product) -> str:
    """``/readyz``, which says 200."""
    url = f"http://127.0.0.1:{running.picker.metrics_port}/readyz"
    async with running.client.get(url) as response:
        assert response.status == 200
        return await response.text()
