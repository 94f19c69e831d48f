"""Reads the pages of a running picker: by its address, or through the API server's proxy of its pod.

The options are those of ``options.picker_options``. Through the API server the user's own rights are used:
``list`` of pods, ``get`` (for ``/debug/pick``: ``create``) of ``pods/proxy``. Pages name the picker's other
replicas, so any picker of a pool may answer.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import aiohttp

from kvist_kube.connection import Connection
from kvist_kube.errors import ApiError
from kvist_operator.manifests.object_names import METRICS_PORT, PICKER, ObjectNames

from .cluster_access import ANSWER_SECONDS, Cluster, only_pool, open_cluster
from .errors import CommandError, CommandUsageError, NoPickerError, PickerClientError

DEFAULT_ADDRESS: Final = "http://localhost:9090"
_BODY: Final = "application/octet-stream"
_FORBIDDEN: Final = 403
_MISDIRECTED: Final = 421
_UNREACHABLE: Final = (0, 502, 503, 504)
"""Statuses of an API server that does not reach the pod; the next pod is asked."""

Send = Callable[[str, str, bytes | None, Mapping[str, str]], Awaitable[tuple[int, bytes]]]
"""(method, path with query, body, headers) → status and body of the answer. Raises PickerClientError."""


class PickerClient:
    """Requests to one pool's picker."""

    def __init__(self, where: str, send: Send) -> None:
        """``where`` names the picker in messages, by the option that found it."""
        self.where = where
        self._send = send

    async def get(self, path: str, headers: Mapping[str, str] = MappingProxyType({})) -> Any:
        """Return a page, a JSON document. Raises PickerClientError."""
        return await self._ask("GET", path, None, headers)

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Any:
        """Return the JSON document with which the picker answers. Raises PickerClientError."""
        return await self._ask("POST", path, body, headers)

    async def _ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Any:
        """Return the answer.

        Pickers answer under addresses and names of their own only. The API server passes on the name under
        which it was reached itself, so the request is then repeated as one to ``localhost``.
        """
        status, answer = await self._send(method, path, body, headers)
        if status == _MISDIRECTED:
            status, answer = await self._send(method, path, body, {**headers, "Host": "localhost"})
        return self._read(path, status, answer)

    def _read(self, path: str, status: int, body: bytes) -> Any:
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if status == 200 and document is not None:
            return document
        page = path.partition("?")[0]
        error = document.get("error") if isinstance(document, dict) else None
        message = str(error.get("message") or "") if isinstance(error, dict) else ""
        if message and message != "Not Found":
            raise PickerClientError(f"{self.where}: {message}", status)
        raise PickerClientError(
            f"{self.where}: no page {page} there (status {status}): this is not a picker's metrics port, or "
            "the picker is older than this command",
            status,
        )


def run_with_picker(
    options: argparse.Namespace, main: Callable[[PickerClient, argparse.Namespace], Awaitable[int]]
) -> int:
    """Run a command with a client of the picker that its options name; report an error in one line.

    Returns the command's exit code, 1 if the picker is not found or refuses, 2 for options that do not go
    together.
    """

    async def run() -> int:
        async with open_picker(options) as picker:
            return await main(picker, options)

    try:
        return asyncio.run(run())
    except CommandError as error:
        print(f"kvist: {error}", file=sys.stderr)
        return error.exit_code


@asynccontextmanager
async def open_picker(options: argparse.Namespace) -> AsyncIterator[PickerClient]:
    """Yield a client of the picker that the options name. Raises CommandError.

    Options of the cluster without a pool mean the only pool of the namespace; so does a plugin of kubectl
    without options (``as_plugin``).
    """
    given = [name for name in ("namespace", "context", "kubeconfig") if getattr(options, name)]
    if options.address and given:
        raise CommandUsageError(f"--{given[0]} goes with --pool NAME; --address needs no cluster")
    if options.pool or given or (options.as_plugin and not options.address):
        async with _in_cluster(options) as picker:
            yield picker
    else:
        async with _at_address(options.address or DEFAULT_ADDRESS) as picker:
            yield picker


@asynccontextmanager
async def _at_address(address: str) -> AsyncIterator[PickerClient]:
    where = f"--address {address}"
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def send(
            method: str, path: str, body: bytes | None, headers: Mapping[str, str]
        ) -> tuple[int, bytes]:
            try:
                async with session.request(
                    method, f"{address}{path}", data=body, headers=headers, allow_redirects=False
                ) as response:
                    return response.status, await response.read()
            except (aiohttp.ClientError, OSError, ValueError) as error:
                remedy = "name the picker's metrics port, or its pool with --pool"
                raise PickerClientError(f"{where}: no picker answers ({_cause(error)}); {remedy}") from error

        yield PickerClient(where, send)


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "not in time"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        return os.strerror(number) if number > 0 else str(error.os_error.strerror or error.os_error)
    return str(error)


