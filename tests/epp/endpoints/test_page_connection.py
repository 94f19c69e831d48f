"""Pages over one connection: from servers that frame them in every way, and from servers that misbehave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvist_epp.endpoints.page_connection import Page, PageConnection

HEAD = b"HTTP/1.1 200 OK\r\n"
PLAIN = HEAD + b"Content-Length: 5\r\n\r\nhello"
HELLO = Page(200, b"hello")


class Server:
    """Answers each request with the next of the given pieces, byte by byte if wanted; counts connections."""

    def __init__(self, *answers: bytes, close: bool = False, slowly: bool = False) -> None:
        self.connections = 0
        self.requests: list[bytes] = []
        self._answers = list(answers)
        self._close, self._slowly = close, slowly
        self._ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self._answers:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self._answers.pop(0)
                for piece in [answer[at : at + 1] for at in range(len(answer))] if self._slowly else [answer]:
                    writer.write(piece)
                    await asyncio.sleep(0)
                if self._close:
                    break
            else:
                await reader.read(-1)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.transport.abort()
        self._ended.set()

    @asynccontextmanager
    async def connected(self, max_bytes: int = 100) -> AsyncIterator[PageConnection]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = await PageConnection.open("127.0.0.1", port, f"127.0.0.1:{port}", max_bytes)
        async with asyncio.timeout(10):
            yield connection
            connection.close()
            await self._ended.wait()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("slowly", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        PLAIN,
        HEAD + b"content-length:5\r\nserver: uvicorn\r\n\r\nhello",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n",
    ],
)
async def test_pages_are_read_on_one_connection(answer: bytes, slowly: bool) -> None:
    """Pages with a length and in chunks are read however they arrive, and the connection is used again."""
    server = Server(answer, answer, slowly=slowly)
    async with server.connected() as connection:
        assert [await connection.get("/metrics", 5.0), await connection.get("/metrics", 5.0)] == [
            HELLO,
            HELLO,
        ]
        assert (server.connections, connection.odd, connection.usable) == (1, False, True)
    assert server.requests[0].startswith(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_answers_of_any_status_are_read() -> None:
    """An answer has its status, and the connection stays open for the next one."""
    missing = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone"
    moved = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"
    async with Server(missing, moved, PLAIN).connected() as connection:
        pages = [await connection.get("/metrics", 5.0) for _ in range(3)]
    assert pages == [Page(404, b"none"), Page(307, b""), HELLO]


async def test_headers_are_sent_with_a_request() -> None:
    """A request has its own headers beside those of the connection; one of several lines is not sent."""
    server = Server(PLAIN, PLAIN)
    async with server.connected() as connection:
        assert await connection.get("/v1/models", 5.0, {"Authorization": "Bearer k"}) == HELLO
        with pytest.raises(ValueError, match="more than one line"):
            await connection.get("/v1/models", 5.0, {"Authorization": "Bearer k\r\nX: y"})
        assert await connection.get("/metrics", 5.0) == HELLO
    first, second = [request.decode().split("\r\n") for request in server.requests]
    assert (first[0], "Authorization: Bearer k" in first) == ("GET /v1/models HTTP/1.1", True)
    assert (second[0], "Authorization: Bearer k" in second) == ("GET /metrics HTTP/1.1", False)


async def test_a_body_that_ends_like_the_last_chunk_is_read_whole() -> None:
    """A chunk whose content is the end mark of chunks does not end the page."""
    content = b"\r\n0\r\n\r\n"
    answer = HEAD + b"Transfer-Encoding: chunked\r\n\r\n7\r\n" + content + b"\r\n0\r\n\r\n"
    async with Server(answer, slowly=True).connected() as connection:
        assert await connection.get("/metrics", 5.0) == Page(200, content)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 two\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
        HEAD + b"\r\nhello",
        HEAD + b"Content-Length: 5\r\nContent-Encoding: gzip\r\n\r\nhello",
        HEAD + b"Content-Length: 101\r\n\r\nhello",
        HEAD + b"Content-Length: -5\r\n\r\nhello",
        HEAD + b"Content-Length: five\r\n\r\nhello",
        HEAD + b"Content-Length: 4\r\n\r\nhello",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nx\r\nhello\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nh\r\n" * 100,
        HEAD + b"X-Long: " + b"x" * 70_000,
    ],
)
async def test_other_answers_are_left_to_a_full_client(answer: bytes) -> None:
    """An answer of any other kind is no page, closes the connection, and is marked as odd."""
    async with Server(answer).connected() as connection:
        assert await connection.get("/metrics", 5.0) is None
        assert (connection.odd, connection.usable) == (True, False)


async def test_a_server_that_will_close_is_not_asked_again() -> None:
    """A connection whose answer says that it is the last one is closed here, too."""
    last = HEAD + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello"
    async with Server(last).connected() as connection:
        assert await connection.get("/metrics", 5.0) == HELLO
        assert (connection.usable, connection.odd) == (False, False)


async def test_what_comes_behind_an_answer_is_not_the_next_one() -> None:
    """Bytes that follow an answer close the connection, also before the answer was taken."""
    async with Server(PLAIN).connected() as connection:
        asking = asyncio.create_task(connection.get("/metrics", 5.0))
        await asyncio.sleep(0)
        connection.data_received(PLAIN)
        connection.data_received(PLAIN)
        assert await asking == HELLO
        assert await connection.get("/health", 5.0) is None


async def test_a_server_that_closes_is_not_odd() -> None:
    """A connection that the server has closed gives no page; the next one may."""
    async with Server(PLAIN, PLAIN, close=True).connected() as connection:
        assert await connection.get("/metrics", 5.0) == HELLO
        while connection.usable:
            await asyncio.sleep(0)
        assert (await connection.get("/metrics", 5.0), connection.odd) == (None, False)
    async with Server(PLAIN[:-1], close=True).connected() as connection:
        assert (await connection.get("/metrics", 5.0), connection.odd) == (None, False)


async def test_a_request_that_is_given_up_closes_the_connection() -> None:
    """A request that is cancelled closes the connection, since its answer would be taken for the next one."""
    async with Server(b"", PLAIN).connected() as connection:
        task = asyncio.create_task(connection.get("/metrics", 5.0))
        await asyncio.sleep(0.05)
        task.cancel()
        assert await asyncio.gather(task, return_exceptions=True)
        assert not connection.usable


async def test_an_answer_that_does_not_come_times_out() -> None:
    """A server that is silent for the given time fails the request and loses the connection."""
    async with Server(b"", PLAIN).connected() as connection:
        with pytest.raises(TimeoutError):
            await connection.get("/metrics", 0.05)
        assert not connection.usable
