"""HTTP connections to engines."""

from typing import Final

import aiohttp

KEPT_ALIVE_SECONDS: Final = 4.0
"""vLLM closes idle connections after 5 s."""


def engine_session(total_seconds: float | None) -> aiohttp.ClientSession:
    """Return a session with a connection pool for all engines; ``total_seconds``: time limit of a request,
    None: each request has its own."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE_SECONDS)
    timeout = aiohttp.ClientTimeout(total=total_seconds)
    return aiohttp.ClientSession(connector=connector, timeout=timeout)
