"""HTTP/1.1 client with minimal cost, for load and benchmarks that share two cores with the rest.

One connection, one exchange at a time, keep-alive; the request is bytes made beforehand, the answer's
body goes to a callback as it arrives. Only what the programs of this package speak: Content-Length and
chunked bodies, no redirects, no compression.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast

MAX_HEAD_BYTES: Final = 65_536
OnData = Callable[[bytes], None]
"""Called with body bytes as they arrive, chunk framing removed."""
OnHead = Callable[["Head"], None]
"""Called with status line and headers as soon as they are complete."""


class HttpError(Exception):
    """The server closed early, or sent invalid HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status line and headers of an answer."""

    status: int
    headers: Mapping[str, str]
    """Headers by lower-case name; of a repeated header the last."""


def request_bytes(
    method: str, path: str, host: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """Return a whole request. A body is assumed to be JSON."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", f"content-length: {len(body)}"]
    if body:
        lines.append("content-type: application/json")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Connection(asyncio.Protocol):
    """Connection to one server; the caller reconnects."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Head] | None = None
        self._on_data: OnData | None = None
        self._on_head: OnHead | None = None
        self._buffer = b""
        self._head: Head | None = None
        self._left = 0
        self._chunked = False

    @classmethod
    async def open(cls, host: str, port: int) -> "Connection":
        """Connect. Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    @property
    def usable(self) -> bool:
        """True if open, and not in the middle of an exchange."""
        return self._transport is not None and not self._transport.is_closing() and self._answer is None

    async def exchange(
        self, request: bytes, on_data: OnData | None = None, *, on_head: OnHead | None = None
    ) -> Head:
        """Send a request and wait for the end of the answer. Raises HttpError for an incomplete one.

        Cancelling it closes the connection, since the rest of the answer would be taken for the next one.
        """
        if self._transport is None or self._transport.is_closing():
            raise HttpError("connection is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._on_data, self._on_head = on_data, on_head
        self._transport.write(request)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._answer = None

    def close(self) -> None:
        """Close at once; unsent data is lost."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Fail the exchange in progress."""
        self._transport = None
        self._fail("connection lost before the answer ended")

    def data_received(self, data: bytes) -> None:
        """Parse the head, then body bytes; an invalid answer closes the connection."""
        self._buffer = self._buffer + data if self._buffer else data
        try:
            if self._head is None and not self._read_head():
                return
            if self._read_chunks() if self._chunked else self._read_plain():
                self._finish()
        except (ValueError, IndexError):
            self._fail("not HTTP/1.1")
            self.close()

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ValueError("head too long")
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        pairs = (line.split(":", 1) for line in lines)
        headers = {name.lower(): value.strip() for name, value in pairs}
        self._head = Head(int(first.split(" ", 2)[1]), headers)
        self._chunked = headers.get("transfer-encoding") == "chunked"
        self._left = int(headers.get("content-length", 0))
        self._buffer = self._buffer[end + 4 :]
        if self._on_head is not None:
            self._on_head(self._head)
        return True

    def _read_plain(self) -> bool:
        data, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
        self._left -= len(data)
        self._give(data)
        return self._left == 0

    def _read_chunks(self) -> bool:
        """Return whether the last chunk has come. ``_left`` is the missing part of a chunk, its CRLF
        included."""
        at, buffer = 0, self._buffer
        while at < len(buffer):
            if self._left == 0:
                line = buffer.find(b"\r\n", at)
                if line < 0:
                    break
                size = int(buffer[at:line], 16)
                if size == 0:
                    if len(buffer) < line + 4:
                        break
                    self._buffer = buffer[line + 4 :]
                    return True
                self._left, at = size + 2, line + 2
            piece = buffer[at : at + self._left]
            text = max(0, self._left - 2)
            self._give(piece[:text])
            self._left -= len(piece)
            at += len(piece)
        self._buffer = buffer[at:]
        return False

    def _give(self, data: bytes) -> None:
        if data and self._on_data is not None:
            self._on_data(data)

    def _finish(self) -> None:
        head, self._head = self._head, None
        if self._answer is not None and not self._answer.done() and head is not None:
            self._answer.set_result(head)

    def _fail(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(HttpError(why))


async def get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Return status and body of a GET on a new connection. Raises OSError or HttpError."""
    connection = await Connection.open(host, port)
    parts: list[bytes] = []
    try:
        head = await connection.exchange(request_bytes("GET", path, f"{host}:{port}"), parts.append)
    finally:
        connection.close()
    return head.status, b"".join(parts)


async def answers(host: str, port: int, path: str) -> bool:
    """Return whether a GET is answered with 200: the probe for start-up."""
    try:
        status, _ = await get(host, port, path)
    except (OSError, HttpError):
        return False
    return status == 200
