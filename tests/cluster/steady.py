"""A steady load from within the cluster's network."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import aiohttp
from tests.cluster.cluster import Cluster

CLIENTS: Final = 4
PAUSE_SECONDS: Final = 0.02
SECONDS: Final = 30.0


class Steady:
    """``async with Steady(cluster, url) as load``: some clients that ask again and again until the end of the
    block, each on a new connection every time. Every request that was begun is waited for."""

    def __init__(
        self,
        cluster: Cluster,
        url: str,
        *,
        body: Callable[[int], Any] = lambda _: None,
        whole: Callable[[str], bool] = bool,
        clients: int = CLIENTS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``body``: JSON to post, by the number of the request; None: GET. ``whole``: whether a text with
        status 200 is an answer that came to its end."""
        self._cluster = cluster
        self._url = url
        self._body = body
        self._whole = whole
        self._clients = clients
        self._headers = headers
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        self.answers: list[str] = []
        """Texts of good answers."""
        self.failures: list[str] = []
        """What else came."""

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._client(n)) for n in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def until(self, count: int) -> None:
        """Wait until so many more requests have been answered well."""
        wanted = len(self.answers) + count
        async with asyncio.timeout(SECONDS):
            while len(self.answers) < wanted:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _client(self, number: int) -> None:
        timeout = aiohttp.ClientTimeout(total=SECONDS)
        while not self._over:
            async with self._cluster.http(force_close=True) as http:
                await self._one(http, timeout, number)
            number += self._clients
            await asyncio.sleep(PAUSE_SECONDS)

    async def _one(self, http: aiohttp.ClientSession, timeout: aiohttp.ClientTimeout, number: int) -> None:
        body = self._body(number)
        method = "GET" if body is None else "POST"
        told = {"json": body, "timeout": timeout, "headers": self._headers}
        try:
            async with http.request(method, self._url, **told) as response:
                text = await response.text()
                if response.status == 200 and self._whole(text):
                    self.answers.append(text)
                else:
                    self.failures.append(f"{response.status} …{text[-200:]}")
        except (aiohttp.ClientError, OSError) as error:  # a time-out too
            self.failures.append(repr(error))
