"""The pages of the metrics port, as plain functions of a request: what is shown comes from the callables of
``Pages``.

None of them changes anything, none shows prompt text.
"""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
from aiohttp import web

from kvist_epp.errors import PickError
from kvist_epp.names import PATH_HEADER
from kvist_epp.telemetry.metrics import MetricsPage

logger = logging.getLogger(__name__)

Document = Mapping[str, object]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

DEFAULT_PATH: Final = "/v1/chat/completions"
"""What ``/debug/pick`` takes for the path without an ``x-kvist-path`` header."""

INDEX: Final = {
    "/metrics": "Prometheus metrics",
    "/healthz": "200 while the process lives",
    "/readyz": "200 when requests may be sent here, else 503 and why not",
    "/ca.crt": "PEM of the authority that signed the ext_proc port's certificate",
    "/fleet": "what each endpoint's cache is worth, for the operator",
    "/debug/pick": "POST a request body with its path in x-kvist-path: where it would go, and why",
    "/debug/fleet": "endpoints, their state and what they owe",
    "/debug/index": "the index: publishers, blocks, trust",
    "/debug/queue": "requests that wait, by priority; bounds; how full the endpoints are",
    "/debug/peers": "other replicas: who they are, how they stand, what they routed",
    "/debug/held": "what is held for requests on their way: nothing when there are none",
}


class Counted(Protocol):
    """What counts."""

    def snapshot(self) -> MetricsPage:
        """All of it as it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What every role shows."""

    metrics: Counted
    not_ready: Callable[[], str]
    """Why the picker is not ready; empty when it is."""
    warning: Callable[[], str] = str
    """What somebody should look at although the picker is ready; empty when there is nothing."""
    ca: Callable[[], bytes] = bytes
    """PEM that verifies the ext_proc port; empty when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages(Vitals):
    """Where the pages take what they show; each callable returns what ``msgspec.json`` can write."""

    explain: Callable[[str, Mapping[str, str], bytes], Document]
    """(path, lower-case headers, body) → the answer of ``/debug/pick``; may raise PickError."""
    fleet: Callable[[], Document]
    index: Callable[[], Document]
    worth: Callable[[], Awaitable[Document]] | None = None
    queue: Callable[[], Document] = dict
    held: Callable[[], Document] = dict
    peers: Callable[[], Document] = dict


def vital_routes(pages: Vitals) -> list[web.RouteDef]:
    """The handlers of every role."""

    async def metrics(request: web.Request) -> web.Response:
        page, accept = pages.metrics.snapshot(), request.headers.get("Accept", "")
        body, content_type = await asyncio.to_thread(page.format, accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        why = pages.not_ready()
        warning = pages.warning()
        text = f"{why or 'ok'}\n" + (f"warning: {warning}\n" if warning else "")
        return web.Response(text=text, status=503 if why else 200)

    async def ca(_: web.Request) -> web.Response:
        if not (pem := pages.ca()):
            raise web.HTTPNotFound(reason="no authority is known: plaintext, or no ca.crt in --cert-path")
        return web.Response(body=pem, content_type="application/x-pem-file")

    return [
        web.get("/metrics", metrics),
        web.get("/healthz", alive),
        web.get("/readyz", ready),
        web.get("/ca.crt", ca),
    ]


def routes(pages: Pages) -> list[web.RouteDef]:
    """The handlers of a picker."""
    documents = {
        "/debug/fleet": pages.fleet,
        "/debug/index": pages.index,
        "/debug/queue": pages.queue,
        "/debug/held": pages.held,
        "/debug/peers": pages.peers,
    }

    async def pick(request: web.Request) -> web.Response:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        path = headers.pop(PATH_HEADER, DEFAULT_PATH).partition("?")[0]
        return _json(pages.explain(path, headers, body))

    async def fleet(_: web.Request) -> web.Response:
        if pages.worth is None:
            raise web.HTTPNotFound(reason="nothing is known of a fleet here")
        return _json(await pages.worth())

    async def contents(request: web.Request) -> web.Response:
        if "json" in request.headers.get("Accept", ""):
            return _json({"pages": INDEX})
        return web.Response(text="".join(f"{path:<14} {what}\n" for path, what in INDEX.items()))

    return [
        *vital_routes(pages),
        web.get("/fleet", fleet),
        web.post("/debug/pick", pick),
        *(web.get(path, _shows(document)) for path, document in documents.items()),
        web.get("/debug", contents),
    ]


def _shows(document: Callable[[], Document]) -> Handler:
    async def show(_: web.Request) -> web.StreamResponse:
        return _json(document())

    return show


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal is OpenAI's error object; a fault of ours tells its type only, as its text might quote a
    prompt."""
    try:
        return await handler(request)
    except PickError as error:
        return _refusal(error.status, error.kind, error.reason, error.message)
    except web.HTTPException as error:
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return _refusal(error.status, "invalid_request_error", "", error.reason, allowed)
    except Exception as error:  # noqa: BLE001 - a page that fails must not end the picker
        _log_failure(request.path, error)
        return _refusal(500, "internal_error", type(error).__name__, "this page failed; see the log")


def _log_failure(path: str, error: Exception) -> None:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    logger.error("page %s failed: %s in %s:%s", path, type(error).__name__, frame.filename, frame.lineno)


def _refusal(
    status: int, kind: str, code: str, message: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    return _json({"error": {"message": message, "type": kind, "code": code or None}}, status, headers)


def _json(document: Document, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
