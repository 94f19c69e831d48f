"""From the start of a process to its end: runs until a signal, then drains. The same for every role."""

import gc
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kvist_epp.app.shutdown import Ending
from kvist_epp.http2.call import Server
from kvist_epp.settings.settings import Settings

logger = logging.getLogger(__name__)


class Running(Protocol):
    """A process whose ports are open."""

    @property
    def grpc(self) -> Server:
        """The ext_proc port."""

    @property
    def grpc_health(self) -> Server:
        """The health port."""

    @property
    def metrics_port(self) -> int:
        """Pages."""

    async def drain(self, delay_seconds: float, grace_seconds: float) -> None:
        """Not ready from now on; new calls are still taken for the delay, then running ones get the grace."""


Start = Callable[[Settings, Ending], AbstractAsyncContextManager[Running]]
"""Opens the ports; closes everything on the way out."""


def run(settings: Settings, start: Start) -> None:
    """Run until SIGTERM or SIGINT. Raises ``KvistError`` or ``OSError`` when it cannot start, or fails."""
    import uvloop

    # As process 1 of a container a signal without a handler would do nothing, while models are loaded.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    uvloop.run(_until_told(settings, start))


async def _until_told(settings: Settings, start: Start) -> None:
    ending = Ending()
    async with start(settings, ending) as process:
        ending.heed_signals()
        logger.info(
            "listening: ext_proc %d, health %d, metrics %d, transport %s",
            process.grpc.port,
            process.grpc_health.port,
            process.metrics_port,
            settings.transport,
        )
        await ending.begun()
        await ending.unless_cut(_drain(settings, process, ending))
    ending.check()


async def _drain(settings: Settings, process: Running, ending: Ending) -> None:
    """Whoever ends it at a terminal does not wait for gateways to notice."""
    delay = 0.0 if ending.watched else min(settings.drain_delay, settings.drain_timeout / 2)
    logger.info("draining: %g s for gateways to notice, %g s in all", delay, settings.drain_timeout)
    await process.drain(delay, settings.drain_timeout - delay)


def settle_memory() -> None:
    """What was loaded lives as long as the process: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
