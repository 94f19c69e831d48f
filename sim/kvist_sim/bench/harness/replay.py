"""A picker without sockets, to which the bytes of requests are replayed.

HTTP/2, ext_proc, batches, director, request log and the account of ends are the product's.

Timers, sockets of the gateway and work in the kernel are not in it, so that its work is the same in each run.
"""

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Final

from kvist_epp.app.decision_batch import DecisionBatch
from kvist_epp.director.assembly import make_director
from kvist_epp.director.completion import CompletionHandler
from kvist_epp.director.decision_log import DecisionLog
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.extproc.service import ext_proc_methods
from kvist_epp.flowcontrol.driver import FlowDriver
from kvist_epp.http2 import frames
from kvist_epp.http2.grpc_health import Health
from kvist_epp.http2.http2_connection import Http2Connection
from kvist_epp.http2.limits import Limits
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry.counters import TraceStats
from kvist_epp.telemetry.metrics import PickerMetrics
from kvist_epp.telemetry.request_log import LogWriter, RequestLog
from kvist_epp.tracing.exporter import BATCH, SpanExporter
from kvist_epp.tracing.trace_context import PickTracer, TraceContext
from kvist_sim.bench.epp.prompts import Kind, PromptShape, bodies
from kvist_sim.bench.harness.direct import (
    GIVEN_WINDOW,
    LOG_OPENING,
    OPENING,
    PICKED,
    PickAnswer,
    body_message,
    framed,
    head_message,
    log_message,
)

ENDPOINTS: Final = 20
LOG_STREAM: Final = 1
TURN: Final = 4
"""Requests that arrive in one turn of the event loop."""
KIND: Final = Kind(1, PromptShape.COMPLETION)
UNKNOWN: Final = ":0"
"""The endpoint in the access log: none, because the bytes are made before the picks."""


class _ForgottenLines(LogWriter):
    """Takes lines as the log does, without its thread, which would be woken by a clock."""

    def __init__(self) -> None:
        self._kept: deque[bytes] = deque(maxlen=1)

    def write(self, line: bytes) -> None:
        """Take a line."""
        self._kept.append(line)


class CountingTracer(PickTracer):
    """A tracer that also counts what is recorded."""

    recorded = 0

    def on_sent(self, request: InFlightRequest, trace: TraceContext) -> None:
        """Count it, too."""
        self.recorded += 1
        super().on_sent(request, trace)


