"""Finds the cluster and its credentials, and talks to its API server.

The official client reads kubeconfig files and service accounts, refreshes tokens and sets up TLS. Bodies stay
bytes in both directions: the client's models cost a millisecond per object and know no custom resources, and
its ``Watch`` hides a 410 (docs/decisions has both measurements).
"""

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.request import getproxies

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException, list_kube_config_contexts, load_kube_config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from yaml import YAMLError

from kvist_kube.errors import ApiError, ClusterNotFound

__all__ = [
    "KUBECONFIG_FILE",
    "SERVICE_ACCOUNT",
    "Answer",
    "Configuration",
    "Connection",
    "LoadConfiguration",
    "Query",
    "context_namespace",
    "find_cluster",
    "own_namespace",
    "retry_after_seconds",
]

# The client warns of a missing kubeconfig at each attempt; the error that follows says so too.
logging.getLogger("kubernetes.aio.config.kube_config").setLevel(logging.ERROR)

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which every pod finds its token, the cluster's certificate authority and its namespace."""
KUBECONFIG_FILE: Final = Path("~/.kube/config")
JSON: Final = "application/json"
CONNECT_SECONDS: Final = 10.0
MAX_MESSAGE: Final = 300
"""Characters of a cause that enter the message of an error."""
MAX_FAILURE_BYTES: Final = 64 * 1024
"""Bytes read of an answer that is a failure."""
MAX_RETRY_AFTER: Final = 60.0
UNAUTHORIZED: Final = 401

LoadConfiguration = Callable[[], Awaitable[Configuration]]
"""Reads the address of the API server and the credentials, as they are at the time of the call."""
Query = Sequence[tuple[str, str]]
_NETWORK_ERRORS: Final = (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError)


def find_cluster(
    environment: Mapping[str, str],
    *,
    account: Path = SERVICE_ACCOUNT,
    home: Path = KUBECONFIG_FILE,
    kubeconfig: str = "",
    context: str = "",
    otherwise: str = "for engines outside of Kubernetes use --endpoints-file",
) -> LoadConfiguration:
    """Return how to load the cluster's configuration: ``kubeconfig``, else ``KUBECONFIG``, else the pod's
    service account, else ``~/.kube/config``.

    ``context``: one of the file's contexts (default: its current one), so that a service account is not used.

    Raises ``ClusterNotFound`` when there is none of these; ``otherwise`` is the remedy that its message
    names.
    """
    files = kubeconfig or environment.get("KUBECONFIG", "")
    if files:
        return lambda: _load_files(files, context)
    if "KUBERNETES_SERVICE_HOST" in environment and not context:
        return lambda: _load_service_account(environment, account)
    if home.expanduser().exists():
        return lambda: _load_files(str(home.expanduser()), context)
    raise ClusterNotFound(
        "no cluster: not in a pod (KUBERNETES_SERVICE_HOST is not set), KUBECONFIG is not set, and there is "
        f"no {home}; {otherwise}"
    )


def own_namespace(environment: Mapping[str, str], *, account: Path = SERVICE_ACCOUNT) -> str:
    """Return the namespace of this process: ``POD_NAMESPACE``, ``NAMESPACE`` (llm-d's variable), that of the
    service account, else ``default``."""
    named = environment.get("POD_NAMESPACE") or environment.get("NAMESPACE")
    file = account / "namespace"
    return named or (file.read_text().strip() if file.is_file() else "") or "default"


def context_namespace(
    environment: Mapping[str, str],
    *,
    home: Path = KUBECONFIG_FILE,
    kubeconfig: str = "",
    context: str = "",
) -> str:
    """Return the namespace of the context that ``find_cluster`` would load; empty where the context names
    none, or where no kubeconfig would be read. Raises ``ApiError`` for a file that cannot be read."""
    files = kubeconfig or environment.get("KUBECONFIG", "")
    if not files:
        in_pod = "KUBERNETES_SERVICE_HOST" in environment and not context
        if in_pod or not home.expanduser().exists():
            return ""
        files = str(home.expanduser())
    try:
        contexts, current = list_kube_config_contexts(files)
    except _KUBECONFIG_ERRORS as error:
        raise ApiError(f"kubeconfig {files}: {error}") from error
    chosen = current if not context else next((one for one in contexts if one["name"] == context), {})
    return str((chosen.get("context") or {}).get("namespace") or "")


