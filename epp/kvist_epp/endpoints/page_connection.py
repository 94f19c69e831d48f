"""A connection on which pages are requested again and again, for a tenth of the cost of an HTTP client.

It understands only what a server of engines usually answers: no content coding, a length or chunks. For
anything else ``get`` returns None, and the caller asks with a full client, which also finds the reason.
"""

import asyncio
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Self, cast

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
HTTP_OK: Final = 200
_WITHOUT_BODY: Final = (204, 304)
MAX_HEAD_BYTES: Final = 65_536
_HEAD_END: Final = b"\r\n\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"


class Page(NamedTuple):
    """Answer of a server to one request."""

    status: int
    body: bytes


class PageConnection(asyncio.Protocol):
    """Connection to one server, kept open between requests until the server closes it."""

    def __init__(self, hostport: str, max_bytes: int) -> None:
        self.odd = False
        """True if a full client has to ask from now on: an answer was not understood, did not come in time,
        or was another one than the full client's."""
        self.refusals: dict[str, int] = {}
        """Statuses other than 200, by path, that a full client has confirmed."""
        self._headers = (f"Host: {hostport}", "Accept: */*")
        self._max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Page | None] | None = None
        self._data = bytearray()
        self._begin = self._size = self._status = 0
        self._chunked = self._last = False

    @classmethod
    async def open(cls, address: str, port: int, hostport: str, max_bytes: int) -> Self:
        """Connect. Raises OSError, with its reason in plain words."""
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: cls(hostport, max_bytes), address, port)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise type(error)(f"cannot connect: {reason}") from error
        return connection

    @property
    def usable(self) -> bool:
        """True if the server has not closed it."""
        return self._transport is not None and not self._transport.is_closing()

    async def get(self, path: str, timeout: float, headers: Mapping[str, str] = NO_HEADERS) -> Page | None:
        """Return a page; None if the server closed the connection, or if the answer is ``odd``.

        Cancelling it closes the connection: the answer would be taken for the next one. Raises TimeoutError
        after ``timeout`` seconds, and ValueError for a header of several lines.
        """
        if self._transport is None:
            return None
        lines = [
            f"GET {path} HTTP/1.1",
            *self._headers,
            *(f"{key}: {value}" for key, value in headers.items()),
        ]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a header has more than one line")
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        timer = loop.call_later(timeout, self._on_timeout)
        self._transport.write("\r\n".join((*lines, "", "")).encode())
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            timer.cancel()
            self._answer = None

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Leave the request in progress unanswered."""
        self._transport = None
        self._finish(None)

    def data_received(self, data: bytes) -> None:
        """Collect the answer; one that is not understood closes the connection."""
        if self._answer is None or self._answer.done():
            self.close()
            return
        self._data += data
        try:
            if self._begin or self._read_head():
                self._read_body()
        except ValueError:
            self.odd = True
            self.close()
            self._finish(None)

    def _on_timeout(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(TimeoutError())
        self.close()

    def _read_head(self) -> bool:
        """Return whether the head is complete. Raises ValueError for an answer that is not understood."""
        end = self._data.find(_HEAD_END)
        if end < 0:
            if len(self._data) > MAX_HEAD_BYTES:
                raise ValueError("the head is too long")
            return False
        head = bytes(self._data[: end + 2]).lower()
        if not head.startswith(b"http/1.1 ") or b"\r\ncontent-encoding:" in head:
            raise ValueError("not a plain page")
        self._status = int(head[9:12])
        if self._status < HTTP_OK or self._status in _WITHOUT_BODY:
            raise ValueError("an answer without a body")
        self._last = b"\r\nconnection: close\r\n" in head
        self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in head
        if not self._chunked:
            _, found, rest = head.partition(b"\r\ncontent-length:")
            self._size = int(rest.partition(b"\r\n")[0]) if found else -1
            if not 0 <= self._size <= self._max_bytes:
                raise ValueError("no length, or too long")
        self._begin = end + 4
        return True

    def _read_body(self) -> None:
        if self._chunked:
            if len(self._data) > 2 * self._max_bytes:
                raise ValueError("the page is too long")
            if self._data.endswith(_LAST_CHUNK):
                body = _without_chunks(self._data, self._begin)
                if body is not None:
                    self._finish(body)
            return
        end = self._begin + self._size
        if len(self._data) > end:
            raise ValueError("more than one answer")
        if len(self._data) == end:
            self._finish(bytes(memoryview(self._data)[self._begin :]))

    def _finish(self, body: bytes | None) -> None:
        self._data = bytearray()
        self._begin = 0
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None if body is None else Page(self._status, body))
        if self._last:
            self.close()


def _without_chunks(data: bytearray, at: int) -> bytes | None:
    """Return the body; None while chunks are missing, of which the last seemed to have come.

    Raises ValueError for an invalid one.
    """
    parts: list[bytes] = []
    while True:
        line = data.find(b"\r\n", at)
        if line < 0:
            return None
        size = int(data[at:line].partition(b";")[0], 16)
        if size == 0:
            return b"".join(parts) if line + len(_HEAD_END) == len(data) else None
        if size < 0:
            raise ValueError("not a chunk")
        at = line + 2 + size + 2
        if at > len(data):
            return None
        parts.append(bytes(data[line + 2 : at - 2]))
