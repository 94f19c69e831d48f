"""The picker as a process: make the parts, connect them, open the ports, drain."""

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import kvist_epp
from kvist_epp.admin import admin_server, debug_pages
from kvist_epp.admin.admin_server import PickerPages
from kvist_epp.admin.debug_pages import QueueGauges, pick_document, queue_document
from kvist_epp.admin.decision_pages import DecisionPages
from kvist_epp.admin.fleet_page import FleetPage
from kvist_epp.admin.live.live_page import LivePage, make_live_page
from kvist_epp.admin.live.request_origin import RequestOrigin
from kvist_epp.admin.replica_pages import ReplicaPages
from kvist_epp.app.decision_batch import DecisionBatch
from kvist_epp.app.model_loader import ModelActivator, ModelLoader
from kvist_epp.app.process import (
    Process,
    Shutdown,
    freeze_startup_objects,
    open_certificates,
    open_grpc_ports,
    run_process,
)
from kvist_epp.app.readiness import Readiness
from kvist_epp.director.assembly import make_director
from kvist_epp.director.completion import CompletionHandler
from kvist_epp.director.decision_log import DecisionLog
from kvist_epp.director.director import Director
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.director.explanation import explain_request
from kvist_epp.director.request_context import new_replica_id
from kvist_epp.disaggregation.leg_driver import open_legs
from kvist_epp.disaggregation.legs import ON
from kvist_epp.endpoints.discovery import Discovery, open_discovery
from kvist_epp.extproc.protocol_errors import ProtocolErrors
from kvist_epp.extproc.service import ext_proc_methods
from kvist_epp.flowcontrol.driver import FlowDriver
from kvist_epp.http2.call import Method
from kvist_epp.http2.grpc_health import Health
from kvist_epp.http2.tls import Certificates
from kvist_epp.prewarm.prewarmer import open_prewarmer
from kvist_epp.scheduling.leg_costs import RULES, DisaggregationPolicy
from kvist_epp.settings.settings import Settings
from kvist_epp.settings.validation import parse_host_names
from kvist_epp.telemetry import request_log as log
from kvist_epp.telemetry.counters import TraceStats
from kvist_epp.telemetry.metrics import PickerMetrics
from kvist_epp.tracing.destination import Destination, destination, resource
from kvist_epp.tracing.trace_context import PickTracer

if TYPE_CHECKING:
    from kvist_epp.replicas.replication import Replication

TICK_SECONDS: Final = 0.25
"""Interval at which requests expire, the index's accuracy is judged and counters are updated."""
ANSWER_SECONDS: Final = 1.0
"""Time reserved at the end of a drain to answer queued requests; 10,000 of them take half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class App(Process):
    """A picker whose ports are open."""

    director: Director
    driver: FlowDriver
    registry: EndpointRegistry
    readiness: Readiness
    replication: "Replication | None" = None

    async def drain(self, delay_seconds: float, grace_seconds: float) -> None:
        """Become not ready, accept new calls for the delay, then give running calls the grace period.

        The health port answers until the end. Requests that are still queued shortly before the end are
        rejected in time for the answer to reach the gateway.
        """
        self.readiness.stop("draining")
        seconds = delay_seconds + grace_seconds
        self.driver.shut_in(seconds - min(ANSWER_SECONDS, seconds / 4))
        await asyncio.sleep(delay_seconds)
        await self.grpc.drain(grace_seconds)
        if self.replication is not None:
            await self.replication.leave()
        await self.grpc_health.drain(0)


def main(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Raises ``KvistError`` or ``OSError`` if a part cannot start, or fails."""
    run_process(settings, open_app)


