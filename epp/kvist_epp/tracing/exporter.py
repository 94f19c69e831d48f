"""Sends recorded picks to a collector over OTLP, beside the requests and never in their way.

Picks and ends wait in the tracer's bounded queue. A task takes them out in batches, encodes them in slices
of less than a millisecond, and sends one batch at a time. While the collector is slow or absent the queue
fills up, further picks are dropped, and the metrics count both. Retries follow the OTLP specification.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import aiohttp
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from kvist_epp.errors import ExportError, SettingsError, traceback_without_text
from kvist_epp.telemetry.counters import TraceStats
from kvist_epp.tracing.destination import GRPC, Destination
from kvist_epp.tracing.pick_spans import SpanEncoder
from kvist_epp.tracing.trace_context import PickTracer, Recorded

if TYPE_CHECKING:
    import grpc

BATCH: Final = 1024
"""Picks and ends of one export: a pick has six to eight spans, and 500 picks with their ends 0.6 MB."""
LONGEST_SECONDS: Final = 5.0
"""Time after which fewer are sent: an export costs a millisecond by itself. OpenTelemetry's default."""
POLL_SECONDS: Final = 0.25
"""Interval at which the queue is looked at; it has room for the picks of several."""
SLICE: Final = 16
"""Picks and ends that are encoded before other work has its turn: 0.2 ms."""
SEND_SECONDS: Final = 10.0
"""Longest time of one export; OpenTelemetry's default."""
RETRY_SECONDS: Final = (1.0, 2.0, 4.0, 8.0)
"""Pauses before an export is tried again; then its spans are dropped."""
FLUSH_SECONDS: Final = 2.0
"""Longest time that the end of the process waits for the last spans."""