# the client lets several builtin exceptions out of a file that is missing or no kubeconfig
_KUBECONFIG_ERRORS: Final = (
    ConfigException,
    YAMLError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
)


async def _load_files(files: str, context: str = "") -> Configuration:
    configuration = Configuration()
    try:
        await load_kube_config(
            files, context=context or None, client_configuration=configuration, persist_config=False
        )
    except _KUBECONFIG_ERRORS as error:
        raise ApiError(f"kubeconfig {files}: {error}") from error
    return configuration


async def _load_service_account(environment: Mapping[str, str], account: Path) -> Configuration:
    configuration = Configuration()
    loader = InClusterConfigLoader(str(account / "token"), str(account / "ca.crt"), environ=environment)
    loader.load_and_set(configuration)  # the client reads the token again every minute
    return configuration


class Answer(NamedTuple):
    """A complete answer of the API server, whatever its status."""

    status: int
    body: bytes
    retry_after: float
    """Seconds that the server asked to wait; 0 when it did not ask."""


class Connection:
    """Requests to one cluster's API server.

    Tokens and certificate authorities rotate: after a 401, or when the server's certificate cannot be
    verified, address and credentials are loaded again for the next request."""

    def __init__(self, load: LoadConfiguration, *, answer_seconds: float = 60.0, netrc: bool = True) -> None:
        """``answer_seconds``: time limit of a complete answer; streams have none. Without ``netrc`` aiohttp
        does not look for ``~/.netrc`` at each request, in a thread."""
        self._netrc = netrc
        self._load = load
        self._answer_timeout = aiohttp.ClientTimeout(total=answer_seconds, connect=CONNECT_SECONDS)
        self._client: ApiClient | None = None
        self._loading = asyncio.Lock()
        self.renewals = 0
        """Number of times the credentials were loaded again."""
        self.requests: dict[str, int] = {}
        """Requests by method and status (``GET 200``); ``GET error`` when there was no answer."""

    async def request(
        self,
        method: str,
        path: str,
        query: Query = (),
        body: Any = None,
        *,
        content_type: str = JSON,
        accept: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request and return its answer, also one that is a failure.

        A ``body`` of bytes is sent as it is; its ``content_type`` must not be JSON. ``headers``: more.

        Raises ``ApiError`` with status 0 when there is no answer.
        """
        headers = {**(headers or {}), "Accept": accept, "Content-Type": content_type}
        async with self._send(method, path, query, body, headers, self._answer_timeout) as response:
            return Answer(
                response.status,
                await response.read(),
                retry_after_seconds(response.headers.get("Retry-After", "")),
            )

    async def get(self, path: str, query: Query) -> bytes:
        """Return the body of a GET. Raises ``ApiError`` when it is not answered with 200."""
        async with self._send("GET", path, query, None, {"Accept": JSON}, self._answer_timeout) as response:
            if response.status != 200:
                raise await _failure(response)
            return await response.read()

    @asynccontextmanager
    async def stream_lines(
        self, path: str, query: Query, silence_seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a GET whose answer does not end, and yield an iterator over its lines.

        Raises ``ApiError`` when it is refused, breaks, or is silent for longer than ``silence_seconds``: the
        connection is half open then.
        """
        timeout = aiohttp.ClientTimeout(connect=CONNECT_SECONDS, sock_read=silence_seconds)
        async with self._send("GET", path, query, None, {"Accept": JSON}, timeout) as response:
            if response.status != 200:
                raise await _failure(response)
            yield _Lines(response.content)

    async def close(self) -> None:
        """Close all connections; the next request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        path: str,
        query: Query,
        body: Any,
        headers: dict[str, str],
        timeout: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        client, outcome = None, "error"
        try:
            client = await self._connect()
            response = await _call(client, method, path, query, body, headers, timeout)
            try:
                yield response
            finally:
                response.close()
                if response.status == UNAUTHORIZED:
                    await self._renew(client)
            outcome = str(response.status)
        except _NETWORK_ERRORS as error:
            if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
                await self._renew(client)
                raise ApiError(f"the API server's certificate cannot be verified: {_cause(error)}") from error
            raise ApiError(_cause(error)) from error
        except ConfigException as error:
            raise ApiError(_cause(error)) from error
        except _UnusableRequest as error:
            await self._renew(client)
            raise ApiError(str(error)) from error
        except ApiError as error:
            outcome = str(error.status or "error")
            raise
        finally:
            key = f"{method} {outcome}"
            self.requests[key] = self.requests.get(key, 0) + 1

    async def _connect(self) -> ApiClient:
        async with self._loading:
            if self._client is None:
                configuration = await self._load()
                if not self._netrc:
                    configuration.client_session_kwargs = {"trust_env": bool(getproxies())}
                self._client = ApiClient(configuration)
            return self._client

    async def _renew(self, used: ApiClient | None) -> None:
        """Drop the credentials, once for all requests that failed with them."""
        if used is not None and used is self._client:
            self.renewals += 1
            await self.close()


class _UnusableRequest(Exception):
    """A request that cannot be sent, for example because the token is not a valid header."""


async def _call(
    client: ApiClient,
    method: str,
    path: str,
    query: Query,
    body: Any,
    headers: dict[str, str],
    timeout: aiohttp.ClientTimeout,
) -> aiohttp.ClientResponse:
    try:
        # the body bypasses param_serialize, which would copy it by the rules of its models
        _, url, headers, _, _ = await client.param_serialize(
            method, path, query_params=list(query), header_params=headers, auth_settings=["BearerToken"]
        )
        answer: Any = await client.call_api(method, url, headers, body, _request_timeout=timeout)
    except _NETWORK_ERRORS:  # some of these are ValueErrors, too
        raise
    except ValueError as error:
        raise _UnusableRequest(_cause(error)) from error
    response: aiohttp.ClientResponse = answer.response
    return response


class _Lines:
    """Lines of a body. No generator: one that is left early would have to be closed."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __aiter__(self) -> "_Lines":
        return self

    async def __anext__(self) -> bytes:
        try:
            line = await self._content.readline()
        except (ValueError, HttpProcessingError) as error:  # it does not fit aiohttp's buffer
            raise ApiError("the watch sent a line longer than any object can be") from error
        if not line:
            raise StopAsyncIteration
        return line


async def _failure(response: aiohttp.ClientResponse) -> ApiError:
    """Return the error of an answer other than 200, with the message of its ``Status`` object."""
    status = response.status
    body = (await response.content.read(MAX_FAILURE_BYTES))[:MAX_FAILURE_BYTES]
    try:
        document = json.loads(body)
        message = str(document.get("message") or "") if isinstance(document, dict) else ""
    except ValueError:
        message = body.decode(errors="replace").strip()
    text = f"{status}: {message[:MAX_MESSAGE] or response.reason}"
    return ApiError(text, status, retry_after=retry_after_seconds(response.headers.get("Retry-After", "")))


def retry_after_seconds(text: str) -> float:
    """Return the seconds of a ``Retry-After`` header, at most a minute; 0 without one or for a date."""
    return min(float(text), MAX_RETRY_AFTER) if text.isascii() and text.isdigit() else 0.0


def _cause(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "the API server does not answer in time"
    return f"{type(error).__name__}: {str(error)[:MAX_MESSAGE]}"