@asynccontextmanager
async def open_app(
    settings: Settings, shutdown: Shutdown, rules: DisaggregationPolicy = RULES
) -> AsyncIterator[App]:
    """Yield a picker with open ports; close everything on exit. A part that fails begins the shutdown.

    ``rules``: which requests are disaggregated, if any are.
    """
    async with AsyncExitStack() as stack:
        logs = log.configure(
            level=settings.log_level,
            form=settings.log_format,
            requests=settings.log_requests,
            debug_text=settings.debug_text,
        )
        stack.callback(logs.close)
        certificates = open_certificates(settings)
        loader = ModelLoader(settings)
        model = loader.load_initial()
        driver = FlowDriver(time.monotonic)
        stack.callback(driver.close)
        collector, traces = destination(settings, os.environ), TraceStats()
        tracer = None if collector is None else PickTracer(settings.trace_sample_ratio, traces)
        director = _director(settings, logs, driver, tracer, rules)
        director.metrics.gauges.traces = lambda: traces
        registry = EndpointRegistry(settings, director, time.monotonic)
        await stack.enter_async_context(registry.scraper)
        activator = ModelActivator(settings, registry, stack)
        if model is not None:
            activator.activate(model)
        _gauges(director, registry, logs, loader)
        discovery = _discovery(settings, director, registry)
        health = Health()
        replication = _replication(settings, registry, health)
        forward = None if replication is None else replication.forward_end
        completion = CompletionHandler(director, time.monotonic, forward)
        carry_out = None
        if settings.disaggregation == ON:
            legs, connector = await stack.enter_async_context(open_legs(settings, registry))
            carry_out = legs.carry_out
        batch = DecisionBatch(director, driver, time.monotonic, carry_out)
        methods = _methods(settings, batch, completion, health)
        grpc, grpc_health = await open_grpc_ports(
            settings, methods, health, certificates, stack=stack, port_stats=director.metrics.ports
        )
        conditions = () if replication is None else (replication.waiting,)
        readiness = Readiness(registry, health, settings.warmup_timeout, conditions=conditions)
        problems: Sequence[Callable[[], str]] = (
            lambda: loader.problem,
            lambda: "" if certificates is None else certificates.problem,
            registry.missing_reports,
        )
        others = None if replication is None else ReplicaPages(replication.page_addresses)
        if others is not None:
            stack.push_async_callback(others.close)
        origin = RequestOrigin(parse_host_names(settings.live_page_hosts), (os.uname().nodename,))
        live = make_live_page(
            settings,
            registry,
            others,
            functools.partial(_explain, director),
            origin=origin,
            not_ready=lambda: readiness.not_ready_reason(discovery.problem),
            warnings=lambda: [found for problem in problems if (found := problem())],
            version=kvist_epp.__version__,
        )
        pages = await _pages(
            settings,
            registry,
            discovery,
            readiness,
            certificates,
            replication,
            others,
            problems,
            live,
            origin,
            stack,
        )
        if replication is not None:
            await replication.start(shutdown, stack, pages.port)
        if certificates is not None:
            director.metrics.gauges.certificate = certificates.counters
            shutdown.start_task(stack, certificates.run(), "certificates")
        shutdown.start_task(stack, loader.run(activator.activate_while_serving), "tokenizer")
        shutdown.start_task(stack, discovery.run(), "discovery")
        if settings.prewarm_tokens:
            prewarmer = await stack.enter_async_context(open_prewarmer(settings, registry))
            shutdown.start_task(stack, prewarmer.run(), "prewarming")
        if carry_out is not None:
            shutdown.start_task(stack, connector.run(), "engine pairs")
        if tracer is not None and collector is not None:
            await _export_traces(tracer, traces, collector, director.replica, shutdown, stack)
        shutdown.start_task(stack, _tick(registry, readiness), "tick")
        if live is not None:
            shutdown.start_task(stack, live.run(), "live page")
        freeze_startup_objects()
        yield App(
            director=director,
            driver=driver,
            registry=registry,
            readiness=readiness,
            grpc=grpc,
            grpc_health=grpc_health,
            metrics_port=pages.port,
            replication=replication,
        )


def _director(
    settings: Settings,
    logs: log.Logs,
    driver: FlowDriver,
    tracer: PickTracer | None,
    rules: DisaggregationPolicy,
) -> Director:
    replica, limit = new_replica_id(), settings.decision_log
    director = make_director(
        settings,
        metrics=PickerMetrics(version=kvist_epp.__version__),
        log=logs.requests,
        now=time.monotonic(),
        wake=driver.wake,
        tracer=tracer,
        replica=replica,
        decisions=DecisionLog(limit, replica, clock=time.monotonic, wall=time.time) if limit else None,
        rules=rules,
    )
    assert director.flow is not None, "it has limits"
    driver.start(director.flow)
    QueueGauges(director.flow, time.monotonic).attach(director.metrics.gauges)
    return director


