"""HTTP server of the metrics port: paths, readiness, and errors as JSON.

The contents of the pages come from the callables of ``PickerPages``.
"""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from kvist_epp.admin.decision_pages import DEFAULT_LIMIT, MAX_LIMIT, DecisionPages
from kvist_epp.admin.live.request_origin import RequestOrigin
from kvist_epp.admin.slices import run_in_slices
from kvist_epp.errors import PickError, SettingsError
from kvist_epp.names import PATH_HEADER
from kvist_epp.telemetry.metrics import MetricsPage

logger = logging.getLogger(__name__)

Document = Mapping[str, object]
PageHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SHUTDOWN_SECONDS: Final = 2.0
DEFAULT_PATH: Final = "/v1/chat/completions"
"""Path that ``/debug/pick`` assumes without an ``x-kvist-path`` header."""

CONTENTS: Final = {
    "/metrics": "Prometheus metrics",
    "/healthz": "200 while the process is alive",
    "/readyz": "200 if the picker accepts requests, otherwise 503 and the reason",
    "/ca.crt": "PEM of the authority that signed the certificate of the ext_proc port",
    "/fleet": "prefill that each endpoint's cache saves, and its state; read by the operator",
    "/": "live page for people; /live/state is its content as JSON, /live/events a stream of it",
    "/debug/pick": "POST a request body, and its path as x-kvist-path: the endpoint it would go to, and why",
    "/debug/decisions": "last decisions of all replicas, with what came true; ?limit=50, ?replicas=false",
    "/debug/decisions/ID": "why the request with this x-request-id, or session id, went where it did",
    "/debug/fleet": "endpoints, their state and their backlog",
    "/debug/index": "the prefix index: publishers, blocks, accuracy",
    "/debug/queue": "queued requests by priority, the limits, and how full the endpoints are",
    "/debug/peers": "other replicas of the picker: their state and the requests they routed",
    "/debug/held": "number of records kept for requests in flight; all 0 while there are none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePages:
    """Sources of the pages that every role has."""

    metrics: Callable[[], MetricsPage]
    """Returns the page of all metrics."""
    not_ready: Callable[[], str]
    """Reason for which the picker is not ready; empty if it is."""
    warning: Callable[[], str] = str
    """Problem that needs attention although the picker may be ready; empty if there is none."""
    ca: Callable[[], bytes] = bytes
    """PEM that verifies the ext_proc port; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerPages(RolePages):
    """Sources of all pages of a picker; each document must be serialisable by ``msgspec.json``."""

    explain: Callable[[str, Mapping[str, str], bytes], Document]
    """(path, lower-case headers, body) → the answer of ``/debug/pick``; may raise PickError."""
    debug_fleet: Callable[[], Document | Awaitable[Document]]
    index: Callable[[], Document | Awaitable[Document]]
    fleet: Callable[[], Awaitable[Document]] | None = None
    queue: Callable[[], Document] = dict
    held: Callable[[], Document] = dict
    replicas: Callable[[], Document] = dict
    live: Sequence[web.RouteDef] = ()
    """Paths of the live page; none: it is switched off."""
    decisions: DecisionPages | None = None
    """None: no decisions are kept."""
    origin: RequestOrigin = field(default_factory=RequestOrigin)
    """Which requests ``/fleet`` and ``/debug`` answer. Metrics and probes answer all: scrapers use any name,
    and would only notice by the gap in their data."""


class AdminServer:
    """Open metrics port."""

    def __init__(self, runner: web.AppRunner, port: int) -> None:
        self.port = port
        self._runner = runner

    async def close(self) -> None:
        """Stop the server; requests in progress get two seconds."""
        await self._runner.cleanup()


async def serve(
    pages: RolePages, host: str, port: int, *, body_limit: int = 32 << 20, flag: str = "--metrics-port"
) -> AdminServer:
    """Listen on ``host`` (empty: every address) and ``port`` (0: any free one).

    Raises SettingsError that names the flag when the port cannot be opened.
    """
    middlewares: list[Middleware] = [_errors_as_json]
    if isinstance(pages, PickerPages):
        middlewares.append(_own_origin(pages.origin))
    app = web.Application(client_max_size=body_limit, middlewares=middlewares)
    app.add_routes(_picker_routes(pages) if isinstance(pages, PickerPages) else _role_routes(pages))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host or None, port)
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise SettingsError(f"{flag}: cannot listen on {host or '*'}:{port}: {error.strerror}") from error
    return AdminServer(runner, runner.addresses[0][1])


def _role_routes(pages: RolePages) -> list[web.RouteDef]:
    async def metrics(request: web.Request) -> web.Response:
        page, accept = pages.metrics(), request.headers.get("Accept", "")
        await run_in_slices(page.read())
        body, content_type = await asyncio.to_thread(page.format, accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        reason = pages.not_ready()
        warning = pages.warning()
        text = f"{reason or 'ok'}\n" + (f"warning: {warning}\n" if warning else "")
        return web.Response(text=text, status=503 if reason else 200)

    async def ca(_: web.Request) -> web.Response:
        if not (pem := pages.ca()):
            raise web.HTTPNotFound(reason="no authority: the port is plaintext, or --cert-path has no ca.crt")
        return web.Response(body=pem, content_type="application/x-pem-file")

    return [
        web.get("/metrics", metrics),
        web.get("/healthz", alive),
        web.get("/readyz", ready),
        web.get("/ca.crt", ca),
    ]


def _picker_routes(pages: PickerPages) -> list[web.RouteDef]:
    documents: dict[str, Callable[[], Document | Awaitable[Document]]] = {
        "/debug/fleet": pages.debug_fleet,
        "/debug/index": pages.index,
        "/debug/queue": pages.queue,
        "/debug/held": pages.held,
        "/debug/peers": pages.replicas,
    }

    async def pick(request: web.Request) -> web.Response:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        path = headers.pop(PATH_HEADER, DEFAULT_PATH).partition("?")[0]
        return _json(pages.explain(path, headers, body))

    async def fleet(_: web.Request) -> web.Response:
        if pages.fleet is None:
            raise web.HTTPNotFound(reason="this process has no endpoints")
        return _json(await pages.fleet())

    listed = {path: text for path, text in CONTENTS.items() if path != "/" or pages.live}

    async def contents(request: web.Request) -> web.Response:
        if "json" in request.headers.get("Accept", ""):
            return _json({"pages": listed})
        return web.Response(text="".join(f"{path:<19} {text}\n" for path, text in listed.items()))

    def show(document: Callable[[], Document | Awaitable[Document]]) -> PageHandler:
        async def handler(_: web.Request) -> web.StreamResponse:
            found = document()
            return _json(await found if isinstance(found, Awaitable) else found)

        return handler

    return [
        *_role_routes(pages),
        web.get("/fleet", fleet),
        web.post("/debug/pick", pick),
        *_decision_routes(pages.decisions),
        *(web.get(path, show(document)) for path, document in documents.items()),
        web.get("/debug", contents),
        *pages.live,
    ]


def _decision_routes(found: DecisionPages | None) -> list[web.RouteDef]:
    def kept() -> DecisionPages:
        if found is None:
            raise web.HTTPNotFound(reason="no decisions are kept: set --decision-log above 0")
        return found

    async def latest(request: web.Request) -> web.Response:
        query, text = request.query, request.query.get("limit", str(DEFAULT_LIMIT))
        limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
        if not 1 <= limit <= MAX_LIMIT:
            raise web.HTTPBadRequest(reason=f"limit: a number from 1 to {MAX_LIMIT}")
        return _json(await kept().latest(limit, query.get("id", ""), alone=_is_alone(request)))

    async def of_id(request: web.Request) -> web.Response:
        return _json(await kept().of_id(request.match_info["id"], alone=_is_alone(request)))

    return [web.get("/debug/decisions", latest), web.get("/debug/decisions/{id}", of_id)]


def _is_alone(request: web.Request) -> bool:
    """Return whether the page concerns this replica only (``replica_pages.NOT_PASSED_ON``)."""
    return request.query.get("replicas") == "false"


def _own_origin(origin: RequestOrigin) -> Middleware:
    """Return what refuses requests of foreign web pages for ``/fleet`` and ``/debug``; the live page refuses
    them by itself, as text."""

    @web.middleware
    async def checked(request: web.Request, handler: PageHandler) -> web.StreamResponse:
        if request.path == "/fleet" or request.path.startswith("/debug"):
            found = origin.refusal(request.headers, changes=request.method == "POST")
            if found is not None:
                return _refusal(found[0], "invalid_request_error", "", found[1])
        return await handler(request)

    return checked


@web.middleware
async def _errors_as_json(request: web.Request, handler: PageHandler) -> web.StreamResponse:
    """Answer every refusal with OpenAI's error object.

    An internal error shows only its type, because its text may quote a prompt.
    """
    try:
        return await handler(request)
    except PickError as error:
        return _refusal(error.status, error.kind, error.reason, error.message)
    except web.HTTPException as error:
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return _refusal(error.status, "invalid_request_error", "", error.reason, allowed)
    except Exception as error:  # noqa: BLE001 - a page that fails must not end the picker
        name, frame = type(error).__name__, traceback.extract_tb(error.__traceback__)[-1]
        # not logger.exception: the text of the error would be logged
        place = f"{frame.filename}:{frame.lineno}"
        logger.error("the page %s failed with %s at %s", request.path, name, place)  # noqa: TRY400
        return _refusal(500, "internal_error", name, "this page failed; see the log")


def _refusal(
    status: int, kind: str, code: str, message: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    return _json({"error": {"message": message, "type": kind, "code": code or None}}, status, headers)


def _json(document: Document, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
