"""``kvist-operator trial``: whether the operator is ready and a pool can be made. ``helm test`` runs it.

Nothing is made: the API server is asked for a dry run, which goes through its schema, its rules and all of
its admission.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp

from kvist_kube.connection import Connection, Query, find_cluster, own_namespace
from kvist_kube.errors import ApiError, ClusterNotFound
from kvist_operator.cluster.failures import failure
from kvist_operator.cluster.kinds import POOL
from kvist_operator.errors import StartError

PATIENCE_SECONDS: Final = 60.0
POLL_SECONDS: Final = 1.0
DRY_RUN: Final[Query] = [("dryRun", "All"), ("fieldValidation", "Strict")]
TRIAL: Final[Mapping[str, Any]] = {
    "apiVersion": POOL.api_version,
    "kind": POOL.kind,
    "metadata": {"name": "kvist-trial"},
    "spec": {"model": {"source": "hf://Qwen/Qwen3-8B"}, "gateway": {"mode": "Envoy"}},
}
"""The least that a pool says, and a way in."""


def main(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """What was found. Raises OperatorError: what does not work."""
    told = _parser(environment).parse_args(argv)
    return asyncio.run(tried(told.namespace, told.operator, environment))


async def tried(namespace: str, operator: str, environment: Mapping[str, str]) -> str:
    """The same; ``operator`` is the address of its metrics port, empty: it is not asked."""
    if operator:
        await ready(f"{operator.rstrip('/')}/readyz")
    await makeable(namespace, environment)
    return f"{'the operator is ready; ' if operator else ''}a pool can be made in namespace {namespace}"


async def ready(url: str, *, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for it. Raises StartError with the last thing that was heard."""
    timeout = aiohttp.ClientTimeout(total=5)
    deadline = time.monotonic() + seconds
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while problem := await _unready(session, url):
            if time.monotonic() >= deadline:
                raise StartError(f"{url}: not ready within {seconds:g} s: {problem}")
            await asyncio.sleep(POLL_SECONDS)


async def _unready(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url) as response:
            return "" if response.status == 200 else (await response.text()).strip()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return f"{type(error).__name__}: {error}"


async def makeable(namespace: str, environment: Mapping[str, str]) -> None:
    """Ask the API server to make a pool without keeping it. Raises StartError, ClusterError."""
    try:
        connection = Connection(find_cluster(environment, otherwise="set KUBECONFIG, or run in a pod"))
    except ClusterNotFound as error:
        raise StartError(str(error)) from error
    try:
        answer = await connection.request("POST", POOL.path(namespace), DRY_RUN, dict(TRIAL))
    except ApiError as error:
        raise StartError(str(error)) from error
    finally:
        await connection.close()
    if answer.status not in (200, 201):
        doing = f"create {POOL.path(namespace)} (dry run)"
        raise failure(answer, doing=doing, kind=POOL, verb="create")


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kvist-operator trial", description="Is the operator ready, and can a pool be made? Makes nothing."
    )
    own = own_namespace(environment)
    parser.add_argument("--namespace", default=own, metavar="NAME", help=f"where (default: {own})")
    parser.add_argument(
        "--operator", default="", metavar="URL", help="address of its metrics port; without: it is not asked"
    )
    return parser
