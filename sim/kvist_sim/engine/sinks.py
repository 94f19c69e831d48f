"""Answers of the server: bodies and streams, written by receivers of a request's sequences after each step.

A streamed answer is written straight to the connection from the engine's step, without waking a task: at
hundreds of sequences a task per token would cost more than everything else together.
"""

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Final
from uuid import uuid4

import msgspec
from aiohttp import web

from kvist_epp import names
from kvist_sim.engine.openai import DONE, ApiError, Chunks
from kvist_sim.engine.sequence import Sequence
from kvist_sim.engine.tokenizer import TextStream


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


BACKLOG: Final = 16_000_000
"""Unread bytes of a client after which its request is ended."""

Stop = Callable[[Sequence, str], None]
"""Ends a sequence with a finish reason."""


class Answer:
    """The text of one sequence, cut at the first stop text."""

    __slots__ = ("_decoder", "_held", "_seen", "finish", "shown", "stopped", "stops", "text")

    def __init__(self, decoder: TextStream, stops: tuple[str, ...]) -> None:
        self._decoder = decoder
        self.stops = stops
        self._held = max(map(len, stops), default=1) - 1
        self._seen = 0
        self.text = ""
        self.shown = 0
        self.stopped = False
        self.finish: str | None = None

    def take(self, sequence: Sequence) -> None:
        """Decode the tokens since the last call."""
        ids = sequence.tokens[len(sequence.prompt) + self._seen :]
        self._seen += len(ids)
        if ids and sequence.finish == "stop" and not self.stopped:
            ids = ids[:-1]  # the end of text is counted and not shown
        if not self.stopped:
            self.text += self._decoder.feed(ids)
            self._cut()
        self.finish = sequence.finish

    def _cut(self) -> None:
        found = [at for at in (self.text.find(stop, max(0, self.shown)) for stop in self.stops) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def news(self) -> str:
        """Return text that may be shown now and has not been; a possible start of a stop text is held
        back."""
        end = len(self.text) if self.finish or self.stopped else max(self.shown, len(self.text) - self._held)
        new = self.text[self.shown : end]
        self.shown = end
        return new


class Whole:
    """Collector of sequences until all have ended."""

    def __init__(self, answers: Mapping[Sequence, Answer], stop: Stop) -> None:
        self._answers = answers
        self._stop = stop
        self._open = len(answers)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def advanced(self, sequence: Sequence) -> None:
        """Decode every token if there are stop texts; without them the text is decoded once, at the end."""
        answer = self._answers[sequence]
        if sequence.finish is None and not answer.stops:
            return
        answer.take(sequence)
        if sequence.finish is not None:
            self._open -= 1
            if not self._open and not self.done.done():
                self.done.set_result(None)
        elif answer.stopped:
            self._stop(sequence, "stop")


class Stream:
    """Writer of chunks to a connection as tokens come."""

    def __init__(
        self,
        answers: Mapping[Sequence, Answer],
        stop: Stop,
        *,
        chunks: Chunks,
        write: Callable[[bytes], int],
        interval: int,
        token_ids: bool = False,
        counts: Callable[[Seq[Sequence]], dict[str, Any]] | None = None,
    ) -> None:
        """`write` returns the bytes the client has not taken yet; `counts` is None when no usage is
        wanted."""
        self._answers = answers
        self._index = {sequence: index for index, sequence in enumerate(answers)}
        self._stop = stop
        self._chunks = chunks
        self._write = write
        self._interval = interval
        self._token_ids = token_ids
        self._counts = counts
        self._open = len(answers)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def advanced(self, sequence: Sequence) -> None:
        """Write once per sequence and step, and not before the interval is over."""
        answer = self._answers[sequence]
        answer.take(sequence)
        if answer.stopped and sequence.finish is None:
            self._stop(sequence, "stop")  # comes back here with the end
            return
        first = sequence.generated == 1
        if sequence.finish is None and not first and sequence.generated % self._interval:
            return
        out = self._chunk(sequence, answer, first=first)
        if sequence.finish is not None:
            out += self._end()
        if out and self._write(out) > BACKLOG and sequence.finish is None:
            self._stop(sequence, "abort")

    def _chunk(self, sequence: Sequence, answer: Answer, *, first: bool) -> bytes:
        index = self._index[sequence]
        role = self._chunks.role(index) if first else b""
        news = answer.news()
        if not news and sequence.finish is None and not self._token_ids:
            return role
        ids = sequence.tokens[-1:] if self._token_ids and sequence.finish != "stop" else None
        return role + self._chunks.text(index, news, sequence.finish, ids)

    def _end(self) -> bytes:
        self._open -= 1
        if self._open:
            return b""
        if not self.done.done():
            self.done.set_result(None)
        usage = b"" if self._counts is None else self._chunks.usage(self._counts(list(self._answers)))
        return usage + DONE
