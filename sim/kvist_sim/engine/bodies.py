"""Request bodies, answers, and streams written from outside aiohttp's task."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import msgspec
from aiohttp import web

from kvist_epp import names
from kvist_sim.engine.openai import ApiError


async def signed(_: web.Request, response: web.StreamResponse) -> None:
    """Set the server header as vLLM does."""
    response.headers["Server"] = "uvicorn"


def writer(request: web.Request) -> Callable[[bytes], int]:
    """Writes to the connection at once, framed as the response's headers announced; returns what is
    unread."""
    chunked = request.version >= (1, 1)

    def write(data: bytes) -> int:
        transport = request.transport
        if transport is None or transport.is_closing():
            return 0
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        return transport.get_write_buffer_size()

    return write


def request_id(request: web.Request) -> str:
    """Return the client's request id, or a new one at every call: vLLM's header and body differ, too."""
    return request.headers.get(names.REQUEST_ID_HEADER) or uuid4().hex[:16]


async def body_of(request: web.Request) -> bytes:
    """Return the body. Raises ApiError 400 for a content type other than JSON."""
    if request.content_type not in {"application/json", "application/octet-stream"}:
        raise ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed", "Bad Request")
    return await request.read()


def document_of(raw: bytes) -> dict[str, Any]:
    """Return the JSON object. Raises ApiError 400 for anything else."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ApiError(400, "There was an error parsing the body", "Bad Request") from None
    if not isinstance(found, dict):
        raise ApiError(400, "Input should be a valid dictionary", "Bad Request")
    return found


def answer(value: Any) -> web.Response:
    """Return an answer with status 200 and JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def refusal(problem: ApiError) -> web.Response:
    """Return an answer with an error body."""
    return web.Response(body=problem.body(), status=problem.status, content_type="application/json")
