"""Connects a command to the cluster of the user's kubeconfig, and reads its InferencePools.

``-n``, ``--context`` and ``--kubeconfig`` mean what they mean to ``kubectl``. Every failure is one line that
names what is missing and the remedy.
"""

import argparse
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from kvist_kube.connection import Connection, context_namespace, find_cluster, own_namespace
from kvist_kube.errors import ApiError, KubeError

from .errors import ClusterAccessError, CommandUsageError

ANSWER_SECONDS: Final = 15.0
"""Time limit of an answer; a picker asks its replicas for at most two seconds."""
RESOURCE: Final = "inferencepools.kvist.dev"
_API: Final = "/apis/kvist.dev/v1alpha1"
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 401, 403, 404


class Cluster(NamedTuple):
    """An open connection, and the namespace that a command is about."""

    connection: Connection
    namespace: str


@asynccontextmanager
async def open_cluster(options: argparse.Namespace) -> AsyncIterator[Cluster]:
    """Yield the cluster that the options name. Raises CommandUsageError if there is none."""
    kubeconfig, context = options.kubeconfig or "", options.context or ""
    otherwise = "name a kubeconfig with --kubeconfig"
    try:
        load = find_cluster(os.environ, kubeconfig=kubeconfig, context=context, otherwise=otherwise)
        namespace = (
            options.namespace
            or context_namespace(os.environ, kubeconfig=kubeconfig, context=context)
            or own_namespace(os.environ)
        )
    except KubeError as error:
        raise CommandUsageError(f"--kubeconfig: {error}") from error
    connection = Connection(load, answer_seconds=ANSWER_SECONDS)
    try:
        yield Cluster(connection, namespace)
    finally:
        await connection.close()


async def list_pools(cluster: Cluster, *, everywhere: bool = False) -> list[dict[str, Any]]:
    """Return the InferencePools of the namespace, or of all, by namespace and name. Raises
    ClusterAccessError."""
    path = f"{_API}/inferencepools" if everywhere else f"{_API}/namespaces/{cluster.namespace}/inferencepools"
    try:
        found = json.loads(await cluster.connection.get(path, ()))
    except ApiError as error:
        raise _explained(error, "list", "" if everywhere else cluster.namespace) from error
    pools: list[dict[str, Any]] = found.get("items") or []
    return sorted(pools, key=lambda pool: (pool["metadata"]["namespace"], pool["metadata"]["name"]))


async def read_pool(cluster: Cluster, name: str) -> dict[str, Any]:
    """Return one InferencePool; without a name the only one of the namespace. Raises ClusterAccessError."""
    if not name:
        return await only_pool(cluster)
    try:
        path = f"{_API}/namespaces/{cluster.namespace}/inferencepools/{name}"
        found: dict[str, Any] = json.loads(await cluster.connection.get(path, ()))
    except ApiError as error:
        if error.status == _NOT_FOUND and f'"{name}" not found' in str(error):
            raise await _absent(cluster, name) from error
        raise _explained(error, "get", cluster.namespace) from error
    return found


async def only_pool(cluster: Cluster) -> dict[str, Any]:
    """Return the pool of a namespace that has exactly one. Raises ClusterAccessError."""
    pools = await list_pools(cluster)
    if len(pools) == 1:
        return pools[0]
    if not pools:
        raise ClusterAccessError(
            f"namespace {cluster.namespace} has no InferencePool: name a namespace with -n; kvist pools -A "
            "lists all pools"
        )
    names = ", ".join(pool["metadata"]["name"] for pool in pools)
    raise ClusterAccessError(f"namespace {cluster.namespace} has several pools, name one of them: {names}")


async def _absent(cluster: Cluster, name: str) -> ClusterAccessError:
    try:
        names = [pool["metadata"]["name"] for pool in await list_pools(cluster)]
    except ClusterAccessError:
        names = []
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "kvist pools -A lists all pools"
    return ClusterAccessError(f"namespace {cluster.namespace} has no InferencePool {name}: {hint}")


def _explained(error: ApiError, verb: str, namespace: str) -> ClusterAccessError:
    """Return the error with what is missing and the remedy; an empty namespace means all of them."""
    scope = f"-n {namespace}" if namespace else "--all-namespaces"
    if error.status == _NOT_FOUND:
        return ClusterAccessError(
            f"the cluster has no {RESOURCE}: install kvist's CRDs and operator (helm install kvist "
            "charts/kvist), or choose another cluster with --context",
            error.status,
        )
    if error.status == _FORBIDDEN:
        return ClusterAccessError(
            f"you may not {verb} {RESOURCE}: ask for a role with this right, and check it with kubectl auth "
            f"can-i {verb} {RESOURCE} {scope}",
            error.status,
        )
    if error.status == _UNAUTHORIZED:
        return ClusterAccessError(
            "the API server does not accept your credentials: sign in again, and check with kubectl auth "
            "whoami",
            error.status,
        )
    if error.status:
        return ClusterAccessError(
            f"the API server cannot {verb} {RESOURCE} now ({error}): try again", error.status
        )
    return ClusterAccessError(
        f"the API server does not answer ({error}): check --context and --kubeconfig with kubectl version"
    )
