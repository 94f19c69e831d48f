"""Closed-loop HTTP/1.1 client with minimal cost: prebuilt bytes out, a status and a length in.

Its own cost is part of every latency it measures, with and without the filter alike.
"""

import asyncio
import gc
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

HOST = "127.0.0.1"
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_UNTIL_LAST_CHUNK: Final = sys.maxsize
"""Missing bytes of a body without a length."""


@dataclass(slots=True)
class Sample:
    """Latencies, errors and duration of one window."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Seconds of each correct answer."""
    errors: int = 0
    """Answers other than 200, and connections lost."""
    longest_error: float = 0.0
    """Seconds until the latest answer other than 200."""
    uncounted: int = 0
    """Requests that opened the connections: their latencies do not count, but the picker's CPU time does."""

    def add(self, other: "Sample") -> None:
        """Add another window of the same cell."""
        self.seconds += other.seconds
        self.latencies += other.latencies
        self.errors += other.errors
        self.uncounted += other.uncounted
        self.longest_error = max(self.longest_error, other.longest_error)


class _Client(asyncio.Protocol):
    """One connection that sends its next request as soon as an answer is complete, until it is stopped."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self._requests = requests
        self._buffer = b""
        self._missing = -1
        self._sent_at = 0.0
        self._good = True
        self._lost = False
        self.sample = Sample()
        self.going = False
        self.idle = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._lost = True
        if not self.idle.is_set():
            self._give_up()

    def _give_up(self) -> None:
        self.sample.errors += 1
        self.idle.set()

    def send(self) -> None:
        if self._lost:
            self._give_up()
            return
        self.idle.clear()
        self._sent_at = time.perf_counter()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        if self._missing < 0:
            data = self._buffer + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = data
                return
            self._good = data.startswith(b"HTTP/1.1 200")
            self._buffer = b""
            if self._is_chunked(data[:end]):
                self._missing = _UNTIL_LAST_CHUNK
                self._look_for_last_chunk(data[end + 2 :])
            else:
                self._missing = self._length(data[:end]) - (len(data) - end - 4)
                self._good = self._good and self._missing >= 0
        elif self._missing == _UNTIL_LAST_CHUNK:
            self._look_for_last_chunk(self._buffer + data)
        else:
            self._missing -= len(data)
        if self._missing <= 0:
            self._missing = -1
            self._answered()

    def _is_chunked(self, head: bytes) -> bool:
        """A picker that gives a response's body back takes its length away."""
        return b"\r\ntransfer-encoding: chunked" in head

    def _look_for_last_chunk(self, data: bytes) -> None:
        self._buffer = data[-len(_LAST_CHUNK) :]
        if self._buffer == _LAST_CHUNK:
            self._buffer, self._missing = b"", 0

    def _length(self, head: bytes) -> int:
        _, _, rest = head.partition(b"\r\ncontent-length: ")
        if not rest:
            self._transport.abort()
        return int(rest.partition(b"\r\n")[0] or 0)

    def _answered(self) -> None:
        seconds = time.perf_counter() - self._sent_at
        if self._good:
            self.sample.latencies.append(seconds)
        else:
            self.sample.errors += 1
            self.sample.longest_error = max(self.sample.longest_error, seconds)
        if self.going:
            self.send()
        else:
            self.idle.set()

    def close(self) -> None:
        self._transport.abort()


async def window(port: int, requests: Sequence[bytes], *, concurrency: int, seconds: float) -> Sample:
    """Keep ``concurrency`` requests in flight for ``seconds``, after an uncounted one on each connection.

    Raises OSError when the port is closed.
    """
    loop = asyncio.get_running_loop()
    endless = itertools.cycle(requests)
    clients = [
        (await loop.create_connection(lambda: _Client(endless), HOST, port))[1] for _ in range(concurrency)
    ]
    await _round(clients)
    total = Sample(uncounted=concurrency)
    for client in clients:
        client.sample = Sample()
        client.going = True
    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        for client in clients:
            client.send()
        await asyncio.sleep(seconds)
        for client in clients:
            client.going = False
        await asyncio.gather(*(client.idle.wait() for client in clients))
        total.seconds = time.perf_counter() - began
    finally:
        gc.enable()
    for client in clients:
        total.add(client.sample)
        client.close()
    return total


async def _round(clients: Sequence[_Client]) -> None:
    """One request on each connection: opens Envoy's connections to picker and engines."""
    for client in clients:
        client.send()
    await asyncio.gather(*(client.idle.wait() for client in clients))
