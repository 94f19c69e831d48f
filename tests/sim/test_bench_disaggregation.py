"""The benchmark of requests in two legs: its engines, its judgement and its tables."""

import asyncio
import io
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from rich.console import Console

from kvist_epp.disaggregation.leg_bodies import prefill_body, read_answer
from kvist_sim.bench.disaggregation.leg_engines import LegEngine
from kvist_sim.bench.disaggregation.report import (
    CONCURRENCY,
    SPLIT,
    WHOLE,
    BurstFigures,
    LegCell,
    LegsReport,
    document,
    tables,
)
from kvist_sim.bench.epp.client import Sample
from kvist_sim.bench.epp.prompts import Kind, PromptShape, bodies
from kvist_sim.bench.epp.report import figures
from kvist_sim.envoy_settings import Mode

KIND = Kind(40, PromptShape.CHAT_2)
MODES: tuple[Mode, ...] = ("buffered", "duplex")
BURST = BurstFigures("200 of 1 KB", 200, 200, 400, 400, 0, 1.5, 1.2, 7, 100_000_000, 107_000_000, 200)


class Counted(LegEngine):
    """An engine that also says when its connection has gone."""

    def __init__(self, gone: asyncio.Event) -> None:
        super().__init__("e1", 0.0)
        self._gone = gone

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the test."""
        self._gone.set()


def report(**changes: Any) -> LegsReport:
    """Return a report in which a split request costs three times as much."""
    sample = Sample(seconds=1.0, latencies=[0.001] * 100)
    cells = {
        LegCell(picker, mode, KIND, concurrency): figures(sample, 0.09 if picker == SPLIT else 0.03)
        for picker in (WHOLE, SPLIT)
        for mode in MODES
        for concurrency in (1, CONCURRENCY)
    }
    setting = {"prefill": 4, "decode": 16, "index_blocks": 100_000, "leg_seconds": 1.0, "burst_prefill": 4}
    return replace(LegsReport(cells, {}, [BURST], setting, [KIND], MODES), **changes)


async def test_leg_1_gets_what_the_picker_reads() -> None:
    """The engines' answer to a leg 1 describes blocks, with token ids if they are asked for; other requests
    get an answer without blocks."""
    gone = asyncio.Event()
    server = await asyncio.get_running_loop().create_server(lambda: Counted(gone), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{KIND.shape.path}"
    sent = bodies(KIND)[0]
    async with aiohttp.ClientSession() as client:

        async def answer(body: bytes) -> bytes:
            async with client.post(url, data=body) as response:
                return await response.read()

        chat = read_answer(await answer(prefill_body(KIND.shape.path, sent)))
        completion = read_answer(await answer(prefill_body("/v1/completions", sent)))
        assert chat is not None
        assert completion is not None
        assert (chat.engine, completion.token_ids) == ("e1", b"")
        assert len(json.loads(chat.token_ids)) > len(sent) // 5
        assert read_answer(await answer(sent)) is None
    await gone.wait()
    server.close()


def test_a_request_that_was_not_split_fails_the_benchmark() -> None:
    """Requests that were not split, fell back, or got no answer break the report; otherwise nothing does."""
    assert report().broken() == []
    cell = LegCell(SPLIT, "duplex", KIND, 1)
    assert "3 requests were not split" in report(not_split={cell: 3}).broken()[0]
    for bad in (replace(BURST, split=399), replace(BURST, fallbacks=1), replace(BURST, answered=199)):
        assert len(report(bursts=[bad]).broken()) == 1


@pytest.mark.parametrize("missing", [{}, {"bursts": []}, {"kinds": []}])
def test_tables_show_the_ratio(missing: dict[str, Any]) -> None:
    """The tables fit a page, have the ratio of both pickers, and either part can be left out."""
    console = Console(file=io.StringIO(), width=110)
    console.print(tables(report(**missing)))
    page = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("x 3.00" in page) is ("kinds" not in missing)
    assert ("400 of 400" in page) is ("bursts" not in missing)
    assert json.dumps(document(report(**missing)))
