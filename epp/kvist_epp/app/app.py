"""The picker as a process: makes the parts, opens the ports, drains."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import kvist_epp
from kvist_epp.admin import admin_server, debug_pages
from kvist_epp.admin.admin_server import PickerPages
from kvist_epp.admin.fleet_page import FleetPage
from kvist_epp.admin.routing_pages import QueueGauges, queue_document
from kvist_epp.app import lifetime
from kvist_epp.app import listeners as ports
from kvist_epp.app.model_activation import Understanding
from kvist_epp.app.model_loader import Tokenizer
from kvist_epp.app.readiness import Gate
from kvist_epp.app.shutdown import Ending
from kvist_epp.director.completion import Aftermath
from kvist_epp.director.director import Picker
from kvist_epp.director.endpoint_registry import Membership
from kvist_epp.endpoints.discovery import Discovery, open_discovery
from kvist_epp.endpoints.scraper import Scraper
from kvist_epp.extproc.service import ext_proc_methods
from kvist_epp.flowcontrol.flow_controller import Bounds, Queue
from kvist_epp.flowcontrol.priorities import Priorities, named_priorities
from kvist_epp.http2.call import Server
from kvist_epp.http2.grpc_health import Health, health_methods
from kvist_epp.http2.tls import Certificates
from kvist_epp.index.byte_index import Index
from kvist_epp.index.index_accuracy import Trust
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import History
from kvist_epp.load.in_flight import Flights
from kvist_epp.load.ledger import Ledger
from kvist_epp.prewarm.prewarmer import open_prewarmer
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry import request_log as log
from kvist_epp.telemetry.picker_metrics import PickerMetrics

if TYPE_CHECKING:
    from kvist_epp.replicas.replication import Replication

TICK_SECONDS: Final = 0.25
"""How often requests expire, trust is weighed and counters are brought up to date."""
ANSWER_SECONDS: Final = 1.0
"""Time kept at the end of a drain to answer those who still wait: 10,000 take half of it."""


@dataclass(frozen=True, slots=True)
class Running:
    """A picker whose ports are open."""

    picker: Picker
    membership: Membership
    gate: Gate
    grpc: Server
    grpc_health: Server
    metrics_port: int
    replication: "Replication | None" = None

    async def drain(self, delay_seconds: float, grace_seconds: float) -> None:
        """Not ready from now on; new calls are still taken for the delay, then running ones get the grace.

        The health port says so to the end.
        """
        self.gate.shut("draining")
        self._shut_queue(delay_seconds + grace_seconds)
        await asyncio.sleep(delay_seconds)
        await self.grpc.drain(grace_seconds)
        if self.replication is not None:
            await self.replication.leave()
        await self.grpc_health.drain(0)

    def _shut_queue(self, seconds: float) -> None:
        """Who still waits at the end is told so while there is time to answer."""
        if self.picker.queue is not None:
            self.picker.queue.shut_in(seconds - min(ANSWER_SECONDS, seconds / 4))


def main(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Raises ``KvistError`` or ``OSError`` when it cannot start, or fails."""
    lifetime.run(settings, running)


@asynccontextmanager
async def running(settings: Settings, ending: Ending) -> AsyncIterator[Running]:
    """A picker with open ports; everything is closed on the way out. A part that fails begins the end."""
    async with AsyncExitStack() as stack:
        logs = log.configure(
            level=settings.log_level,
            form=settings.log_format,
            requests=settings.log_requests,
            debug_text=settings.debug_text,
        )
        stack.callback(logs.close)
        certificates = ports.certificates(settings)
        tokenizer = Tokenizer(settings)
        model = tokenizer.first()
        picker = _picker(settings, logs)
        stack.callback(_queue(settings, picker).close)
        membership = await _membership(settings, picker, stack)
        understanding = Understanding(settings, membership, stack)
        if model is not None:
            understanding.begin(model)
        _gauges(picker, membership, logs, tokenizer)
        discovery = _discovery(settings, picker, membership)
        health = Health()
        grpc, grpc_health = await _servers(settings, picker, health, certificates, stack)
        replication = await _replication(settings, membership, ending, stack)
        conditions = () if replication is None else (replication.waiting,)
        gate = Gate(membership, health, settings.warm_seconds, conditions=conditions)
        if replication is not None:
            replication.ready = lambda: gate.opened and not gate.why_shut
        problems = (lambda: tokenizer.problem, lambda: "" if certificates is None else certificates.problem)
        pages = await _pages(
            settings, membership, discovery, gate, certificates, replication, problems, stack
        )
        if certificates is not None:
            picker.metrics.gauges.certificate = certificates.counters
            ending.keep(stack, certificates.run(), "certificates")
        ending.keep(stack, tokenizer.run(understanding.late), "tokenizer")
        ending.keep(stack, discovery.run(), "discovery")
        if settings.hand_over_tokens:
            prewarmer = await stack.enter_async_context(open_prewarmer(settings, membership))
            ending.keep(stack, prewarmer.run(), "prewarming")
        ending.keep(stack, _tick(membership, gate), "tick")
        lifetime.settle_memory()
        yield Running(picker, membership, gate, grpc, grpc_health, pages.port, replication)


