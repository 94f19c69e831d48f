"""A minimal Kubernetes API server for lists and watches that misbehaves on request.

The real one is in ``tests/cluster``; this one does what that one does too rarely: refuses, stalls, lies.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

Document = dict[str, Any]


class ApiServer:
    """Objects by collection path; every change has a version and is sent to the watches."""

    def __init__(self) -> None:
        self.version = 100
        self.oldest = 0
        """Watches from an older version are gone."""
        self.asked: list[tuple[str, dict[str, str]]] = []
        """Path and query of every request so far."""
        self.answers: deque[tuple[int, str]] = deque()
        """What the next requests get instead: status and body."""
        self.expired_pages = 0
        """So many next pages of lists are too late."""
        self.open = asyncio.Event()
        """Lists are answered."""
        self.open.set()
        self.mute = False
        """Open watches receive nothing; watches opened later do."""
        self._objects: dict[str, dict[str, Document]] = {}
        self._log: list[tuple[int, str, Document]] = []
        self._watches: set[tuple[str, asyncio.Queue[bytes | None]]] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def lists(self) -> int:
        """Lists asked for, pages counted."""
        return sum("watch" not in query for _, query in self.asked)

    @property
    def watches(self) -> list[str]:
        """Versions at which watches began."""
        return [query["resourceVersion"] for _, query in self.asked if "watch" in query]

    def put(self, path: str, name: str, *, silently: bool = False, **parts: Any) -> None:
        """Create or replace an object; ``silently``: no watch reports it."""
        known = self._objects.setdefault(path, {})
        self.version += 1
        meta = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        document = {**parts, "metadata": meta | parts.get("metadata", {})}
        if not silently:
            self._tell(path, "MODIFIED" if name in known else "ADDED", document)
        known[name] = document

    def delete(self, path: str, name: str, *, silently: bool = False) -> None:
        """An object goes."""
        self.version += 1
        document = self._objects[path].pop(name)
        document["metadata"]["resourceVersion"] = str(self.version)
        if not silently:
            self._tell(path, "DELETED", document)

    def forget(self) -> None:
        """All versions up to now are too old for a watch."""
        self.oldest = self.version

    def bookmark(self) -> None:
        """Tell every watch how far it is."""
        self.version += 1
        head = {"metadata": {"resourceVersion": str(self.version), "creationTimestamp": None}}
        self.say({"type": "BOOKMARK", "object": head})

    def say(self, line: Document | bytes) -> None:
        """Tell every watch anything."""
        data = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
        for _, queue in self._watches:
            queue.put_nowait(data)

    def end(self) -> None:
        """Every watch ends in order."""
        for _, queue in self._watches:
            queue.put_nowait(None)

    def _tell(self, path: str, kind: str, document: Document) -> None:
        line = {"type": kind, "object": document}
        self._log.append((self.version, path, line))
        for watched, queue in self._watches:
            if watched == path and not self.mute:
                queue.put_nowait(json.dumps(line).encode() + b"\n")

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.asked.append((request.path, query))
        if self.answers:
            status, body = self.answers.popleft()
            return web.Response(status=status, text=body)
        if "watch" in query:
            return await self._watch(request, query)
        await self.open.wait()
        return self._list(request.path, query)

    def _list(self, path: str, query: dict[str, str]) -> web.Response:
        first, limit = int(query.get("continue", 0)), int(query.get("limit", 1_000_000))
        if first and self.expired_pages:
            self.expired_pages -= 1
            return web.json_response({"code": 410, "message": "the continue token is too old"}, status=410)
        found = list(self._objects.get(path, {}).values())
        meta = {"resourceVersion": str(self.version)}
        if len(found) > first + limit:
            meta["continue"] = str(first + limit)
        return web.json_response({"metadata": meta, "items": found[first : first + limit]})

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        since = int(query["resourceVersion"])
        if since < self.oldest:
            return web.json_response({"code": 410, "message": f"too old: {since}"}, status=410)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for version, path, line in self._log:
            if version > since and path == request.path:
                queue.put_nowait(json.dumps(line).encode() + b"\n")
        response = web.StreamResponse()
        await response.prepare(request)
        key = (request.path, queue)
        self._watches.add(key)
        try:
            while (said := await queue.get()) is not None:
                await response.write(said)
        except ConnectionError:
            pass
        finally:
            self._watches.discard(key)
        return response

    async def start(self) -> None:
        """Listen on the port."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop the server with every connection; its objects stay."""
        self.end()
        if self._runner is not None:
            await self._runner.cleanup()

    def kubeconfig(self, folder: Path, token: str = "t") -> Path:
        """Write a kubeconfig for this server and return its path."""
        document = {
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(document))
        return path


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    """One that runs."""
    server = ApiServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
