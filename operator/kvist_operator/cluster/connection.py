"""One cluster's API server, asked by whoever the credentials say we are.

The official client does what is hard to get right: where the cluster is, who we are, TLS. Bodies stay plain
documents, in and out: its models cost a millisecond an object, and know no custom resources.
"""

import asyncio
import json
import ssl
from collections.abc import Sequence
from typing import Any, Final
from urllib.request import getproxies

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.config import ConfigException

from kvist_epp.access import Load
from kvist_epp.errors import KvistError
from kvist_operator.errors import ClusterError, Unavailable

from .failures import UNAUTHORIZED

ANSWER_SECONDS: Final = 30.0
CONNECT_SECONDS: Final = 10.0
MAX_WORDS: Final = 300
JSON: Final = "application/json"
Query = Sequence[tuple[str, str]]


class Connection:
    """Tokens and authorities rotate: when the API says that it does not know us, or we do not know it, all of
    that is read again for the next request."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._client: ApiClient | None = None
        self._loading = asyncio.Lock()
        self.requests: dict[str, int] = {}
        """Answers by method and status, ``error`` where there was none."""

    async def ask(
        self,
        method: str,
        path: str,
        query: Query = (),
        body: Any = None,
        *,
        form: str = JSON,
        accept: str = JSON,
    ) -> tuple[int, bytes, str]:
        """Status, body and ``Retry-After`` of an answer, whatever they are. Raises Unavailable."""
        client: ApiClient | None = None
        try:
            client = await self._connected()
            status, content, after = await _asked(
                client, method, path, query, body, {"Accept": accept, "Content-Type": form}
            )
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            await self._renew(client)
            raise self._failed(method, f"the API server's certificate: {_why(error)}") from error
        except (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError) as error:
            raise self._failed(method, _why(error)) from error
        except (ConfigException, KvistError, ValueError) as error:  # a token that is no header, for example
            await self._renew(client)
            raise self._failed(method, _why(error)) from error
        if status == UNAUTHORIZED:
            await self._renew(client)
        self._count(method, str(status))
        return status, content, after

    async def close(self) -> None:
        """Close all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _connected(self) -> ApiClient:
        async with self._loading:
            if self._client is None:
                configuration = await self._load()
                # else ~/.netrc is looked for at each request, in a thread
                configuration.client_session_kwargs = {"trust_env": bool(getproxies())}
                self._client = ApiClient(configuration)
            return self._client

    async def _renew(self, used: ApiClient | None) -> None:
        """Read the credentials again; once for all requests that failed with the old ones."""
        if used is not None and used is self._client:
            await self.close()

    def _failed(self, method: str, why: str) -> ClusterError:
        self._count(method, "error")
        return Unavailable(f"the API server: {why}")

    def _count(self, method: str, status: str) -> None:
        key = f"{method} {status}"
        self.requests[key] = self.requests.get(key, 0) + 1


async def _asked(
    client: ApiClient, method: str, path: str, query: Query, body: Any, headers: dict[str, str]
) -> tuple[int, bytes, str]:
    auth = ["BearerToken"]
    # the body goes past param_serialize, which would copy it by way of its models' rules
    _, url, headers, _, _ = await client.param_serialize(
        method, path, query_params=list(query), header_params=headers, auth_settings=auth
    )
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, connect=CONNECT_SECONDS)
    answer: Any = await client.call_api(method, url, headers, body, _request_timeout=timeout)
    response: aiohttp.ClientResponse = answer.response
    async with response:
        return response.status, await response.read(), response.headers.get("Retry-After", "")


def document(content: bytes) -> Any:
    """An answer's JSON. Raises Unavailable: whoever answered is no API server."""
    try:
        return json.loads(content)
    except ValueError as error:
        raise Unavailable(f"the API server's answer is no JSON: {content[:80]!r}") from error


def _why(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__}: {str(error)[:MAX_WORDS]}"
