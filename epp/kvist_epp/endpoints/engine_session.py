"""HTTP connections to engines."""

from collections.abc import Mapping
from typing import Final

import aiohttp

from kvist_epp.endpoints.engine_key import UNAUTHORIZED
from kvist_epp.endpoints.page_connection import HTTP_OK, Page

KEPT_ALIVE_SECONDS: Final = 4.0
"""vLLM closes idle connections after 5 s."""


def engine_session(total_seconds: float | None) -> aiohttp.ClientSession:
    """Return a session with a connection pool for all engines; ``total_seconds``: time limit of a request,
    None: each request has its own."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE_SECONDS)
    timeout = aiohttp.ClientTimeout(total=total_seconds)
    return aiohttp.ClientSession(connector=connector, timeout=timeout)


async def get_page(
    session: aiohttp.ClientSession, hostport: str, path: str, headers: Mapping[str, str], max_bytes: int
) -> Page:
    """Return a page of an engine; its content only for status 200.

    Raises aiohttp.ClientError, TimeoutError, OSError, or ValueError for a page of more than ``max_bytes``.
    """
    url = f"http://{hostport}{path}"
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        if response.status != HTTP_OK:
            return Page(response.status, b"")
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > max_bytes:
                raise ValueError(f"the answer to GET {path} is larger than {max_bytes} bytes")
        return Page(response.status, bytes(body))


def check_status(path: str, status: int) -> None:
    """Raise PermissionError or ValueError for a page that was not returned."""
    problem = f"GET {path} returned HTTP status {status}"
    if status in UNAUTHORIZED:
        raise PermissionError(f"{problem}: provide the engines' API key with --engine-key-file")
    if status != HTTP_OK:
        raise ValueError(problem)


def cause(error: BaseException) -> str:
    """Return in a few words why a page was not returned."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(error)[:200] or type(error).__name__
