"""Runs a process of either role: opens the gRPC ports, waits for a signal or a failed task, drains."""

import asyncio
import ctypes
import gc
import logging
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from kvist_epp.errors import CertificateError, SettingsError, UncleanShutdownError
from kvist_epp.http2.call import Method, Server
from kvist_epp.http2.grpc_health import Health, health_methods
from kvist_epp.http2.limits import Limits, PortStats
from kvist_epp.http2.tls import Certificates, own_names
from kvist_epp.names import LASTING_METHODS
from kvist_epp.settings.settings import Settings


def open_certificates(settings: Settings) -> Certificates | None:
    """Return the certificates of the ext_proc port; None for plaintext. Raises SettingsError, which names the
    flag."""
    if not settings.secure_serving:
        return None
    try:
        return Certificates(
            cert_path=settings.cert_path,
            client_ca_path=settings.client_ca_path,
            names=own_names(settings.tls_names, os.environ),
            minimum=settings.tls_min_version,
        )
    except CertificateError as error:
        flags = {
            "--cert-path": settings.cert_path,
            "--client-ca-path": settings.client_ca_path,
            "--tls-names": settings.tls_names,
        }
        given = " or ".join(flag for flag, value in flags.items() if value)
        raise SettingsError(f"{given or '--secure-serving'}: {error}") from error


async def listen(
    settings: Settings,
    served: Mapping[str, Method],
    port: int,
    flag: str,
    tls: Certificates | None = None,
    *,
    name: str,
    stack: AsyncExitStack,
    port_stats: MutableMapping[str, PortStats],
) -> Server:
    """Serve these methods on ``port`` until ``stack`` is closed, in plaintext without ``tls``.

    ``port_stats`` receives the port's statistics under ``name``, which is the metrics' label ``port``; the
    grpc.aio transport has none.

    Raises:
        SettingsError: the port cannot be opened; the text names ``flag``.
    """
    try:
        if settings.transport == "grpc":
            from kvist_epp.http2.grpc_server import serve_grpc

            host = settings.host or "[::]"
            fallback = await serve_grpc(
                served, host, port, settings.max_message_bytes, tls=tls, lasting=LASTING_METHODS
            )
            stack.push_async_callback(fallback.close)
            return fallback
        from kvist_epp.http2.server import serve_http2

        limits, ssl = Limits.of(settings), tls.context if tls is not None else None
        server = await serve_http2(served, settings.host, port, limits, ssl=ssl, lasting=LASTING_METHODS)
    except OSError as error:
        raise SettingsError(f"{flag}: cannot listen on port {port}: {error}") from error
    stack.push_async_callback(server.close)
    port_stats[name] = server.stats
    return server


async def open_grpc_ports(
    settings: Settings,
    served: Mapping[str, Method],
    health: Health,
    tls: Certificates | None,
    *,
    stack: AsyncExitStack,
    port_stats: MutableMapping[str, PortStats],
) -> tuple[Server, Server]:
    """Serve these methods on the ext_proc port and the health service on its own port; return both servers.

    Raises SettingsError, which names the flag.
    """
    grpc = await listen(
        settings,
        served,
        settings.grpc_port,
        "--grpc-port",
        tls,
        name="grpc",
        stack=stack,
        port_stats=port_stats,
    )
    # Always plaintext: probes of the kubelet and of cloud load balancers speak no TLS.
    methods, port = health_methods(health), settings.grpc_health_port
    grpc_health = await listen(
        settings, methods, port, "--grpc-health-port", name="grpc-health", stack=stack, port_stats=port_stats
    )
    return grpc, grpc_health


logger = logging.getLogger(__name__)


