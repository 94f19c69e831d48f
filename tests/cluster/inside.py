"""Sockets of the test process in the network of a box: it asks and serves there, and runs outside."""

import asyncio
import ctypes
import os
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from tests.cluster.node.network import DNS, DOMAIN

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET: Final = 0x40000000
_A_RECORD: Final = 1
DNS_SECONDS: Final = 2.0


class Inside:
    """The network namespace of a process, as long as this is open. A socket stays in the namespace that it
    was made in, so only its making happens inside."""

    def __init__(self, pid: int) -> None:
        self._there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Forget it; sockets that were made go on."""
        os.close(self._there)
        os.close(self._here)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A new socket, not blocking."""
        with self._entered():
            made = socket.socket(family, kind)
        made.setblocking(False)
        return made

    def listening(self, address: str, port: int) -> socket.socket:
        """One that listens there."""
        made = self.open()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        made.listen(128)
        return made

    def connector(self, **more: Any) -> aiohttp.TCPConnector:
        """For aiohttp: connections from within, names as pods look them up."""
        return aiohttp.TCPConnector(
            socket_factory=lambda info: self.open(info[0], info[1]),
            resolver=Names(self),
            family=socket.AF_INET,
            **more,
        )

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """This thread alone, and never across an await."""
        _enter(self._there)
        try:
            yield
        finally:
            _enter(self._here)


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Names(AbstractResolver):
    """Asks CoreDNS for addresses (RFC 1035), with the domain of the cluster for ``name.namespace.svc``."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """All A records. Raises OSError when there is none."""
        name = f"{host}.{DOMAIN}" if host.endswith(".svc") else host
        found = await self.addresses(name)
        if not found:
            raise OSError(f"{name}: no address")
        return [
            ResolveResult(hostname=host, host=one, port=port, family=socket.AF_INET, proto=0, flags=0)
            for one in found
        ]

    async def close(self) -> None:
        """Nothing is open."""

    async def addresses(self, name: str) -> list[str]:
        """Return the addresses of a fully qualified name. Raises TimeoutError."""
        loop = asyncio.get_running_loop()
        number = random.randrange(1 << 16)
        with self._inside.open(kind=socket.SOCK_DGRAM) as made:
            async with asyncio.timeout(DNS_SECONDS):
                await loop.sock_connect(made, (DNS, 53))
                await loop.sock_sendall(made, question(number, name))
                while (answer := await loop.sock_recv(made, 4096))[:2] != struct.pack("!H", number):
                    continue
        return list(records(answer))


def question(number: int, name: str) -> bytes:
    """A recursive question for addresses."""
    labels = b"".join(bytes((len(part),)) + part.encode() for part in name.rstrip(".").split("."))
    return struct.pack("!6H", number, 0x0100, 1, 0, 0, 0) + labels + struct.pack("!BHH", 0, _A_RECORD, 1)


def records(answer: bytes) -> Iterator[str]:
    """Addresses of an answer to one question."""
    count = struct.unpack_from("!H", answer, 6)[0]
    at = _after_name(answer, 12) + 4
    for _ in range(count):
        at = _after_name(answer, at)
        kind, _class, _life, length = struct.unpack_from("!HHIH", answer, at)
        at += 10
        if kind == _A_RECORD:
            yield socket.inet_ntoa(answer[at : at + 4])
        at += length


def _after_name(data: bytes, at: int) -> int:
    """Labels end with a zero, or with a pointer of two bytes."""
    while data[at]:
        if data[at] >= 0xC0:
            return at + 2
        at += 1 + data[at]
    return at + 1
