"""One HTTP/2 stream that carries a gRPC call: messages out of DATA, and the ``Sink`` for the call's answers.

Framing of messages and the meaning of status codes: gRPC over HTTP/2 (``doc/PROTOCOL-HTTP2.md`` of gRPC).
"""

import logging
import struct
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvist_epp.errors import traceback_without_text
from kvist_epp.http2 import frames
from kvist_epp.http2.call import Call, Method
from kvist_epp.http2.header_reader import RequestHead

if TYPE_CHECKING:
    from kvist_epp.http2.stream_table import StreamTable

log = logging.getLogger(__name__)

_message_head = struct.Struct(">BI").unpack_from
_SMALL_PIECE = 1024
"""Smaller pieces share one growing buffer: a message sent byte by byte must not cost an object per byte."""

_BLOCK_FLAGS = frames.END_HEADERS | frames.END_STREAM
_RESPONSE_HEAD = frames.frame(frames.HEADERS, frames.END_HEADERS, b"", frames.RESPONSE)[:5]
_OK_HEAD = frames.frame(frames.HEADERS, _BLOCK_FLAGS, b"", frames.TRAILERS_OK)[:5]


class GrpcStream:
    """A stream from HEADERS until both sides have ended or one has reset; the ``Sink`` of its call."""

    # A stream sets few of these: defaults of the class cost nothing to set.
    call: Call | None = None
    half_closed = False
    ended = False
    sent = False
    waiting: deque[memoryview] | None = None
    waiting_bytes = 0
    emitted = 0
    missing = 0
    """Bytes still to come of the message that has begun."""
    _started = False
    _trailers = b""
    _partial_prefix = b""
    _held = 0
    _delivered = 0
    _unanswered = False
    _discarded = 0

    def __init__(
        self, table: "StreamTable", number: int, head: RequestHead, window: int, *, lasting: bool
    ) -> None:
        self._table = table
        self._outbox = table.outbox
        self.number = number
        self.id = number.to_bytes(4, "big")
        self.head = head
        self.trace_headers: Mapping[str, str] = head.trace_headers
        """The trace context of the call; see ``Sink``."""
        self.from_envoy = head.from_envoy
        self.lasting = lasting
        """True if the call does not end by itself, and keeps no message."""
        self.window = window
        self.credit = self.refilled = table.limits.stream_window
        self._expected = head.content_length
        self._parts: list[bytes | bytearray | memoryview] = []

    def __repr__(self) -> str:
        state = "answered" if self.sent else "ended by the client" if self.half_closed else "open"
        return f"<Stream {self.number}, {state}, {self.waiting_bytes} bytes to send>"

    @property
    def peer(self) -> str:
        """Return the client's address; see ``Sink``."""
        return self._table.peer()

    @property
    def received(self) -> int:
        """Return the bytes of DATA so far, without the last frame."""
        return self.refilled - self.credit

    @property
    def incomplete(self) -> bool:
        """Return whether a message has begun and not ended."""
        return bool(self.missing or self._partial_prefix)

    # -- what arrives

    def begin(self, method: Method | None) -> None:
        """Start the call; ``None`` if there is no such method."""
        if method is None:
            self.close(frames.UNIMPLEMENTED, "unknown method")
            return
        try:
            call = method(self)
        except Exception as error:  # noqa: BLE001 - an exception of a call ends that call
            self._on_error(error)
            return
        if not self.ended:
            self.call = call

    def on_data(self, chunk: bytes, start: int, stop: int) -> None:
        """Process a piece of the request's content; ``chunk[start:stop]`` is copied at most once."""
        if self._expected is not None and self._exceeds(stop - start):
            return
        if self.call is None:
            # Content that is not used: of a request that is not gRPC, or of a call already answered.
            self._discarded += stop - start
            if self._discarded > self._table.limits.message_bytes:
                self._table.reset(self, frames.ENHANCE_YOUR_CALM, "message-bytes")
            return
        if self.missing:
            start = self._continue_message(chunk, start, stop)
        elif self._partial_prefix:
            chunk = self._partial_prefix + chunk[start:stop]
            start, stop = 0, len(chunk)
        while stop - start >= 5 and self.call is not None:
            flag, size = _message_head(chunk, start)
            start += 5
            if flag or size > self._table.limits.message_bytes:
                self._reject_message(flag)
                return
            if stop - start < size:
                self._partial_prefix = b""
                self.missing = size
                self._keep_part(chunk[start:stop])
                return
            self._deliver(chunk[start : start + size])
            start += size
        self._partial_prefix = b"" if self.ended else chunk[start:stop]

    def on_pieces(self, pieces: list[memoryview], size: int) -> None:
        """Process large pieces of a message, ``size`` bytes in all, that do not complete it."""
        if self._expected is not None and self._exceeds(size):
            return
        self._parts += pieces
        self._hold(size)

    def _exceeds(self, size: int) -> bool:
        """Count content against content-length; reset the stream if it is more (RFC 9113 section 8.1.1)."""
        self._expected = (self._expected or 0) - size
        if self._expected < 0:
            self._table.reset(self, frames.PROTOCOL_ERROR)
        return self._expected < 0

    def on_end_stream(self) -> None:
        """Process the client's END_STREAM."""
        self.half_closed = True
        if self._expected:
            self._table.reset(self, frames.PROTOCOL_ERROR)
        elif self.sent:
            self._table.remove(self)
        elif self.missing or self._partial_prefix:
            self.abort(frames.INTERNAL, "the last message is incomplete")
        elif self.call is not None:
            try:
                self.call.on_half_closed()
            except Exception as error:  # noqa: BLE001 - an exception of a call ends that call
                self._on_error(error)
        elif not self.ended:
            self._not_found()

    def cancel(self) -> None:
        """Cancel the call, because the stream is gone, and ignore its answers. Safe to repeat."""
        self.ended = True
        if self.waiting:
            self._outbox.discard(self)
        if self._delivered or self._held:
            self._release()
        call, self.call = self.call, None
        if call is not None:
            self._cancel(call)

    def _release(self) -> None:
        self._table.memory.receive(-self._held - self._delivered)
        self._held = self._delivered = self.missing = 0
        self._parts.clear()

    def _continue_message(self, chunk: bytes, start: int, stop: int) -> int:
        """Add to the message begun; return the position of the next message."""
        if stop - start < self.missing:
            self._keep_part(chunk[start:stop])
            return stop
        end = start + self.missing
        self._parts.append(chunk[start:end])
        message = b"".join(self._parts)
        self._parts.clear()
        self._table.memory.receive(-self._held)
        self._held = self.missing = 0
        self._deliver(message)
        return end

    def _keep_part(self, piece: bytes) -> None:
        parts = self._parts
        if len(piece) >= _SMALL_PIECE:
            parts.append(piece)
        elif parts and isinstance(parts[-1], bytearray):
            parts[-1] += piece
        else:
            parts.append(bytearray(piece))
        self._hold(len(piece))

    def _hold(self, size: int) -> None:
        self.missing -= size
        self._held += size
        if not self._table.memory.receive(size):
            self._table.reset(self, frames.ENHANCE_YOUR_CALM, "held-bytes")

    def _reject_message(self, flag: int) -> None:
        if flag == 1:
            self.abort(frames.UNIMPLEMENTED, "compressed messages are not supported")
        elif flag:
            self.abort(frames.INTERNAL, "reserved bits in a message prefix")
        else:
            self._table.count_end("message-bytes")
            self.abort(
                frames.RESOURCE_EXHAUSTED, f"a message is over {self._table.limits.message_bytes} bytes"
            )

    # -- calls into the service: its exceptions end its call, never the connection

    def _deliver(self, message: bytes) -> None:
        call = self.call
        if call is None:
            return
        self._unanswered = True
        try:
            call.on_message(message)
        except Exception as error:  # noqa: BLE001 - an exception of a call ends that call
            self._on_error(error)
        if self._unanswered and self.call is not None and not self.lasting:
            # The call may keep a message until it answers.
            self._delivered += len(message)
            if not self._table.memory.receive(len(message)):
                self._table.reset(self, frames.ENHANCE_YOUR_CALM, "held-bytes")

    def _cancel(self, call: Call) -> None:
        try:
            call.on_cancelled()
        except Exception as error:  # noqa: BLE001 - the stream is gone, the others must not be
            log.error("a gRPC call failed with %s", traceback_without_text(error))  # noqa: TRY400

    def _on_error(self, error: Exception) -> None:
        log.error("a gRPC call failed with %s", traceback_without_text(error))
        self.abort(frames.UNKNOWN, "internal error")

    def abort(self, status: int, message: str) -> None:
        """Cancel the call, and end the stream with a status."""
        call, self.call = self.call, None
        if call is not None:
            self._cancel(call)
        self.close(status, message)

    # -- the sink

    def send(self, data: bytes, content: bytes | memoryview = b"") -> None:
        """Send one gRPC message. Too slow a reader is reset: ``on_cancelled`` may come before the return."""
        if self.ended:
            return
        box = self._outbox
        size = len(data) + len(content) + 5
        if box.size + box.waiting_bytes + size > box.limit or (
            box.parked and self._table.memory.refuses(size)
        ):
            self._table.reset(self, frames.ENHANCE_YOUR_CALM, "unread")
            return
        self._unanswered = False
        if self._delivered:
            self._table.memory.receive(-self._delivered)
            self._delivered = 0
        if not self._started:
            self._started = True
            box.put(_RESPONSE_HEAD + self.id + frames.RESPONSE)
        if size > self.window or size > box.window or self.waiting:
            self._enqueue(data, content, size)
            return
        self.window -= size
        box.window -= size
        if size <= box.max_frame:
            head = frames.pack_message_head(size >> 16, size & 0xFFFF, frames.DATA, 0, self.id, 0, size - 5)
            box.put(b"".join((head, data, content)) if content else head + data)
        elif content:
            box.put_frames(self.id, frames.message_prefix(size - 5) + data, content)
        else:
            box.put_frames(self.id, frames.message_prefix(size - 5), data)

    def _enqueue(self, data: bytes, content: bytes | memoryview, size: int) -> None:
        """Send as much as the windows allow; the rest waits, unless that is too much."""
        table = self._table
        if self.waiting_bytes + size > table.limits.stream_send_bytes or table.memory.refuses(size):
            table.reset(self, frames.ENHANCE_YOUR_CALM, "unread")
            return
        self._outbox.enqueue(self, frames.message_prefix(size - 5))
        # Copied, because a part of a content that waits would keep all of it, uncounted.
        self._outbox.enqueue(self, b"".join((data, content)) if content else data)

    def close(self, status: int = 0, message: str = "") -> None:
        """End with a grpc-status, after the messages that still wait for the peer's window."""
        if self.ended:
            return
        if self._started and status == frames.OK and not message:
            self._end(_OK_HEAD + self.id + frames.TRAILERS_OK)
            return
        block = frames.trailers(status, message)
        if not self._started:
            block = frames.RESPONSE + block
        self._end(frames.frame(frames.HEADERS, _BLOCK_FLAGS, self.id, block))

    def on_drained(self) -> None:
        """Send the trailers if they waited for the messages, of which the last was just sent."""
        if self._trailers:
            self._finish_sending(self._trailers)
        elif self.credit * 2 < self._table.limits.stream_window and not self.half_closed:
            self.refill()

    def refill(self) -> None:
        """Open the client's window again, unless answers wait: a client that reads no echo sends no more."""
        if self.waiting_bytes:
            return
        missing = self._table.limits.stream_window - self.credit
        self._outbox.put(frames.window_update(self.id, missing))
        self.refilled += missing
        self.credit += missing

    def _end(self, tail: bytes) -> None:
        self.ended = True
        self.call = None
        if self._delivered or self._held:
            self._release()
        if self.waiting:
            self._trailers = tail
        else:
            self._finish_sending(tail)

    def _finish_sending(self, tail: bytes) -> None:
        self._trailers = b""
        self.sent = True
        self._outbox.put(tail)
        self._table.on_answered(self)

    def _not_found(self) -> None:
        if self.head.bodyless:
            self._end(frames.frame(frames.HEADERS, _BLOCK_FLAGS, self.id, frames.NOT_FOUND))
            return
        self._outbox.put(frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, frames.NOT_FOUND))
        self._outbox.enqueue(self, frames.NOT_FOUND_BODY)
        self._end(frames.frame(frames.DATA, frames.END_STREAM, self.id))
