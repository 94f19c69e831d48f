"""Paths of the live page: ``/``, ``/live/state``, ``/live/events``, the form, and the page's own files."""

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from aiohttp import web

from kvist_epp.admin.live.live_feed import LiveFeed, Snapshot, Snapshots
from kvist_epp.admin.live.live_html import ASSETS, STATIC, LiveHtml
from kvist_epp.admin.live.live_state import LiveSources, LiveState
from kvist_epp.admin.live.recent_samples import SAMPLE_SECONDS
from kvist_epp.admin.live.replica_merge import merged
from kvist_epp.admin.live.request_origin import RequestOrigin
from kvist_epp.admin.replica_pages import ReplicaPages
from kvist_epp.admin.slices import run_in_slices
from kvist_epp.director.decision_log import DecisionLog
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.errors import PickError
from kvist_epp.settings.settings import Settings

Json = dict[str, Any]
Explain = Callable[[str, Mapping[str, str], bytes], Mapping[str, Any]]
"""(path, headers, body) → the document of ``/debug/pick``; may raise PickError."""
ReplicaDocuments = Callable[[str], Awaitable[Mapping[str, Mapping[str, Any] | None]]]
"""Path → that page of each other replica, None where one does not answer."""

MAX_FORM_BYTES: Final = 1 << 20
"""Largest body of the form; percent-encoding takes up to three times the pasted text."""
STATE_PATH: Final = "/live/state"
DEFAULT_PATH: Final = "/v1/chat/completions"
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # not no-referrer: with it browsers send "Origin: null" with the form, also to the page's own origin
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_IMMUTABLE: Final = {"Cache-Control": "public, max-age=31536000, immutable"}


class LivePage:
    """One for the process."""

    def __init__(
        self,
        state: LiveState,
        explain: Explain,
        replicas: ReplicaDocuments,
        origin: RequestOrigin,
        *,
        replica: str,
    ) -> None:
        """``replica``: id of this replica, which the page shows."""
        self._state = state
        self._explain = explain
        self._replicas = replicas
        self._origin = origin
        self._replica = replica
        self._html: LiveHtml | None = None
        self._own = Snapshots(self._own_document, {"state": _json})
        self._all = Snapshots(self._document, {"state": _json, "page": self._sections})
        self.feed = LiveFeed(self._all, self._greeting)

    def routes(self) -> list[web.RouteDef]:
        """Return the paths, for the admin server."""
        return [
            web.get("/", self._page),
            web.post("/", self._explained),
            web.get(STATE_PATH, self._state_page),
            web.get("/live/events", self._events),
            *(web.get(f"/live/{name}", self._static) for name in STATIC),
        ]

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            await run_in_slices(self._state.sample())
            await asyncio.sleep(SAMPLE_SECONDS)

    async def close(self) -> None:
        """End the viewers' streams."""
        await self.feed.close()
        await self._all.close()
        await self._own.close()

    # Documents

    async def _own_document(self) -> tuple[Json, float]:
        return await run_in_slices(self._state.document())

    async def _document(self) -> tuple[Json, float]:
        (own, seconds), others = await asyncio.gather(self._own_document(), self._replicas(STATE_PATH))
        return merged(own, others), seconds

    def _greeting(self) -> Json:
        assert self._html is not None, "made before the first stream"
        return {
            "assets": self._html.digest,
            "replica": self._replica,
            "host": os.uname().nodename,
            "started": self._state.started,
        }

    def _sections(self, document: Mapping[str, Any]) -> Generator[None, None, bytes]:
        assert self._html is not None, "made before the first page"
        return self._html.sections(document)

    async def _templates(self) -> LiveHtml:
        """Return the templates, compiled when the page is shown for the first time, beside the event loop."""
        if self._html is None:
            self._html = await asyncio.to_thread(LiveHtml)
        return self._html

    # Pages

    async def _page(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request):
            return refusal
        return await self._whole_page(None)

    async def _explained(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request, changes=True):
            return refusal
        if request.content_type != "application/x-www-form-urlencoded":
            return _text(415, "send the form of this page, or POST the body to /debug/pick")
        if (request.content_length or 0) > MAX_FORM_BYTES or len(
            sent := await request.read()
        ) > MAX_FORM_BYTES:
            return _text(413, "the form takes up to 1 MiB; POST longer bodies to /debug/pick")
        try:
            form = dict(parse_qsl(sent.decode(errors="replace"), max_num_fields=10))
        except ValueError:
            return _text(400, "send the form of this page: path and body")
        path, body = form.get("path", DEFAULT_PATH), form.get("body", "")
        explained: Json = {"path": path, "body": body, "answer": None, "error": ""}
        try:
            explained["answer"] = self._explain(path.partition("?")[0], {}, body.encode())
        except PickError as error:
            explained["error"] = f"{error.message} ({error.status}, {error.reason})"
        if "fragment" in request.query:
            return _html((await self._templates()).explanation(explained))
        return await self._whole_page(explained)

    async def _whole_page(self, explained: Json | None) -> web.Response:
        html = await self._templates()
        snapshot = await self._all.current()
        sections = await self._all.render(snapshot, "page")
        return _html(html.page(snapshot.document, sections, explained=explained))

    async def _state_page(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request):
            return refusal
        snapshots = self._own if request.query.get("replicas") == "false" else self._all
        snapshot: Snapshot = await snapshots.current()
        body = await snapshots.render(snapshot, "state")
        return web.Response(body=body + b"\n", content_type="application/json", headers=SECURITY_HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refusal(request):
            return refusal
        await self._templates()
        kind = "page" if request.query.get("as") == "page" else "state"
        return await self.feed.stream(request, kind, SECURITY_HEADERS)

    async def _static(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request):
            return refusal
        name = request.path.rpartition("/")[2]
        return web.Response(
            body=await asyncio.to_thread((ASSETS / name).read_bytes),
            content_type=STATIC[name],
            charset="utf-8",
            headers={**SECURITY_HEADERS, **_IMMUTABLE},
        )

    def _refusal(self, request: web.Request, *, changes: bool = False) -> web.Response | None:
        found = self._origin.refusal(request.headers, changes=changes)
        return None if found is None else _text(*found)


def make_live_page(
    settings: Settings,
    registry: EndpointRegistry,
    others: ReplicaPages | None,
    explain: Explain,
    *,
    origin: RequestOrigin,
    not_ready: Callable[[], str],
    warnings: Callable[[], Sequence[str]],
    version: str,
) -> LivePage | None:
    """Return the live page of a picker; None if it is switched off. ``others``: pages of its replicas."""
    if not settings.live_page:
        return None
    sources = LiveSources(
        latest_picks=functools.partial(_latest, registry.director.decisions),
        not_ready=not_ready,
        warnings=warnings,
        clock=registry.clock,
        wall_clock=time.time,
        version=version,
    )
    return LivePage(
        LiveState(settings, registry, sources),
        explain,
        _no_others if others is None else others.get,
        origin,
        replica=registry.director.replica,
    )


def _latest(log: DecisionLog | None, count: int) -> Iterator[Json]:
    return iter(()) if log is None else (log.document(decision) for decision in log.newest(count))


async def _no_others(_path: str) -> dict[str, None]:
    return {}


def _json(document: Mapping[str, Any]) -> Generator[None, None, bytes]:
    yield
    return msgspec.json.encode(document)


def _html(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/html", charset="utf-8", headers=SECURITY_HEADERS)


def _text(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=f"{why}\n", headers=SECURITY_HEADERS)
