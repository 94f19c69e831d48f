"""Log lines, metrics, and the port with ``/metrics``, ``/healthz`` and ``/readyz``."""

import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist_operator.errors import StartError

from .pool_metrics import PoolMetrics

QUIET: Final = ("aiohttp", "httpx", "httpcore", "filelock", "huggingface_hub", "urllib3")
"""Libraries of which only warnings are logged."""
BUCKETS: Final = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)
SHUTDOWN_SECONDS: Final = 1.0
PAGES: Final = {
    "/metrics": "Prometheus metrics",
    "/healthz": "200, or 503 and the reason if reconciling a pool does not end",
    "/readyz": "200, or 503 and the reason while the operator has no data from the cluster",
}
"""Pages of the metrics port."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object with the keys of the picker's log."""

    def format(self, record: logging.LogRecord) -> str:
        """Return ``ts``, ``level``, ``event``, ``logger``, and ``error`` with the traceback of an
        exception."""
        document = {
            "ts": datetime.now(UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
        }
        if record.exc_info:
            document["error"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False, default=str)


def configure_logging(level: str, log_format: str) -> None:
    """Send all records to stderr. ``log_format``: ``json``, ``text``, or ``auto``, which is text on a
    terminal."""
    as_json = log_format == "json" or (log_format == "auto" and not os.isatty(sys.stderr.fileno()))
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level != "debug":
        # kopf_watch reports in one line why kopf ended
        logging.getLogger("kopf").setLevel(logging.CRITICAL)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING if level != "debug" else logging.INFO)


class Metrics:
    """The operator's metrics, in a registry of their own: libraries add nothing to it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "kvist_operator_reconciles",
            "Number of reconciliations of pools, by result: ok, or the reason of the error.",
            ["result"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "kvist_operator_reconcile_seconds",
            "Seconds that the reconciliation of a pool took.",
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.leader = Gauge(
            "kvist_operator_leader",
            "1 if this replica of the operator works, 0 while it waits for the Lease.",
            registry=self.registry,
        )
        self.queue = Gauge(
            "kvist_operator_queue_pools",
            "Number of pools that are queued for reconciliation, at once or after a delay.",
            registry=self.registry,
        )
        self.pools = Gauge(
            "kvist_operator_pools",
            "Number of InferencePools in the managed namespaces.",
            registry=self.registry,
        )
        self.objects = Gauge(
            "kvist_operator_objects",
            "Number of objects in the operator's cache, including pools and pods.",
            registry=self.registry,
        )
        self.restarts = Counter(
            "kvist_operator_watch_restarts",
            "Number of times that the watch of the cluster ended unexpectedly and was restarted.",
            registry=self.registry,
        )
        self.by_pool = PoolMetrics()
        self.registry.register(self.by_pool)

    def count_requests(self, answers: Callable[[], Mapping[str, int]]) -> None:
        """Export the requests to the API server, which ``answers`` returns by method and status."""
        self.registry.register(_Requests(answers))

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Requests(Collector):
    """Reads the connection's own counters at each scrape."""

    def __init__(self, answers: Callable[[], Mapping[str, int]]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        """Yield one series for each method and status."""
        found = CounterMetricFamily(
            "kvist_operator_api_requests",
            "Number of requests to the API server, without watches, by method and status.",
            labels=["method", "status"],
        )
        for key, number in sorted(self._answers().items()):
            method, _, status = key.partition(" ")
            found.add_metric([method, status], number)
        yield found


@asynccontextmanager
async def monitoring_port(
    host: str, port: int, metrics: Callable[[], bytes], alive: Callable[[], str], ready: Callable[[], str]
) -> AsyncIterator[int]:
    """Serve the pages and yield the port number. ``alive`` and ``ready`` return a problem, empty when there
    is none.

    Raises StartError when the port cannot be opened.
    """

    async def metrics_page(_request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=metrics(), headers=headers)

    async def check_page(request: web.Request) -> web.Response:
        problem = alive() if request.path == "/healthz" else ready()
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    app = web.Application()
    handlers = {"/metrics": metrics_page}
    app.add_routes([web.get(path, handlers.get(path, check_page)) for path in PAGES])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, host or None, port).start()
    except OSError as error:
        await runner.cleanup()
        problem = f"cannot listen on {host or '*'}:{port}: {error.strerror}"
        raise StartError(f"--metrics-port: {problem}") from error
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
