"""The role ``model-header`` as a process: ports, health, pages, drain. Ready once its ports are open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import kvist_epp
from kvist_epp.admin import admin_server
from kvist_epp.admin.admin_server import RolePages
from kvist_epp.app.process import (
    Process,
    Shutdown,
    freeze_startup_objects,
    open_certificates,
    open_grpc_ports,
    run_process,
)
from kvist_epp.extproc.protocol_errors import ProtocolErrors
from kvist_epp.extproc.service import model_header_methods
from kvist_epp.http2.grpc_health import Health
from kvist_epp.http2.tls import Certificates
from kvist_epp.model_header.labeller import LABELS, HeaderMetrics, Labeller
from kvist_epp.settings.settings import Settings
from kvist_epp.settings.validation import parse_base_models
from kvist_epp.telemetry import request_log as log


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter(Process):
    """The filter while its ports are open."""

    health: Health

    async def drain(self, delay_seconds: float, grace_seconds: float) -> None:
        """Become not ready, accept new calls for the delay, then give running calls the grace period.

        The health port answers until the end.
        """
        self.health.set(False)
        await asyncio.sleep(delay_seconds)
        await self.grpc.drain(grace_seconds)
        await self.grpc_health.drain(0)


def main(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Raises ``KvistError`` or ``OSError`` if a part cannot start, or fails."""
    run_process(settings, open_filter)


@asynccontextmanager
async def open_filter(settings: Settings, shutdown: Shutdown) -> AsyncIterator[Filter]:
    """Yield the filter with open ports; close everything on exit. A part that fails begins the shutdown."""
    async with AsyncExitStack() as stack:
        logs = log.configure(
            level=settings.log_level, form=settings.log_format, requests=settings.log_requests
        )
        stack.callback(logs.close)
        certificates = open_certificates(settings)
        metrics = HeaderMetrics(
            version=kvist_epp.__version__,
            certificate=dict if certificates is None else certificates.counters,
            log_dropped=lambda: logs.writer.dropped,
        )
        labeller = Labeller(parse_base_models(settings.base_models), metrics, logs.requests)
        health = Health()
        on_error = ProtocolErrors(metrics.protocol_errors)
        methods = model_header_methods(
            labeller.decide, LABELS, health, on_error=on_error, from_envoy=settings.from_envoy
        )
        grpc, grpc_health = await open_grpc_ports(
            settings, methods, health, certificates, stack=stack, port_stats=metrics.ports
        )
        pages = await _pages(settings, metrics, health, certificates, stack)
        if certificates is not None:
            shutdown.start_task(stack, certificates.run(), "certificates")
        freeze_startup_objects()
        health.set(True)
        yield Filter(health=health, grpc=grpc, grpc_health=grpc_health, metrics_port=pages.port)


async def _pages(
    settings: Settings,
    metrics: HeaderMetrics,
    health: Health,
    tls: Certificates | None,
    stack: AsyncExitStack,
) -> admin_server.AdminServer:
    pages = RolePages(
        metrics=metrics.snapshot,
        not_ready=lambda: "" if health.ready else "starting or draining",
        warning=lambda: "" if tls is None else tls.problem,
        ca=lambda: b"" if tls is None else tls.material.ca,
    )
    server = await admin_server.serve(pages, settings.host, settings.metrics_port)
    stack.push_async_callback(server.close)
    return server
