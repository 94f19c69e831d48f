"""``kvist-operator check``: checks that the operator is ready and that a pool can be created. ``helm test``
runs it.

Nothing is created: the API server runs a dry run, which includes its schema, its rules and all admission.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp

from kvist_kube.connection import Connection, Query, find_cluster, own_namespace
from kvist_kube.errors import ApiError, ClusterNotFound
from kvist_operator.cluster.cluster_api import error_of
from kvist_operator.cluster.kinds import POOL
from kvist_operator.errors import StartError

READY_SECONDS: Final = 60.0
POLL_SECONDS: Final = 1.0
DRY_RUN: Final[Query] = [("dryRun", "All"), ("fieldValidation", "Strict")]
SAMPLE_POOL: Final[Mapping[str, Any]] = {
    "apiVersion": POOL.api_version,
    "kind": POOL.kind,
    "metadata": {"name": "kvist-check"},
    "spec": {"model": {"source": "hf://Qwen/Qwen3-8B"}, "gateway": {"mode": "Envoy"}},
}
"""A minimal pool, with a gateway."""


def main(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run the checks and return their result. Raises OperatorError that says what fails."""
    flags = _parser(environment).parse_args(argv)
    return asyncio.run(run_checks(flags.namespace, flags.operator, environment))


async def run_checks(namespace: str, operator: str, environment: Mapping[str, str]) -> str:
    """Run the checks. ``operator``: address of its metrics port; when empty, its readiness is not checked."""
    if operator:
        await wait_until_ready(f"{operator.rstrip('/')}/readyz")
    await check_creation(namespace, environment)
    return f"{'the operator is ready; ' if operator else ''}a pool can be created in namespace {namespace}"


async def wait_until_ready(url: str, *, seconds: float = READY_SECONDS) -> None:
    """Wait until the page answers 200. Raises StartError with its last answer."""
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


async def check_creation(namespace: str, environment: Mapping[str, str]) -> None:
    """Create a pool in a dry run. Raises StartError, ClusterError."""
    try:
        connection = Connection(find_cluster(environment, otherwise="set KUBECONFIG, or run in a pod"))
    except ClusterNotFound as error:
        raise StartError(str(error)) from error
    try:
        answer = await connection.request("POST", POOL.path(namespace), DRY_RUN, dict(SAMPLE_POOL))
    except ApiError as error:
        raise StartError(str(error)) from error
    finally:
        await connection.close()
    if answer.status not in (200, 201):
        doing = f"create {POOL.path(namespace)} (dry run)"
        raise error_of(answer, doing=doing, kind=POOL, verb="create")


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kvist-operator check",
        description="Check that the operator is ready and that a pool can be created. Creates nothing.",
    )
    own = own_namespace(environment)
    parser.add_argument(
        "--namespace", default=own, metavar="NAME", help=f"namespace of the pool (default: {own})"
    )
    parser.add_argument(
        "--operator",
        default="",
        metavar="URL",
        help="address of the operator's metrics port; without it, readiness is not checked",
    )
    return parser
