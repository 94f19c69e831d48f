"""The pages of the metrics port, as plain functions of a request: what is shown comes from the callables of
``Pages``.

None of them changes anything, none shows prompt text.
"""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from aiohttp import web

from kvist_epp.admin.metrics import Metrics
from kvist_epp.errors import PickError
from kvist_epp.names import PATH_HEADER

logger = logging.getLogger(__name__)

Document = Mapping[str, object]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

DEFAULT_PATH: Final = "/v1/chat/completions"
"""What ``/debug/pick`` takes for the path without an ``x-kvist-path`` header."""

INDEX: Final = {
    "/metrics": "Prometheus metrics",
    "/healthz": "200 while the process lives",
    "/readyz": "200 when requests may be sent here, else 503 and why not",
    "/debug/pick": "POST a request body with its path in x-kvist-path: where it would go, and why",
    "/debug/fleet": "endpoints, their state and what they owe",
    "/debug/index": "the index: publishers, blocks, trust",
}


@dataclass(frozen=True, slots=True)
class Pages:
    """Where the pages take what they show; each callable returns what ``msgspec.json`` can write."""

    metrics: Metrics
    explain: Callable[[str, Mapping[str, str], bytes], Document]
    """(path, lower-case headers, body) → the answer of ``/debug/pick``; may raise PickError."""
    fleet: Callable[[], Document]
    index: Callable[[], Document]
    not_ready: Callable[[], str]
    """Why the picker is not ready; empty when it is."""


def routes(pages: Pages) -> list[web.RouteDef]:
    """The handlers."""

    async def metrics(request: web.Request) -> web.Response:
        page, accept = pages.metrics.snapshot(), request.headers.get("Accept", "")
        body, content_type = await asyncio.to_thread(page.write, accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        why = pages.not_ready()
        return web.Response(text=f"{why or 'ok'}\n", status=503 if why else 200)

    async def pick(request: web.Request) -> web.Response:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        path = headers.pop(PATH_HEADER, DEFAULT_PATH).partition("?")[0]
        return _json(pages.explain(path, headers, body))

    async def fleet(_: web.Request) -> web.Response:
        return _json(pages.fleet())

    async def index(_: web.Request) -> web.Response:
        return _json(pages.index())

    async def contents(request: web.Request) -> web.Response:
        if "json" in request.headers.get("Accept", ""):
            return _json({"pages": INDEX})
        return web.Response(text="".join(f"{path:<14} {what}\n" for path, what in INDEX.items()))

    return [
        web.get("/metrics", metrics),
        web.get("/healthz", alive),
        web.get("/readyz", ready),
        web.post("/debug/pick", pick),
        web.get("/debug/fleet", fleet),
        web.get("/debug/index", index),
        web.get("/debug", contents),
    ]


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
