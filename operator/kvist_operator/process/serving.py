"""The operator as a process: checks what it needs, opens its port, runs until a signal."""

import asyncio
import functools
import logging
import signal
from collections.abc import Iterable, Mapping

import kvist_epp
from kvist_kube.connection import LoadConfiguration, find_cluster
from kvist_kube.errors import ClusterNotFound
from kvist_operator.cluster import handlers, starting
from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.kinds import Kind
from kvist_operator.errors import StartError

from . import logs, pages
from .running import Operator
from .settings import Settings

logger = logging.getLogger(__name__)


async def serve(settings: Settings, environment: Mapping[str, str]) -> None:
    """Until SIGTERM or SIGINT. Raises StartError, or ClusterError where the cluster does not answer."""
    logs.configure(settings.log_level, settings.log_format)
    load = _load(environment)
    server = ApiServer(load)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await _until(stop, settings, server, load)
    finally:
        await server.close()


async def _until(stop: asyncio.Event, settings: Settings, server: ApiServer, load: LoadConfiguration) -> None:
    """Run until it is told to stop, or cannot go on."""
    work = asyncio.ensure_future(_run(settings, server, load))
    told = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, told}, return_when=asyncio.FIRST_COMPLETED)
    logger.info("ending")
    told.cancel()
    work.cancel()
    for outcome in await asyncio.gather(work, told, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


async def _run(settings: Settings, server: ApiServer, load: LoadConfiguration) -> None:
    follow = functools.partial(_follow, load, settings)
    operator = Operator(settings, server, follow)
    operator.metrics.count_requests(lambda: server.connection.requests)
    port = settings.metrics_port
    host = settings.metrics_host
    async with pages.serving(host, port, operator.told, operator.alive, operator.ready) as bound:
        logger.info("kvist-operator %s, metrics port %d", kvist_epp.__version__, bound)
        await starting.check(server, server, settings.watched)
        await operator.run()


async def _follow(
    load: LoadConfiguration, settings: Settings, kinds: Iterable[Kind], heard: handlers.Heard
) -> None:
    await handlers.follow(load, kinds, settings.watched, heard)


def _load(environment: Mapping[str, str]) -> LoadConfiguration:
    try:
        return find_cluster(environment, otherwise="set KUBECONFIG, or run in a pod")
    except ClusterNotFound as error:
        raise StartError(str(error)) from error
