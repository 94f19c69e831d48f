"""Tests of the benches at rest and at scale: engines in one process, and the reports."""

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from rich.console import Console, RenderableType

from kvist_epp.endpoints.endpoints_file import parse_endpoints
from kvist_epp.engines.vllm.engine_metrics import needed_lines, parse_metrics, parse_models
from kvist_epp.engines.vllm.kv_events import Removed, Stored, decode
from kvist_sim.bench.rest.few import Few
from kvist_sim.bench.rest.fleet import (
    CHAINS,
    EVENT_BLOCKS,
    KEEP,
    FleetPorts,
    Messages,
    address,
    endpoints_file,
)
from kvist_sim.bench.rest.idle import NOW, UNREACHABLE, Idle, fleet
from kvist_sim.bench.rest.pages import PageRead
from kvist_sim.bench.rest.report import (
    RestReport,
    ScaleReport,
    rest_document,
    rest_table,
    scale_document,
    scale_table,
)
from kvist_sim.bench.rest.scale import Scale
from kvist_sim.http1 import get
from kvist_sim.processes import Children

SCALE = Scale(
    replicas=2,
    rest=0.1,
    events=0.3,
    requests=0.2,
    both=0.4,
    blocks=20_000.0,
    most_blocks=0.0,
    answered=200.0,
    refused=0,
    p99=0.004,
)


def shown(table: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=110).print(table)
    return out.getvalue()


async def test_nothing_accepts_connections_at_the_addresses_of_unreachable_engines(tmp_path: Path) -> None:
    """Their endpoints file has as many endpoints as asked for, and no process stands behind them."""
    async with Children(tmp_path) as children, fleet(children, tmp_path, 3, kind=UNREACHABLE) as file:
        endpoints = parse_endpoints(file.read_bytes()).endpoints
        assert len(endpoints) == 3
        for endpoint in endpoints:
            with pytest.raises(ConnectionRefusedError):
                await get(endpoint.address, endpoint.port, "/metrics")


async def test_engines_in_one_process_serve_metrics_and_events(tmp_path: Path) -> None:
    """Each engine has its own address, a page of vLLM's metrics that changes, its models, and its events."""
    async with Children(tmp_path) as children, fleet(children, tmp_path, 3) as file:
        endpoints = parse_endpoints(file.read_bytes()).endpoints
        assert [endpoint.address for endpoint in endpoints] == [address(number) for number in range(3)]
        one = endpoints[1]
        status, page = await get(one.address, one.port, "/metrics")
        assert (status, parse_metrics(needed_lines(page).decode()).block_size) == (200, 16)
        assert parse_models((await get(one.address, one.port, "/v1/models"))[1]).models == {"kvist-bench"}

        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.subscribe(b"")
            socket.connect(one.kv_events or "")
            (tmp_path / "fleet-3.rate").write_text("20000")
            async with asyncio.timeout(20):
                _, first, payload = await socket.recv_multipart()
                _, second, _ = await socket.recv_multipart()
        assert int.from_bytes(second, "big") == int.from_bytes(first, "big") + 1
        assert isinstance(decode(payload).events[-1], Stored)


def test_each_message_stores_a_chain_and_evicts_one() -> None:
    """The caches keep their size: what a message evicts was stored by the fourth message before it."""
    messages = Messages(2)
    batches = [decode(messages.next(1)) for _ in range(2 * CHAINS)]
    stored = [event.hashes for batch in batches for event in batch.events if isinstance(event, Stored)]
    removed = [
        {block for event in batch.events if isinstance(event, Removed) for block in event.hashes}
        for batch in batches
    ]
    assert len(stored[0]) == EVENT_BLOCKS
    assert all(removed[n] == set(stored[n - KEEP]) for n in range(KEEP, len(batches)))
    assert decode(messages.next(0)).events[-1] != batches[0].events[-1]


def test_the_report_at_rest_has_bounds() -> None:
    """A picker that uses more than its bound breaks it, an older revision does not; failed requests do."""
    few = Few(NOW, 100, 0, 0.002, 0.003, 0.004)
    good = RestReport([Idle(4, NOW, 0.004), Idle(7, NOW, 0.9), Idle(4, "abc", 0.5)], [few])
    assert good.broken() == []
    page = shown(rest_table(good))
    assert "0.40%" in page
    assert "2,000" in page
    assert json.loads(json.dumps(rest_document(good)))["few"][0]["requests"] == 100
    assert "health check" not in page

    read = RestReport([], [], [PageRead(NOW, "/metrics", 567_000, 0.173, 0.0154)])
    page = shown(rest_table(read))
    assert [line.split() for line in page.splitlines() if "/metrics" in line] == [
        ["now", "/metrics", "567", "173", "15.4"]
    ]
    assert "CPU" not in page
    assert json.loads(json.dumps(rest_document(read)))["pages"][0]["size"] == 567_000

    bad = RestReport([Idle(1_000, NOW, 0.16)], [Few(NOW, 100, 3, 0.002, 0.003, 0.004)])
    assert bad.broken() == [
        "1000 endpoints (vllm): 16.0% of a core at rest, more than 15%",
        "now: 3 requests failed",
    ]


def test_needs_at_the_goal_follow_from_a_part_of_it() -> None:
    """Every replica takes in all events, at the cost that they have at the goal's rate where it was offered,
    and its part of the requests."""
    assert SCALE.per_block == pytest.approx(1e-5)
    assert SCALE.per_request == pytest.approx(0.00025)
    assert SCALE.goal_requests == pytest.approx(0.25)
    report = ScaleReport([SCALE])
    assert report.goal_events(SCALE) == pytest.approx(2.0)
    page = shown(scale_table(report))
    assert "for a second" not in page
    assert "2.35" in page
    alone = replace(SCALE, replicas=1, most_blocks=100_000.0, requests=0.3)
    report = ScaleReport([alone, SCALE])
    assert [report.goal_events(one) for one in report.scale] == [2.0, 2.0]
    assert "100,000 for a second" in shown(scale_table(report))
    document = json.loads(json.dumps(scale_document(report)))["scale"]
    assert [one["goal"] for one in document] == [pytest.approx(2.6), pytest.approx(2.35)]
    assert report.broken() == []


def test_the_endpoints_file_has_an_address_for_each(tmp_path: Path) -> None:
    """A thousand engines share three ports at different addresses."""
    file = tmp_path / "endpoints.json"
    file.write_text(json.dumps(endpoints_file(1_000, FleetPorts(1, 2, 3))))
    assert len({e.address for e in parse_endpoints(file.read_bytes()).endpoints}) == 1_000
