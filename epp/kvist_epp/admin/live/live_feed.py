"""Snapshots of the live document, and the stream of them to viewers (server-sent events).

A snapshot is computed at most once at a time and rendered once for all viewers, in slices of a millisecond,
and only while there are viewers. The time between two of them grows with the work of one, so that the page
takes a bounded share of a core however large the pool is.
"""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any, Final

import msgspec
from aiohttp import web

from kvist_epp.admin.slices import run_in_slices

TICK_SECONDS: Final = 1.0
"""Time between two snapshots while there are viewers."""
CPU_SHARE: Final = 0.01
"""Share of a core that snapshots may take."""
MAX_VIEWERS: Final = 100
RETRY_SECONDS: Final = 5
"""After which a viewer that found no place may try again."""
SLOW_SECONDS: Final = 10.0
"""Time in which a viewer must take one message; a slower one is disconnected."""
RECONNECT_MS: Final = 2000
"""Time after which a browser connects again."""

Json = dict[str, Any]
Renderer = Callable[[Mapping[str, Any]], Generator[None, None, bytes]]
"""Document → the data of an event, without line breaks; yields between steps."""

logger = logging.getLogger(__name__)


class Snapshot:
    """A document, and what has been rendered of it."""

    def __init__(self, document: Json) -> None:
        self.document = document
        self.rendered: dict[str, bytes] = {}
        """By the name of the renderer."""


class Snapshots:
    """Computes at most one snapshot at a time; a caller that comes too soon gets the last one."""

    def __init__(
        self, make: Callable[[], Awaitable[tuple[Json, float]]], renderers: Mapping[str, Renderer]
    ) -> None:
        """``make`` returns a document and the seconds of work it took."""
        self._make = make
        self._renderers = renderers
        self._last: Snapshot | None = None
        self._running: asyncio.Task[Snapshot] | None = None
        self._rendering = asyncio.Lock()
        self._next_at = 0.0

    async def current(self, *, oldest: float = TICK_SECONDS / 2) -> Snapshot:
        """Return a snapshot that is younger than ``oldest`` seconds, or as young as the share allows.

        A caller that is cancelled does not stop the computation for the others.
        """
        if self._running is None and (self._last is None or perf_counter() >= self._next_at):
            self._running = asyncio.create_task(self._compute(oldest), name="live snapshot")
        if self._running is not None:
            return await asyncio.shield(self._running)
        assert self._last is not None, "it is only kept while there is one"
        return self._last

    async def render(self, snapshot: Snapshot, kind: str) -> bytes:
        """Return the snapshot as the renderer of this name writes it."""
        async with self._rendering:
            if kind not in snapshot.rendered:
                steps = self._renderers[kind](snapshot.document)
                snapshot.rendered[kind], seconds = await run_in_slices(steps)
                self._next_at += seconds / CPU_SHARE
        return snapshot.rendered[kind]

    async def close(self) -> None:
        """Stop a computation in progress."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))

    async def _compute(self, oldest: float) -> Snapshot:
        try:
            began = perf_counter()
            document, seconds = await self._make()
            self._last = Snapshot(document)
            self._next_at = began + max(oldest, seconds / CPU_SHARE)
            return self._last
        finally:
            self._running = None


class _Viewer:
    """One open stream. Only the newest message waits for it, so that it holds no backlog."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._newest: bytes | None = None
        self._news = asyncio.Event()

    def offer(self, message: bytes | None) -> None:
        """Replace the message that waits; None ends the stream."""
        self._newest = message
        self._news.set()

    async def take(self) -> bytes | None:
        await self._news.wait()
        self._news.clear()
        return self._newest


class LiveFeed:
    """The viewers, and the task that has a snapshot for them once a second while there are any."""

    def __init__(
        self, snapshots: Snapshots, greeting: Callable[[], Json], *, tick: float = TICK_SECONDS
    ) -> None:
        """``greeting`` is the document of the first event, ``hello``: which process answers."""
        self._snapshots = snapshots
        self._greeting = greeting
        self._tick = tick
        self._viewers: set[_Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._viewers)

    async def stream(self, request: web.Request, kind: str, headers: Mapping[str, str]) -> web.StreamResponse:
        """Send snapshots until the viewer leaves, is too slow, or the feed is closed."""
        if self._closed or len(self._viewers) >= MAX_VIEWERS:
            why = "the picker shuts down" if self._closed else f"{MAX_VIEWERS} viewers watch already"
            return web.Response(
                status=503, text=f"{why}; try again\n", headers={**headers, "Retry-After": str(RETRY_SECONDS)}
            )
        viewer = _Viewer(kind)
        self._viewers.add(viewer)
        try:
            response = web.StreamResponse(headers={**headers, "X-Accel-Buffering": "no"})
            response.content_type = "text/event-stream"
            await response.prepare(request)
            hello = msgspec.json.encode(self._greeting())
            await self._write(request, response, b"retry: %d\n%s" % (RECONNECT_MS, event("hello", hello)))
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="live feed")
            while (message := await viewer.take()) is not None:
                await self._write(request, response, message)
        except ConnectionError:  # the viewer has left
            pass
        finally:
            self._viewers.discard(viewer)
        return response

    async def close(self) -> None:
        """End all streams; later viewers are refused."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._end_all()

    async def _write(self, request: web.Request, response: web.StreamResponse, message: bytes) -> None:
        try:
            async with asyncio.timeout(SLOW_SECONDS):
                await response.write(message)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionAbortedError("the viewer is too slow") from None

    async def _run(self) -> None:
        try:
            while self._viewers:
                began = perf_counter()
                await self._show()
                await asyncio.sleep(max(0.0, began + self._tick - perf_counter()))
        except Exception as error:  # noqa: BLE001  a page that fails must not end the picker
            frame = traceback.extract_tb(error.__traceback__)[-1]
            # not logger.exception: the text of an error might quote a request
            place = f"{frame.filename}:{frame.lineno}"
            logger.error("the live page failed with %s at %s", type(error).__name__, place)  # noqa: TRY400
            self._end_all()
        finally:
            self._task = None

    async def _show(self) -> None:
        snapshot = await self._snapshots.current()
        for kind in {viewer.kind for viewer in self._viewers}:
            message = event(kind, await self._snapshots.render(snapshot, kind))
            for viewer in self._viewers:
                if viewer.kind == kind:
                    viewer.offer(message)

    def _end_all(self) -> None:
        for viewer in self._viewers:
            viewer.offer(None)


def event(name: str, data: bytes) -> bytes:
    """Return one server-sent event; ``data`` has no line breaks."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