_RETRIED_STATUS: Final = frozenset((429, 502, 503, 504))
_GRPC_METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_GRPC_RETRIED: Final = frozenset(
    ("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS")
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Sender(Protocol):
    """Sends one serialised export, and returns the serialised response. Raises ExportError."""

    async def send(self, body: bytes) -> bytes: ...


class HttpSender:
    """Sends exports by POST (``http/protobuf``)."""

    def __init__(self, collector: Destination, session: aiohttp.ClientSession) -> None:
        self._url = collector.url
        self._session = session

    async def send(self, body: bytes) -> bytes:
        try:
            async with self._session.post(self._url, data=body) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ExportError(str(error) or type(error).__name__, retry=True) from error
        if response.status == 200:
            return answer
        raise ExportError(f"HTTP status {response.status}", retry=response.status in _RETRIED_STATUS)


class GrpcSender:
    """Sends exports by gRPC."""

    def __init__(self, collector: Destination, channel: "grpc.aio.Channel") -> None:
        self._export: Any = channel.unary_unary(
            _GRPC_METHOD, request_serializer=bytes, response_deserializer=bytes
        )
        self._metadata = tuple(collector.headers.items())

    async def send(self, body: bytes) -> bytes:
        import grpc

        try:
            answer: bytes = await self._export(body, timeout=SEND_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            raise ExportError(f"{code}: {error.details()}", retry=code in _GRPC_RETRIED) from error
        return answer


class SpanExporter:
    """Takes picks from the tracer and sends their spans."""

    def __init__(
        self,
        tracer: PickTracer,
        stats: TraceStats,
        sender: Sender,
        *,
        resource: Mapping[str, str],
        version: str,
        name: str,
    ) -> None:
        """``resource``: attributes of this picker. ``name``: the collector in log lines."""
        self._tracer = tracer
        self._stats = stats
        self._sender = sender
        self._encoder = SpanEncoder(resource, version)
        self._name = name
        self._unsent: tuple[bytes, int] | None = None
        """Serialised export that was not answered yet, and its spans."""
        self._failing = False

    async def run(self) -> None:
        """Export until cancelled. Nothing that a collector does ends it."""
        due = 0.0
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if len(self._tracer) < BATCH and time.monotonic() < due:
                continue
            await self._export(RETRY_SECONDS)
            while len(self._tracer) >= BATCH:
                await self._export(RETRY_SECONDS)
            due = time.monotonic() + LONGEST_SECONDS

    async def flush(self, seconds: float) -> None:
        """Send what is left, once, for at most so long; what cannot be sent is lost."""
        try:
            async with asyncio.timeout(seconds):
                while self._unsent is not None or len(self._tracer):
                    await self._export(())
        except TimeoutError:
            logger.warning("traces: not all spans could be sent to %s before the end", self._name)

    async def _export(self, pauses: tuple[float, ...]) -> None:
        """Send one batch, the one that was interrupted first; a batch that cannot be sent is dropped."""
        if self._unsent is None:
            taken = self._tracer.take(BATCH)
            if not taken:
                return
            try:
                self._unsent = await self._encoded(taken), sum([each.span_count for each in taken])
            except Exception as error:  # noqa: BLE001  a bug in a span must not end the picker
                self._stats.dropped["failed"] += sum([each.span_count for each in taken])
                logger.error("traces: spans could not be made: %s", traceback_without_text(error))  # noqa: TRY400
                return
        body, count = self._unsent
        try:
            refused = min(_refused(await self._send(body, pauses)), count)
        except ExportError as error:
            self._stats.dropped["unreachable" if error.retry else "refused"] += count
            self._on_failure(error)
        except Exception as error:  # noqa: BLE001  as above
            self._stats.dropped["failed"] += count
            logger.error("traces: the export failed: %s", traceback_without_text(error))  # noqa: TRY400
        else:
            self._stats.exported += count - refused
            self._stats.dropped["refused"] += refused
            if self._failing:
                self._failing = False
                logger.info("traces: %s takes spans again", self._name)
        self._unsent = None

    async def _send(self, body: bytes, pauses: tuple[float, ...]) -> bytes:
        for pause in pauses:
            try:
                return await self._sender.send(body)
            except ExportError as error:
                if not error.retry:
                    raise
                self._on_failure(error)
            await asyncio.sleep(pause)
        return await self._sender.send(body)

    async def _encoded(self, taken: Sequence[Recorded]) -> bytes:
        spans, epoch = [], time.time() - time.perf_counter()
        for at in range(0, len(taken), SLICE):
            spans += [self._encoder.spans(recorded, epoch) for recorded in taken[at : at + SLICE]]
            await asyncio.sleep(0)
        return self._encoder.export(spans)

    def _on_failure(self, error: ExportError) -> None:
        """Log the first of several failures in a row."""
        if not self._failing:
            self._failing = True
            logger.warning("traces: %s does not take spans: %s", self._name, error)


def _refused(answer: bytes) -> int:
    """Return the number of spans that the collector did not accept, by its response."""
    try:
        return ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans
    except DecodeError:  # it accepted them, and answers something else
        return 0


@asynccontextmanager
async def open_exporter(
    tracer: PickTracer,
    stats: TraceStats,
    collector: Destination,
    *,
    resource: Mapping[str, str],
    version: str,
) -> AsyncIterator[SpanExporter]:
    """Yield an exporter, whose ``run`` is to be started; the last spans are sent on exit.

    Raises SettingsError if the certificate file cannot be read.
    """
    async with _open_sender(collector) as sender:
        exporter = SpanExporter(
            tracer, stats, sender, resource=resource, version=version, name=collector.hostport
        )
        try:
            yield exporter
        finally:
            await exporter.flush(FLUSH_SECONDS)


@asynccontextmanager
async def _open_sender(collector: Destination) -> AsyncIterator[Sender]:
    if collector.protocol == GRPC:
        async with _channel(collector) as channel:
            yield GrpcSender(collector, channel)
        return
    context: ssl.SSLContext | bool = True
    if collector.secure and collector.certificate:
        context = _reading(collector.certificate, lambda file: ssl.create_default_context(cafile=file))
    timeout = aiohttp.ClientTimeout(total=SEND_SECONDS)
    headers = {"content-type": "application/x-protobuf", **collector.headers}
    connector = aiohttp.TCPConnector(ssl=context, limit=1)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as session:
        yield HttpSender(collector, session)


def _channel(collector: Destination) -> "grpc.aio.Channel":
    import grpc  # slow, and 20 MB

    if not collector.secure:
        return grpc.aio.insecure_channel(collector.hostport)
    roots = (
        _reading(collector.certificate, lambda file: Path(file).read_bytes())
        if collector.certificate
        else None
    )
    return grpc.aio.secure_channel(collector.hostport, grpc.ssl_channel_credentials(roots))


def _reading(file: str, read: Callable[[str], T]) -> T:
    try:
        return read(file)
    except OSError as error:  # ssl's errors are among them
        raise SettingsError(f"OTEL_EXPORTER_OTLP_CERTIFICATE: {file}: {error}") from error
