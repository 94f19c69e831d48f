"""Pages of the other replicas of the picker, for pages that show all replicas.

Replicas announce the port of their pages when they connect (``replicas.messages.Handshake``). A request that
is made on behalf of another replica carries ``?replicas=false``, so that it is not passed on again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import aiohttp
import msgspec

TIMEOUT_SECONDS: Final = 2.0
"""Time limit of one replica's answer."""
MAX_PAGE_BYTES: Final = 8 << 20
"""Largest page that is read of a replica."""
PARALLEL_REPLICAS: Final = 32
"""Replicas that are asked at the same time; the others wait, within their time limit."""
NOT_PASSED_ON: Final = "replicas=false"
"""Query of a request that concerns the replica alone that receives it."""

logger = logging.getLogger(__name__)


class ReplicaPages:
    """Reads JSON pages of the other replicas."""

    def __init__(self, addresses: Callable[[], Mapping[str, str]]) -> None:
        """``addresses`` returns the base URL of each other replica's pages by its id; an empty one is not
        known."""
        self._addresses = addresses
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, timeout: float = TIMEOUT_SECONDS) -> dict[str, Mapping[str, Any] | None]:
        """Return the page at ``path`` of each other replica by its id; None where the replica does not
        answer with a JSON object in time.

        ``path`` may have a query; its parts are percent-encoded already.
        """
        addresses = dict(self._addresses())
        pages = [self._get(base, path, timeout) for base in addresses.values()]
        return dict(zip(addresses, await asyncio.gather(*pages), strict=True))

    async def close(self) -> None:
        """Close the connections; requests under way end."""
        if self._session is not None:
            await self._session.close()

    async def _get(self, base: str, path: str, timeout: float) -> Mapping[str, Any] | None:
        if not base:
            return None
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=PARALLEL_REPLICAS)
            self._session = aiohttp.ClientSession(connector=connector)
        url = f"{base}{path}{'&' if '?' in path else '?'}{NOT_PASSED_ON}"
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.get(url, timeout=limit, allow_redirects=False) as response:
                if response.status != 200:
                    return None
                body = await _body(response)
                found = None if body is None else msgspec.json.decode(body)
        # RuntimeError: the session was closed meanwhile, because the picker shuts down
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError, msgspec.MsgspecError) as error:
            logger.debug("%s did not answer: %s", url, type(error).__name__)
            return None
        return found if isinstance(found, dict) else None


async def _body(response: aiohttp.ClientResponse) -> bytes | None:
    """Return the body; None if it is too large."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_PAGE_BYTES:
            return None
    return bytes(body)
