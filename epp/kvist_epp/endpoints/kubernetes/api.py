"""The Kubernetes API as it is used here: GET a page, and GET lines that go on.

By ``kubernetes``, the official client. Its asyncio part does what is hard to get right: where the cluster
is and who we are (``kvist_epp.access``), TLS. Lists and watches are read as bytes: its ``Watch`` hides a
410, and its models cost a millisecond a pod (docs/decisions has both).
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.config import ConfigException

from kvist_epp.access import Load
from kvist_epp.endpoints.kubernetes.objects import Failure, decoded
from kvist_epp.errors import ApiError

CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 60.0
"""A page of a list that takes longer is asked for again."""
MAX_MESSAGE: Final = 300

Query = Sequence[tuple[str, str]]


class Api:
    """One cluster, asked by whoever ``load`` says we are.

    Tokens and authorities rotate: when the API says that it does not know us, or we do not know it, all of
    that is read again for the next request."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._client: ApiClient | None = None
        self._loading = asyncio.Lock()
        self.renewals = 0
        """Times the credentials were read again."""

    async def get(self, path: str, query: Query) -> bytes:
        """The whole answer. Raises ``ApiError``."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, connect=CONNECT_SECONDS)
        async with self._answer(path, query, timeout) as response:
            return await response.read()

    @asynccontextmanager
    async def lines(
        self, path: str, query: Query, silence_seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """An answer that goes on, line by line. Raises ``ApiError``, also when it is silent for longer than
        ``silence_seconds``: the connection is half open then."""
        timeout = aiohttp.ClientTimeout(connect=CONNECT_SECONDS, sock_read=silence_seconds)
        async with self._answer(path, query, timeout) as response:
            yield _Lines(response.content)

    async def close(self) -> None:
        """Close all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @asynccontextmanager
    async def _answer(
        self, path: str, query: Query, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        client = None
        try:
            client = await self._connected()
            response = await _ask(client, path, query, timeout)
            try:
                await _check(response)
                yield response
            finally:
                response.close()
        except ApiError as error:
            if error.status == 401:
                await self._renew(client)
            raise
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            await self._renew(client)
            raise ApiError(f"the API server's certificate: {_why(error)}") from error
        except (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError, ConfigException) as error:
            raise ApiError(_why(error)) from error

    async def _connected(self) -> ApiClient:
        async with self._loading:
            if self._client is None:
                self._client = ApiClient(await self._load())
            return self._client

    async def _renew(self, used: ApiClient | None) -> None:
        """Read the credentials again; once for all requests that failed with the old ones."""
        if used is not None and used is self._client:
            self.renewals += 1
            await self.close()


class _Lines:
    """A body's lines as they come."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __aiter__(self) -> "_Lines":
        return self

    async def __anext__(self) -> bytes:
        try:
            line = await self._content.readline()
        except (ValueError, HttpProcessingError) as error:  # it does not fit aiohttp's buffer
            raise ApiError("a line longer than any object can be") from error
        if not line:
            raise StopAsyncIteration
        return line


async def _ask(
    client: ApiClient, path: str, query: Query, timeout: aiohttp.ClientTimeout
) -> aiohttp.ClientResponse:
    auth = ["BearerToken"]
    try:
        request = await client.param_serialize("GET", path, query_params=list(query), auth_settings=auth)
        answer: Any = await client.call_api(*request, _request_timeout=timeout)
    except (aiohttp.ClientError, ssl.SSLError):  # some of these are ValueErrors, too
        raise
    except ValueError as error:  # a token that is no header, for example
        raise ApiError(_why(error)) from error
    response: aiohttp.ClientResponse = answer.response
    return response


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    body = (await response.content.read(64 * 1024))[: 64 * 1024]
    try:
        message = decoded(body, Failure).message
    except ValueError:
        message = body.decode(errors="replace").strip()
    after = response.headers.get("Retry-After", "")
    raise ApiError(
        f"{response.status}: {message[:MAX_MESSAGE] or response.reason}",
        response.status,
        retry_after=min(float(after), 60.0) if after.isascii() and after.isdigit() else 0.0,
    )


def _why(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "the API server does not answer in time"
    return f"{type(error).__name__}: {str(error)[:MAX_MESSAGE]}"
