"""Where the other replicas are: names resolved again and again, one link for each address."""

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Sequence
from typing import Final

from kvist_epp.replicas.client import Address
from kvist_epp.replicas.peer_connection import Link
from kvist_epp.settings.replica_addresses import HostPort

RESOLVE_SECONDS: Final = 3.0
MOST_ADDRESSES: Final = 256
"""Addresses dialled; a name that leads to more is no headless Service of replicas."""

logger = logging.getLogger(__name__)


class Members:
    """Keeps a ``Link`` running for each address the names lead to."""

    def __init__(self, names: Sequence[HostPort], link: Callable[[Address], Link]) -> None:
        self.links: dict[Address, Link] = {}
        self.problem = ""
        """Why the names could not be resolved the last time; empty when they could."""
        self._resolved = asyncio.Event()
        self._names = names
        self._link = link
        self._tasks: dict[Address, asyncio.Task[None]] = {}

    async def tried(self) -> None:
        """Waits until the names were looked up once and every address found then was dialled once."""
        await self._resolved.wait()
        for link in list(self.links.values()):
            await link.tried.wait()

    async def run(self) -> None:
        """Resolve for ever; links end with it."""
        try:
            while True:
                await self._resolve()
                await asyncio.sleep(RESOLVE_SECONDS * random.uniform(0.9, 1.1))
        finally:
            await self._stop()

    async def _resolve(self) -> None:
        found: set[Address] = set()
        problems = []
        for host, port in self._names:
            try:
                found |= await addresses(host, port)
            except OSError as error:
                problems.append(f"{host}: {error.strerror or error}")
        problem = "; ".join(problems)
        if problem and problem != self.problem:
            logger.warning("--peers: %s", problem)
        self.problem = problem
        self.follow(found, keep=bool(problem))
        self._resolved.set()

    def follow(self, found: set[Address], *, keep: bool) -> None:
        """These are the addresses now. A link whose address is gone ends when its conversation does; with
        ``keep`` (somebody could not be asked) it stays."""
        for address, link in list(self.links.items()):
            link.wanted = keep or address in found
            if self._tasks[address].done() and not link.wanted:
                del self.links[address], self._tasks[address]
        for address in sorted(found - self.links.keys())[: MOST_ADDRESSES - len(self.links)]:
            link = self.links[address] = self._link(address)
            self._tasks[address] = asyncio.create_task(link.run(), name=f"peer {address}")

    async def _stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        self.links.clear()


async def addresses(host: str, port: int) -> set[Address]:
    """What a name leads to now. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {Address(host, str(sockaddr[0]), port) for *_, sockaddr in found}