@dataclass(slots=True)
class Replay:
    """A picker without sockets, and the requests that it gets."""

    connection: Http2Connection
    stats: TraceStats
    tracer: CountingTracer | None
    turns: Iterator[bytes]
    picked: Mapping[str, int]
    """Requests so far by outcome."""
    exporter: SpanExporter | None = None

    def prepared(self, requests: int) -> list[bytes]:
        """Return the bytes of the next requests, a turn each."""
        return list(itertools.islice(self.turns, requests // TURN))

    async def run(self, turns: Sequence[bytes]) -> None:
        """Answer requests that come in turns, report the ends of those before, and export all spans."""
        outbox, before = self.connection.outbox, self.picked["picked"]
        tracer: Sized = () if self.tracer is None else self.tracer
        for received in turns:
            self.connection.receive(received)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            outbox.take()
            if len(tracer) >= BATCH:
                await self._flush()
        await self._flush()
        assert self.picked == {"picked": before + TURN * len(turns)}, "a request was not answered"
        assert not self.stats.dropped.total(), "spans were dropped"

    async def _flush(self) -> None:
        if self.exporter is not None:
            await self.exporter.flush(600)


def replay_of(ratio: float | None, contexts: float | None, settings: Settings) -> Replay:
    """Return a picker and its requests.

    ``ratio``: share of the requests that are traced; None: the picker does not trace. ``contexts``: share of
    the requests that come with a sampled context, the others with one that is not; None: without any.
    """
    loop_clock, logs = asyncio.get_running_loop().time, RequestLog(_ForgottenLines())
    stats, driver = TraceStats(), FlowDriver(loop_clock)
    sampler = random.Random(1).getrandbits
    tracer = None if ratio is None else CountingTracer(ratio, stats, random_bits=sampler)
    metrics, decisions = (
        PickerMetrics(),
        DecisionLog(settings.decision_log, "r", clock=loop_clock, wall=time.time),
    )
    director = make_director(
        settings,
        metrics=metrics,
        log=logs,
        now=loop_clock(),
        wake=driver.wake,
        replica="r",
        tracer=tracer,
        decisions=decisions,
    )
    endpoints = [Endpoint(f"engine-{n}", "pool", "10.0.0.1", 8000 + n, {}) for n in range(ENDPOINTS)]
    director.set_endpoints([Candidate(e, director.tracker.load(e.key)) for e in endpoints], 0.0)
    assert director.flow is not None
    driver.start(director.flow)
    batch, completion = DecisionBatch(director, driver, loop_clock), CompletionHandler(director, loop_clock)
    methods = ext_proc_methods(batch.decide, completion.on_access_log, Health())
    connection = Http2Connection(methods, Limits())
    return Replay(connection, stats, tracer, _turns(contexts), metrics.requests)


def _turns(contexts: float | None) -> Iterator[bytes]:
    """Yield the bytes of one turn after the other: requests, the ends of their calls, and the access log."""
    contents, draw = bodies(KIND), random.Random(2)
    first = {frames.SETTING_ENABLE_PUSH: 0, frames.SETTING_INITIAL_WINDOW_SIZE: GIVEN_WINDOW}
    before = frames.PREFACE + frames.settings(first) + _access_log_frames(LOG_STREAM, (), opens=True)
    for turn in itertools.count():
        numbers = [3 + 2 * (turn * TURN + at) for at in range(TURN)]
        found = [before, frames.window_update(frames.CONNECTION, 1 << 16)]
        for at, number in enumerate(numbers):
            metadata = {}
            if contexts is not None:
                flags = "01" if draw.random() < contexts else "00"
                metadata["traceparent"] = f"00-{draw.getrandbits(128) | 1:032x}-{number:016x}-{flags}"
            head = {":method": "POST", ":path": KIND.shape.path, "content-type": "application/json"}
            found.append(
                _request_frames(number, _name(turn, at), head, contents[at % len(contents)], metadata)
            )
        yield b"".join(found)
        ended = [
            PickAnswer(_name(turn, at), PICKED, UNKNOWN, f"r.{turn * TURN + at + 1}") for at in range(TURN)
        ]
        ends = [frames.frame(frames.DATA, frames.END_STREAM, n.to_bytes(4, "big")) for n in numbers]
        before = b"".join([*ends, _access_log_frames(LOG_STREAM, ended)])


def _request_frames(
    number: int, name: str, headers: Mapping[str, str], body: bytes, metadata: Mapping[str, str]
) -> bytes:
    """Return all that opens one stream and sends a request on it; ``metadata`` is the call's."""
    block = OPENING + b"".join(frames.literal(k.encode(), v.encode()) for k, v in metadata.items())
    return _messages(number, block, framed(head_message(name, headers)) + framed(body_message(body)))


def _access_log_frames(number: int, answers: Iterable[PickAnswer], *, opens: bool = False) -> bytes:
    """Return a message of the access log with the ends of these requests; ``opens``: it begins the stream."""
    return _messages(number, LOG_OPENING if opens else b"", framed(log_message(answers, PICKED)))


def _messages(number: int, block: bytes, content: bytes) -> bytes:
    stream, end = number.to_bytes(4, "big"), frames.END_HEADERS
    opening = frames.frame(frames.HEADERS, end, stream, block) if block else b""
    return opening + frames.frame(frames.DATA, 0, stream, content)


def _name(turn: int, at: int) -> str:
    """Return the id of a request, as Envoy makes them."""
    return f"{turn:08x}-0000-4000-8000-{at:012x}"