class Shutdown:
    """State of the shutdown: whether it was requested, was interrupted, and succeeded."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._interrupted = asyncio.Event()
        self._failure = ""
        self.interactive = False
        """True if SIGINT requested the shutdown: a person at a terminal is waiting."""

    def handle_signals(self) -> None:
        """Let the first SIGTERM or SIGINT request the shutdown, and the next one cut the drain short."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    async def wait(self) -> None:
        """Wait until a shutdown is requested or a part fails."""
        await self._requested.wait()

    async def run_drain(self, drain: Coroutine[None, None, None]) -> None:
        """Run ``drain`` to its end, or cancel it at a second signal. An exception of ``drain`` is raised."""
        work = asyncio.ensure_future(drain)
        interrupted = asyncio.ensure_future(self._interrupted.wait())
        try:
            await asyncio.wait((work, interrupted), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            await _cancel(work)
            await _cancel(interrupted)

    def raise_if_unclean(self) -> None:
        """Raise UncleanShutdownError if a part failed or a second signal cut the drain short."""
        if self._failure:
            raise UncleanShutdownError(self._failure)

    def start_task(self, stack: AsyncExitStack, part: Coroutine[None, None, None], name: str) -> None:
        """Run ``part`` as a task until ``stack`` is closed; if the task ends before, begin the shutdown."""
        task = asyncio.create_task(part, name=name)
        task.add_done_callback(self._on_task_done)
        stack.push_async_callback(_cancel, task)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._requested.is_set():
            self._failure = self._failure or f"a second signal cut the drain short ({number.name})"
            self._interrupted.set()
        self.interactive = number == signal.SIGINT
        self._requested.set()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        logger.critical("the task %r ended unexpectedly", task.get_name(), exc_info=task.exception())
        self._failure = f"the task {task.get_name()!r} ended unexpectedly"
        self._requested.set()


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Process(ABC):
    """A process of either role whose ports are open."""

    grpc: Server
    """Server of the ext_proc port."""
    grpc_health: Server
    metrics_port: int

    @abstractmethod
    async def drain(self, delay_seconds: float, grace_seconds: float) -> None:
        """Become not ready, accept new calls for the delay, then give running calls the grace period."""


Start = Callable[[Settings, Shutdown], AbstractAsyncContextManager[Process]]
"""Opens the ports on entry and closes everything on exit."""


def run_process(settings: Settings, start: Start) -> None:
    """Run until SIGTERM or SIGINT, then drain.

    Raises ``KvistError`` or ``OSError`` if the process cannot start or a part of it fails.
    """
    import uvloop

    # Process 1 of a container ignores signals without a handler, and loading a model takes long.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    keep_freed_memory()
    uvloop.run(_run(settings, start))


async def _run(settings: Settings, start: Start) -> None:
    shutdown = Shutdown()
    async with start(settings, shutdown) as process:
        shutdown.handle_signals()
        logger.info(
            "listening on port %d for ext_proc, %d for gRPC health and %d for metrics (transport: %s)",
            process.grpc.port,
            process.grpc_health.port,
            process.metrics_port,
            settings.transport,
        )
        await shutdown.wait()
        # A person at a terminal does not wait until gateways notice.
        delay = 0.0 if shutdown.interactive else min(settings.drain_delay, settings.drain_timeout / 2)
        logger.info(
            "draining: requests are accepted for another %g s, and the process exits within %g s",
            delay,
            settings.drain_timeout,
        )
        await shutdown.run_drain(process.drain(delay, settings.drain_timeout - delay))
    shutdown.raise_if_unclean()


_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Options of glibc's ``mallopt`` (``malloc.h``)."""
KEPT_BYTES: Final = 16 * 1024 * 1024
"""Freed memory at the end of the heap that stays with the process."""
LARGE_BYTES: Final = 4 * 1024 * 1024
"""Size of a buffer from which on it gets a mapping of its own, which is returned when it is freed."""


def keep_freed_memory() -> None:
    """Keep the memory of buffers that were freed, for the next ones; glibc only, others are left alone.

    glibc returns freed buffers of some hundred KB to the kernel, which has to fill new ones with zeros: a
    request of 450 KB causes 30 to 60 page faults, a tenth of its CPU time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def freeze_startup_objects() -> None:
    """Exclude the objects made at startup from garbage collection; they live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
