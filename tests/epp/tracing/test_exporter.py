"""The exporter against a real collector over HTTP and gRPC: slow ones, absent ones, and ones that refuse."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tests.epp.tracing.picks import LAPS, TRACE, pick
from tests.fakes.collector import Collector

from kvist_epp.errors import SettingsError
from kvist_epp.telemetry.counters import TraceStats
from kvist_epp.tracing import exporter as exporting
from kvist_epp.tracing.destination import Destination
from kvist_epp.tracing.exporter import SpanExporter, open_exporter
from kvist_epp.tracing.pick_spans import SpanEncoder
from kvist_epp.tracing.trace_context import PickTracer
from kvist_sim.ports import free_ports

SPANS = 1 + len(LAPS)
PROTOCOLS = ("http/protobuf", "grpc")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that tests can wait for."""
    monkeypatch.setattr(exporting, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(exporting, "LONGEST_SECONDS", 0.02)
    monkeypatch.setattr(exporting, "RETRY_SECONDS", (0.01, 0.01))


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    """A collector that listens."""
    async with Collector() as running:
        yield running


class Exporting:
    """A tracer, its exporter, and what they count."""

    def __init__(self, limit: int = 100) -> None:
        self.stats = TraceStats()
        self.tracer = PickTracer(1.0, self.stats, limit=limit)

    @contextlib.asynccontextmanager
    async def to(self, url: str, protocol: str, **more: Any) -> AsyncIterator[SpanExporter]:
        """Run an exporter to a collector."""
        url = f"{url}/v1/traces" if protocol != "grpc" else url
        where = Destination(**{"url": url, "protocol": protocol, "headers": {}, "certificate": ""} | more)
        described = {"service.name": "kvist-epp"}
        async with open_exporter(self.tracer, self.stats, where, resource=described, version="1") as found:
            task = asyncio.create_task(found.run())
            try:
                yield found
            finally:
                task.cancel()
                await asyncio.wait([task])

    async def until_lost(self, reason: str, count: int) -> None:
        """Wait until so many spans were dropped for this reason."""
        while self.stats.dropped[reason] < count:
            await asyncio.sleep(0.01)


def url_of(collector: Collector, protocol: str) -> str:
    """The collector's address for a protocol."""
    return collector.grpc if protocol == "grpc" else collector.http


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_spans_arrive_with_their_resource(collector: Collector, protocol: str) -> None:
    """Every pick arrives once, with the service's name, and with the headers that the collector needs."""
    running = Exporting()
    async with running.to(url_of(collector, protocol), protocol, headers={"x-key": "k"}):
        for number in range(20):
            running.tracer.add(pick(id=str(number)))
        while running.stats.exported < 20 * SPANS:
            await asyncio.sleep(0.01)

    picks = [seen for seen in collector.spans if seen.name == "kvist.pick"]
    assert [seen.attributes["kvist.request_id"] for seen in picks] == [str(number) for number in range(20)]
    assert {(seen.service, seen.trace_id) for seen in collector.spans} == {("kvist-epp", TRACE)}
    assert len(collector.spans) == 20 * SPANS
    assert {headers["x-key"] for headers in collector.headers} == {"k"}
    assert running.stats.dropped.total() == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_an_absent_collector_loses_spans_and_nothing_else(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing listens: spans are counted as lost after the retries, and the log says so once."""
    running = Exporting()
    async with running.to(f"http://127.0.0.1:{free_ports(1)[0]}", protocol):
        for count in (1, 2):
            running.tracer.add(pick())
            await running.until_lost("unreachable", count * SPANS)

    assert running.stats.exported == 0
    assert [record.levelname for record in caplog.records if record.name == exporting.__name__] == ["WARNING"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_spans_arrive_once_a_collector_is_back(collector: Collector, protocol: str) -> None:
    """An answer that asks for a retry loses nothing if the next one accepts."""
    collector.status, collector.code = 503, grpc.StatusCode.UNAVAILABLE
    running = Exporting()
    async with running.to(url_of(collector, protocol), protocol):
        running.tracer.add(pick())
        while not collector.headers:
            await asyncio.sleep(0.002)
        collector.status, collector.code = 200, grpc.StatusCode.OK
        await collector.until("kvist.pick")
        while not running.stats.exported:
            await asyncio.sleep(0.01)

    assert (running.stats.exported, running.stats.dropped.total()) == (SPANS, 0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_refused_export_is_not_repeated(collector: Collector, protocol: str) -> None:
    """A collector that says no for good is asked once, and the next batch is tried again."""
    collector.status, collector.code = 400, grpc.StatusCode.INVALID_ARGUMENT
    running = Exporting()
    async with running.to(url_of(collector, protocol), protocol):
        running.tracer.add(pick())
        await running.until_lost("refused", SPANS)
        assert len(collector.headers) == 1
        collector.status, collector.code = 200, grpc.StatusCode.OK
        running.tracer.add(pick())
        await collector.until("kvist.pick")


async def test_rejected_spans_are_counted(collector: Collector) -> None:
    """Spans that the collector's answer says it rejected count as lost."""
    collector.rejects = 2
    running = Exporting()
    async with running.to(collector.http, PROTOCOLS[0]):
        running.tracer.add(pick())
        await running.until_lost("refused", 2)
    assert running.stats.exported == SPANS - 2


async def test_a_slow_collector_bounds_what_waits(collector: Collector) -> None:
    """While an export hangs, at most the queue's limit waits; the rest is dropped, what waited is sent."""
    running = Exporting(limit=5)
    async with running.to(collector.http, PROTOCOLS[0]):
        collector.open.clear()
        running.tracer.add(pick())
        while len(running.tracer):
            await asyncio.sleep(0.01)
        for _ in range(50):
            running.tracer.add(pick())
        assert len(running.tracer) == 5
        assert running.stats.dropped["queue-full"] == 45 * SPANS
        collector.open.set()
        while running.stats.exported < 6 * SPANS:
            await asyncio.sleep(0.01)


async def test_the_end_sends_what_is_left(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends sends the spans that wait, also those of an export that its end interrupted."""
    running = Exporting()
    async with running.to(collector.http, PROTOCOLS[0]):
        collector.status = 503
        monkeypatch.setattr(exporting, "RETRY_SECONDS", (60.0,))
        running.tracer.add(pick(id="interrupted"))
        while not collector.headers:
            await asyncio.sleep(0.01)
        collector.status = 200
        running.tracer.add(pick(id="waiting"))
    sent = [seen.attributes.get("kvist.request_id") for seen in collector.spans if seen.name == "kvist.pick"]
    assert sent == ["interrupted", "waiting"]


async def test_the_end_does_not_wait_for_a_collector(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that hangs delays the end of the process by the limit, not longer."""
    monkeypatch.setattr(exporting, "FLUSH_SECONDS", 0.1)
    running = Exporting()
    async with asyncio.timeout(5):
        async with running.to(collector.http, PROTOCOLS[0]):
            collector.open.clear()
            running.tracer.add(pick())


async def test_a_bug_costs_its_batch_alone(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception while spans are made is logged and counted; the exporter goes on."""

    def broken(*_: object) -> None:
        raise ValueError("a bug")

    running = Exporting()
    async with running.to(collector.http, PROTOCOLS[0]):
        with monkeypatch.context() as patched:
            patched.setattr(SpanEncoder, "spans", broken)
            running.tracer.add(pick())
            await running.until_lost("failed", SPANS)
        running.tracer.add(pick())
        await collector.until("kvist.pick")


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_missing_certificate_names_its_variable(protocol: str) -> None:
    """A file with authorities that cannot be read is refused at the start."""
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_CERTIFICATE"):
        async with Exporting().to("https://127.0.0.1:1", protocol, certificate="/none/ca.crt"):
            pass
