"""Feed the index as the picker does: ZMQ sockets, event messages, the ingestor, and picks in between.

``python -m kvist_sim.bench.index.zmq_ingest SPEC`` measures one thing and prints it as JSON.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import uvloop

from kvist_epp.app.process import freeze_startup_objects
from kvist_epp.director.director import Director
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.extproc.pick_request import PickRequest
from kvist_epp.index.byte_index import Index
from kvist_epp.index.cached_part import Member
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.publisher_feed import FollowedPublisher
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.names import SESSION_HEADER
from kvist_epp.prompt.model import Model
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.telemetry.metrics import PickerMetrics
from kvist_epp.telemetry.request_log import LogWriter, RequestLog
from kvist_sim import model as model_files
from kvist_sim.bench.index.data import EVENT_BLOCKS
from kvist_sim.bench.index.publisher import TOKENS
from kvist_sim.workloads import text

ENGINES: Final = 8
ENDPOINTS: Final = 20
KEEP_MESSAGES: Final = 200
"""Chains each engine's cache holds: 12,800 blocks, 102,400 for the eight."""
STARTUP_SECONDS: Final = 1.0
"""The client that asks is a process and takes this long to begin; blocks still come when it ends."""


@dataclass(slots=True)
class Words:
    """A vocabulary of four random bytes a token: 64 a block."""

    chunks: None = None
    pieces: list[bytes] = field(
        default_factory=lambda: [random.Random(token).randbytes(4) for token in range(TOKENS)]
    )

    def encode(self, text: str) -> list[int]:  # noqa: ARG002  # no blocks from decode here
        """Return no tokens: this benchmark has no blocks from decode."""
        return []


@asynccontextmanager
async def _child(*argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvist_sim.bench.index.publisher",
        *argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=1 << 20,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def _fed(
    index: Index, messages: int, keep: int, rate: float, asked: Callable[[], Coroutine[Any, Any, None]]
) -> dict[str, float]:
    """Publishes and learns, and runs ``asked`` meanwhile. Wall and CPU seconds from the first block on."""
    spec = {"engines": ENGINES, "messages": messages, "keep": keep, "rate": rate}
    ingestor = Ingestor(index, Words())
    sources = [f"bench/engine-{number}/0" for number in range(ENGINES)]
    async with _child("publish", json.dumps(spec)) as child:
        assert child.stdout is not None
        ports = json.loads(await child.stdout.readline())
        subscriber = Subscriber(ingestor)
        subscriber.follow(
            FollowedPublisher(source.rpartition("/")[0], source, 0, f"tcp://127.0.0.1:{port}", None)
            for source, port in zip(sources, ports, strict=True)
        )
        beside = asyncio.create_task(asked())
        try:
            await _learned(ingestor, sources, 1)
            begin, cpu = time.perf_counter(), time.process_time()
            await _learned(ingestor, sources, ENGINES * messages * EVENT_BLOCKS)
            took = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
            await beside
        finally:
            beside.cancel()
            await subscriber.close()
    return took


async def _learned(ingestor: Ingestor, sources: Sequence[str], blocks: int) -> None:
    """Waits until so many blocks are learned; looks, because a callback would be measured too."""
    while sum(ingestor.stats(source).blocks for source in sources) < blocks:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def _nothing() -> None:
    """Make no picks."""


async def measure_ingest(blocks: int, *, evict: bool) -> dict[str, float]:
    """Return the rate at which events are taken from sockets into the index, with nothing else to do."""
    messages = max(1, blocks // ENGINES // EVENT_BLOCKS)
    took = await _fed(Index(), messages, KEEP_MESSAGES if evict else 0, 0, _nothing)
    stored = messages * ENGINES * EVENT_BLOCKS
    return {
        "blocks_per_second": stored / took["seconds"],
        "cpu_us_per_block": took["cpu_seconds"] / stored * 1e6,
    }


async def measure_picks(rate: float, seconds: float) -> dict[str, float]:
    """Latency of picks, the event loop's included, while ``rate`` blocks/s arrive and as many go."""
    director, latencies = _director(), list[float]()
    asking = _asker(director, latencies, seconds)
    if rate:
        messages = round(rate * (seconds + STARTUP_SECONDS) / ENGINES / EVENT_BLOCKS)
        await _fed(director.index, messages, KEEP_MESSAGES, rate, asking)
    else:
        await asking()
    ordered = sorted(latencies)
    return {
        "picks": len(ordered),
        "p50_ms": ordered[len(ordered) // 2],
        "p99_ms": ordered[len(ordered) * 99 // 100],
        "max_ms": ordered[-1],
    }


def _asker(
    director: Director, latencies: list[float], seconds: float
) -> Callable[[], Coroutine[Any, Any, None]]:
    words = random.Random("picks")
    messages = [
        {"role": "system", "content": text(words, 600)},
        {"role": "user", "content": text(words, 800)},
    ]
    body = json.dumps({"model": "m", "messages": messages}).encode()

    async def asked() -> None:
        async with _child("ask", str(seconds)) as child:
            assert child.stdout is not None
            while sent := await _exactly(child.stdout, 8):
                session = f"pick-{len(latencies)}"
                headers = {SESSION_HEADER: session}
                director.offer(
                    PickRequest("POST", "/v1/chat/completions", headers, body, None), time.monotonic()
                )
                latencies.append((time.monotonic_ns() - int.from_bytes(sent, "big")) / 1e6)
                request = director.table.find(session)
                assert request is not None
                director.progress.on_ended(request, "access-log", time.monotonic())

    return asked


async def _exactly(stream: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await stream.readexactly(size)
    except asyncio.IncompleteReadError:
        return b""


def _director() -> Director:
    index, history, tracker = Index(), RoutingHistory(), LoadTracker()
    lookup = Lookup(index, history)
    endpoints = [
        Endpoint(name=f"engine-{number}", namespace="bench", address=f"10.0.0.{number + 1}", port=8000)
        for number in range(ENDPOINTS)
    ]
    for endpoint in endpoints:
        lookup.members[endpoint.key] = Member((index.publisher(f"{endpoint.key}/0"),))
    director = Director(
        model=Model.load(str(model_files.folder())),
        index=index,
        history=history,
        lookup=lookup,
        tracker=tracker,
        metrics=PickerMetrics(),
        log=RequestLog(LogWriter(), enabled=False),
        now=time.monotonic(),
    )
    candidates = [Candidate(endpoint, tracker.load(endpoint.key)) for endpoint in endpoints]
    director.set_endpoints(candidates, time.monotonic())
    return director


def main(what: str, amount: float, seconds: float, *, evict: bool) -> dict[str, float]:
    """``ingest`` of ``amount`` blocks, or ``picks`` while that many come in each second."""
    freeze_startup_objects()  # the collector as in the picker's own process
    if what == "ingest":
        return uvloop.run(measure_ingest(int(amount), evict=evict))
    return uvloop.run(measure_picks(amount, seconds))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(**json.loads(sys.argv[1]))))