def _gauges(director: Director, registry: EndpointRegistry, logs: log.Logs, loader: ModelLoader) -> None:
    gauges = director.metrics.gauges
    gauges.tokenizer = lambda: (bool(loader.problem), loader.failures)
    gauges.index_blocks = registry.blocks
    gauges.precise = registry.trusted
    gauges.evicted_requested_tokens = registry.evicted_requested_tokens
    gauges.ends_reported = lambda: director.tracker.end_reports.known
    gauges.backlog_tokens = registry.backlog
    gauges.endpoints = registry.scraper.counts
    gauges.model_faithful = lambda: director.model is not None and director.model.faithful
    gauges.log_dropped = lambda: logs.writer.dropped


def _discovery(settings: Settings, director: Director, registry: EndpointRegistry) -> Discovery:
    """Return the source of the endpoints; it also delivers the priorities of objectives."""

    def refused(_problem: str) -> None:
        director.metrics.bad_endpoints_files += 1

    def objectives(found: Mapping[str, int]) -> None:
        director.priorities.objectives = found.get

    follow = registry.follow
    discovery = open_discovery(settings, follow, os.environ, on_bad_file=refused, on_priorities=objectives)
    director.metrics.gauges.watches = discovery.watches
    return discovery


def _replication(settings: Settings, registry: EndpointRegistry, health: Health) -> "Replication | None":
    if not settings.replicas:
        return None
    from kvist_epp.replicas.replication import Replication  # imports grpc: slow, and 20 MB

    return Replication(settings, registry, lambda: health.ready)


def _methods(
    settings: Settings, batch: DecisionBatch, completion: CompletionHandler, health: Health
) -> dict[str, Method]:
    return ext_proc_methods(
        batch.decide,
        completion.on_access_log,
        health,
        from_envoy=settings.from_envoy,
        observe_responses=settings.observe_responses,
        on_response=completion.on_response,
        on_first_token=completion.on_first_token,
        on_error=ProtocolErrors(batch.director.metrics.protocol_errors),
    )


def _explain(director: Director, path: str, headers: Mapping[str, str], body: bytes) -> Mapping[str, object]:
    return pick_document(explain_request(director, path, headers, body, time.monotonic()))


async def _pages(
    settings: Settings,
    registry: EndpointRegistry,
    discovery: Discovery,
    readiness: Readiness,
    tls: Certificates | None,
    replication: "Replication | None",
    others: ReplicaPages | None,
    problems: Iterable[Callable[[], str]],
    live: LivePage | None,
    origin: RequestOrigin,
    stack: AsyncExitStack,
) -> admin_server.AdminServer:
    director, fleet_page = registry.director, FleetPage(registry)
    stack.push_async_callback(fleet_page.close)
    pages = PickerPages(
        metrics=director.metrics.snapshot,
        explain=functools.partial(_explain, director),
        debug_fleet=lambda: debug_pages.fleet_document(registry, discovery),
        index=lambda: debug_pages.index_document(registry),
        fleet=fleet_page.document,
        queue=lambda: queue_document(director.flow, time.monotonic()),
        held=lambda: debug_pages.in_flight_document(
            director, 0 if replication is None else len(replication.remote_load)
        ),
        replicas=lambda: {} if replication is None else replication.document(),
        decisions=(None if director.decisions is None else DecisionPages(director.decisions, others)),
        not_ready=lambda: readiness.not_ready_reason(discovery.problem),
        warning=lambda: "; ".join(filter(None, (problem() for problem in problems))),
        ca=lambda: tls.material.ca if tls is not None else b"",
        live=() if live is None else live.routes(),
        origin=origin,
    )
    server = await admin_server.serve(
        pages, settings.host, settings.metrics_port, body_limit=settings.max_message_bytes
    )
    stack.push_async_callback(server.close)
    if live is not None:
        stack.push_async_callback(live.close)
    return server


async def _export_traces(
    tracer: PickTracer,
    traces: TraceStats,
    collector: Destination,
    replica: str,
    shutdown: Shutdown,
    stack: AsyncExitStack,
) -> None:
    from kvist_epp.tracing.exporter import open_exporter  # imports OpenTelemetry's messages

    described = resource(os.environ, kvist_epp.__version__, replica)
    opened = open_exporter(tracer, traces, collector, resource=described, version=kvist_epp.__version__)
    exporter = await stack.enter_async_context(opened)
    shutdown.start_task(stack, exporter.run(), "traces")


async def _tick(registry: EndpointRegistry, readiness: Readiness) -> None:
    while True:
        registry.on_tick()
        readiness.update()
        await asyncio.sleep(TICK_SECONDS)
