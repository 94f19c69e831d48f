"""Collections of the API server, followed for ever."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
from tests.cluster.client import Client

Json = dict[str, Any]
RETRY_SECONDS = 0.2


def now() -> str:
    """Return the time as Kubernetes writes times."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Followed:
    """One collection: every object first, then every change, deletions during an interruption included."""

    client: Client
    path: str
    """With a query, perhaps."""
    known: dict[str, Json] = field(default_factory=dict)
    """By uid."""

    async def changes(self) -> AsyncIterator[tuple[str, Json]]:
        """ADDED, MODIFIED or DELETED, and the object; begins anew after whatever goes wrong."""
        while True:
            try:
                async for change in self._round():
                    yield change
            except (aiohttp.ClientError, TimeoutError, AssertionError, json.JSONDecodeError) as error:
                sys.stderr.write(f"{self.path}: {error!r}\n")
                await asyncio.sleep(RETRY_SECONDS)

    async def _round(self) -> AsyncIterator[tuple[str, Json]]:
        listed = await self.client.ask("GET", self.path)
        there = {o["metadata"]["uid"]: o for o in listed["items"]}
        for uid in self.known.keys() - there.keys():
            yield "DELETED", self.known.pop(uid)
        for uid, found in there.items():
            self.known[uid] = found
            yield "MODIFIED", found
        async for kind, found in self._watch(listed["metadata"]["resourceVersion"]):
            if kind == "DELETED":
                self.known.pop(found["metadata"]["uid"], None)
            else:
                self.known[found["metadata"]["uid"]] = found
            yield kind, found

    async def _watch(self, version: str) -> AsyncIterator[tuple[str, Json]]:
        sign = "&" if "?" in self.path else "?"
        path = f"{self.path}{sign}watch=1&timeoutSeconds=3600&resourceVersion={version}"
        timeout = aiohttp.ClientTimeout(total=None)
        async with self.client.session.get(path, timeout=timeout) as response:
            async for line in _lines(response):
                change = json.loads(line)
                if change["type"] == "ERROR":  # 410: our version is too old
                    return
                yield change["type"], change["object"]


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield lines of any length: aiohttp's own reader stops at 64 KiB."""
    rest = b""
    async for piece in response.content.iter_any():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line


class Store:
    """Secrets and ConfigMaps of the cluster as they are now."""

    def __init__(self, client: Client) -> None:
        self._followed = {kind: Followed(client, f"/api/v1/{kind}") for kind in ("secrets", "configmaps")}
        self._objects: dict[tuple[str, str, str], Json] = {}
        self.listeners: set[Callable[[], None]] = set()

    async def run(self) -> None:
        """Follow all collections until cancelled."""
        async with asyncio.TaskGroup() as group:
            for kind, followed in self._followed.items():
                group.create_task(self._follow(kind, followed))

    async def _follow(self, kind: str, followed: Followed) -> None:
        async for change, found in followed.changes():
            meta = found["metadata"]
            key = (kind, meta["namespace"], meta["name"])
            if change == "DELETED":
                self._objects.pop(key, None)
            else:
                self._objects[key] = found
            for listener in tuple(self.listeners):
                listener()

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """One of them, perhaps."""
        return self._objects.get((kind, namespace, name))