def _picker(settings: Settings, logs: log.Logs) -> Picker:
    index, history = Index(), History()
    return Picker(
        model=None,
        index=index,
        history=history,
        lookup=Lookup(index, history),
        ledger=Ledger(
            default_rate=settings.prefill_tokens_per_second,
            expire_seconds=settings.request_seconds,
            tpot_seconds=settings.tpot_target,
        ),
        flights=Flights(),
        metrics=PickerMetrics(version=kvist_epp.__version__),
        log=logs.requests,
        max_endpoints=settings.max_endpoints,
        priorities=Priorities(named_priorities(settings.priorities)),
        engine_priorities=settings.scheduling_policy == "priority",
    )


def _queue(settings: Settings, picker: Picker) -> Queue:
    """Where requests wait that find no room."""
    bounds = Bounds(
        max_owed=settings.max_owed_seconds,
        requests=settings.queue_requests,
        size=settings.queue_bytes,
        room_seconds=settings.queue_seconds,
        empty_seconds=settings.empty_pool_seconds,
    )
    waits = picker.metrics.queue_waits
    picker.queue = queue = Queue(bounds, lambda: picker.candidates, picker.clock, waits)
    picker.ledger.eased = queue.wake
    QueueGauges(queue).attach(picker.metrics.gauges)
    return queue


async def _membership(settings: Settings, picker: Picker, stack: AsyncExitStack) -> Membership:
    membership = Membership(settings, picker, None, None, Trust())
    membership.scraper = Scraper(
        on_scrape=membership.scraped,
        on_change=membership.changed,
        interval=settings.scrape_interval,
        timeout=settings.scrape_timeout,
    )
    await stack.enter_async_context(membership.scraper)
    picker.truth = membership.truth
    picker.departed = membership.departed
    return membership


def _gauges(picker: Picker, membership: Membership, logs: log.Logs, tokenizer: Tokenizer) -> None:
    gauges = picker.metrics.gauges
    gauges.tokenizer = lambda: (bool(tokenizer.problem), tokenizer.failures)
    gauges.index_blocks = membership.blocks
    gauges.precise = membership.trusted
    gauges.backlog_tokens = membership.owed
    gauges.endpoints = membership.scraper.counts
    gauges.model_faithful = lambda: picker.model is not None and picker.model.faithful
    gauges.log_dropped = lambda: logs.writer.dropped


def _discovery(settings: Settings, picker: Picker, membership: Membership) -> Discovery:
    """Where the fleet comes from, and what names of objectives stand for."""

    def refused(_problem: str) -> None:
        picker.metrics.bad_endpoints_files += 1

    def objectives(found: Mapping[str, int]) -> None:
        picker.priorities.objectives = found.get

    follow = membership.follow
    discovery = open_discovery(settings, follow, os.environ, on_bad_file=refused, on_priorities=objectives)
    picker.metrics.gauges.watches = discovery.watches
    return discovery


async def _replication(
    settings: Settings, membership: Membership, ending: Ending, stack: AsyncExitStack
) -> "Replication | None":
    if not settings.peers:
        return None
    from kvist_epp.replicas.replication import open_replication  # imports grpc: slow, and 20 MB

    return await stack.enter_async_context(open_replication(settings, membership, ending))


async def _servers(
    settings: Settings, picker: Picker, health: Health, tls: Certificates | None, stack: AsyncExitStack
) -> tuple[Server, Server]:
    def on_error(kind: str, count: int) -> None:
        picker.metrics.protocol_errors[kind] += count

    after = Aftermath(picker)
    on_response = after.responded if settings.observe_responses else None
    served = ext_proc_methods(picker.decide, after.ended, health, on_response=on_response, on_error=on_error)
    port_stats = picker.metrics.ports
    grpc = await ports.listen(settings, served, settings.grpc_port, "--grpc-port", tls, port_stats=port_stats)
    stack.push_async_callback(grpc.close)
    port = settings.grpc_health_port
    # Plaintext always: probes of the kubelet and of cloud load balancers speak no TLS.
    grpc_health = await ports.listen(
        settings, health_methods(health), port, "--grpc-health-port", port_stats=port_stats
    )
    stack.push_async_callback(grpc_health.close)
    return grpc, grpc_health


async def _pages(
    settings: Settings,
    membership: Membership,
    discovery: Discovery,
    gate: Gate,
    tls: Certificates | None,
    replication: "Replication | None",
    problems: Iterable[Callable[[], str]],
    stack: AsyncExitStack,
) -> admin_server.AdminServer:
    picker, fleet_page = membership.picker, FleetPage(membership)
    stack.push_async_callback(fleet_page.close)
    pages = PickerPages(
        metrics=picker.metrics,
        explain=picker.explain,
        debug_fleet=lambda: debug_pages.fleet_document(membership, discovery),
        index=lambda: debug_pages.index_document(membership),
        fleet=fleet_page.document,
        queue=lambda: queue_document(picker.queue),
        held=lambda: debug_pages.in_flight_document(
            picker, 0 if replication is None else len(replication.remote_load)
        ),
        replicas=lambda: {} if replication is None else replication.document(),
        not_ready=lambda: gate.not_ready(discovery.problem),
        warning=lambda: "; ".join(filter(None, (problem() for problem in problems))),
        ca=lambda: tls.ca_pem() if tls is not None else b"",
    )
    server = await admin_server.serve(
        pages, settings.host, settings.metrics_port, body_limit=settings.max_message_bytes
    )
    stack.push_async_callback(server.close)
    return server


async def _tick(membership: Membership, gate: Gate) -> None:
    while True:
        membership.tick()
        gate.look()
        await asyncio.sleep(TICK_SECONDS)