class PickerPod(NamedTuple):
    """A pod of a pool's picker."""

    namespace: str
    name: str
    port: int
    """Of its pages."""
    ready: bool


@asynccontextmanager
async def _in_cluster(options: argparse.Namespace) -> AsyncIterator[PickerClient]:
    async with open_cluster(options) as cluster:
        pool = options.pool or (await only_pool(cluster))["metadata"]["name"]
        yield await picker_of_pool(cluster, pool)


async def picker_of_pool(cluster: Cluster, pool: str) -> PickerClient:
    """Return a client of a pool's pickers, through the API server. Raises PickerClientError, NoPickerError
    where none runs."""
    where = f"--pool {cluster.namespace}/{pool}"
    pods = await picker_pods(cluster.connection, pool, cluster.namespace)
    if not pods:
        raise NoPickerError(
            f"{where}: no picker of this pool runs in the namespace; kvist pools -A lists pools, and pickers "
            "that kvist's operator did not create are named with --address"
        )
    return PickerClient(where, _PodProxy(cluster.connection, where, pods).send)


async def picker_pods(connection: Connection, pool: str, namespace: str) -> list[PickerPod]:
    """Return the running pickers of a pool of kvist's operator, ready ones first. Raises
    PickerClientError."""
    selector = ObjectNames(pool, namespace).selector(PICKER)
    labels = ",".join(f"{name}={value}" for name, value in selector.items())
    try:
        body = await connection.get(f"/api/v1/namespaces/{namespace}/pods", (("labelSelector", labels),))
    except ApiError as error:
        remedy = f"; you need the right to list pods in namespace {namespace}"
        problem = f"--pool {namespace}/{pool}: {error}{remedy if error.status == _FORBIDDEN else ''}"
        raise PickerClientError(problem, error.status) from error
    found = [_picker_pod(pod) for pod in json.loads(body).get("items") or () if _is_running(pod)]
    return sorted(found, key=lambda pod: (not pod.ready, pod.name))


def _is_running(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def _picker_pod(pod: Mapping[str, Any]) -> PickerPod:
    ports = [
        port["containerPort"]
        for container in pod["spec"].get("containers") or ()
        for port in container.get("ports") or ()
        if port.get("name") == "metrics"
    ]
    conditions = pod["status"].get("conditions") or ()
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    meta = pod["metadata"]
    return PickerPod(meta["namespace"], meta["name"], ports[0] if ports else METRICS_PORT, ready)


class _PodProxy:
    """Sends requests to the first of some pods that the API server reaches."""

    def __init__(self, connection: Connection, where: str, pods: Sequence[PickerPod]) -> None:
        self._connection = connection
        self._where = where
        self._pods = list(pods)

    async def send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Send a request; see ``Send``."""
        while True:
            pod = self._pods[0]
            status, answer = await self._send_to(pod, method, path, body, headers)
            refusal = _refusal_of_server(status, answer)
            if refusal is None:
                return status, answer
            if status not in _UNREACHABLE or len(self._pods) == 1:
                raise PickerClientError(f"{self._where}: {_explained(status, refusal, pod, method)}", status)
            del self._pods[0]

    async def _send_to(
        self, pod: PickerPod, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        split = urlsplit(path)
        proxy = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}:{pod.port}/proxy{split.path}"
        query = parse_qsl(split.query, keep_blank_values=True)
        try:
            answer = await self._connection.request(
                method, proxy, query, body, content_type=_BODY, headers=headers
            )
        except ApiError as error:
            raise PickerClientError(f"{self._where}: {error}", error.status) from error
        return answer.status, answer.body


def _refusal_of_server(status: int, body: bytes) -> str | None:
    """Return the message of an answer that is the API server's own; None for one of the picker."""
    if status == 200:
        return None
    try:
        document = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:200] if status in _UNREACHABLE else None
    if isinstance(document, dict) and document.get("kind") == "Status":
        return str(document.get("message") or status)
    return None


def _explained(status: int, refusal: str, pod: PickerPod, method: str) -> str:
    if status == _FORBIDDEN:
        verb = "get" if method == "GET" else "create"
        return (
            f"{refusal}; you need the right to {verb} pods/proxy in namespace {pod.namespace}, or use "
            f"kubectl port-forward and --address"
        )
    return f"the API server does not reach the picker {pod.name}: {refusal}"
