"""One HTTP/2 stream of this server: gRPC messages out of DATA, and the ``Sink`` its call answers through.

Framing of messages and the meaning of status codes: gRPC over HTTP/2 (``doc/PROTOCOL-HTTP2.md`` of gRPC).
"""

import logging
import struct
import traceback
from collections import deque
from typing import Protocol

from kvist_epp.http2 import frames
from kvist_epp.http2.call import Call, Method
from kvist_epp.http2.headers import Head
from kvist_epp.http2.limits import Limits
from kvist_epp.http2.outbox import Outbox
from kvist_epp.http2.port_stats import MemoryShare

log = logging.getLogger(__name__)

_message_head = struct.Struct(">BI").unpack_from
_SMALL_PIECE = 1024
"""Pieces below this share one growing buffer: a message sent byte by byte must not cost an object a byte."""

_BLOCK_FLAGS = frames.END_HEADERS | frames.END_STREAM
_RESPONSE_HEAD = frames.frame(frames.HEADERS, frames.END_HEADERS, b"", frames.RESPONSE)[:5]
_OK_HEAD = frames.frame(frames.HEADERS, _BLOCK_FLAGS, b"", frames.TRAILERS_OK)[:5]


def _report(error: Exception) -> None:
    """Log where, not what: the text of an exception may quote a prompt."""
    log.error(
        "a call failed: %s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__))
    )


class Owner(Protocol):
    """The connection's streams, as one of them sees them."""

    outbox: Outbox
    limits: Limits
    share: MemoryShare

    def reset(self, stream: "Stream", code: int, reason: str = "protocol") -> None:
        """End a stream with RST_STREAM and tell its call."""

    def ended(self, reason: str) -> None:
        """Count a stream that was ended by us in another way."""

    def finished(self, stream: "Stream") -> None:
        """Our END_STREAM is out."""

    def drop(self, stream: "Stream") -> None:
        """Both sides have ended."""


class Stream:
    """From HEADERS until both sides have ended or one has reset; is its call's ``Sink``."""

    __slots__ = (
        "_delivered",
        "_discarded",
        "_expected",
        "_fraction",
        "_held",
        "_missing",
        "_outbox",
        "_owner",
        "_parts",
        "_started",
        "_tail",
        "_unanswered",
        "call",
        "credit",
        "emitted",
        "ended",
        "half_closed",
        "head",
        "id",
        "lasting",
        "number",
        "refilled",
        "sent",
        "waiting",
        "waiting_bytes",
        "window",
    )

    def __init__(self, owner: Owner, number: int, head: Head, window: int, *, lasting: bool) -> None:
        self._owner = owner
        self._outbox = owner.outbox
        self.number = number
        self.id = number.to_bytes(4, "big")
        self.head = head
        self.call: Call | None = None
        self.lasting = lasting
        """Its call does not end by itself, and keeps nothing of what it is told."""
        self.window = window
        self.credit = self.refilled = owner.limits.stream_window
        self.half_closed = False
        self.ended = False
        self.sent = False
        self.waiting: deque[memoryview] | None = None
        self.waiting_bytes = 0
        self.emitted = 0
        self._started = False
        self._tail = b""
        self._expected = head.content_length
        self._fraction = b""
        self._parts: list[bytes | bytearray] = []
        self._held = 0
        self._missing = 0
        self._delivered = 0
        self._unanswered = False
        self._discarded = 0

    def __repr__(self) -> str:
        state = "answered" if self.sent else "ended by the client" if self.half_closed else "open"
        return f"<Stream {self.number}, {state}, {self.waiting_bytes} bytes to send>"

    @property
    def received(self) -> int:
        """Bytes of DATA so far, but for the last frame."""
        return self.refilled - self.credit

    @property
    def incomplete(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._missing or self._fraction)

    # -- what arrives

    def begin(self, method: Method | None) -> None:
        """Start the call; None = there is no such method."""
        if method is None:
            self.close(frames.UNIMPLEMENTED, "unknown method")
            return
        try:
            call = method(self)
        except Exception as error:  # noqa: BLE001 - whatever a call raises ends that call
            self._crashed(error)
            return
        if not self.ended:
            self.call = call

    def leave(self) -> None:
        """The server goes: a call that would never end by itself is ended."""
        self._abort(frames.UNAVAILABLE, "the server is going away")

    def give_up(self) -> None:
        """The client took too long."""
        self._abort(frames.DEADLINE_EXCEEDED, "the client went silent")

    def data(self, chunk: bytes, start: int, stop: int) -> None:
        """A piece of the request's content, anywhere in it; ``chunk[start:stop]`` is copied at most once."""
        if self._expected is not None and not self._as_announced(stop - start):
            return
        if self.call is None:
            self._discard(stop - start)
            return
        if self._missing:
            start = self._continue(chunk, start, stop)
        elif self._fraction:
            chunk = self._fraction + chunk[start:stop]
            start, stop = 0, len(chunk)
        while stop - start >= 5 and self.call is not None:
            flag, size = _message_head(chunk, start)
            start += 5
            if flag or size > self._owner.limits.message_bytes:
                self._unacceptable(flag)
                return
            if stop - start < size:
                self._begin(chunk, start, stop, size)
                return
            self._deliver(chunk[start : start + size])
            start += size
        self._fraction = b"" if self.ended else chunk[start:stop]

    def finish(self) -> None:
        """The client's END_STREAM."""
        self.half_closed = True
        if self._expected:
            self._owner.reset(self, frames.PROTOCOL_ERROR)
        elif self.sent:
            self._owner.drop(self)
        elif self._missing or self._fraction:
            self._abort(frames.INTERNAL, "the last message is incomplete")
        elif self.call is not None:
            self._half_close(self.call)
        elif not self.ended:
            self._not_found()

    def cancel(self) -> None:
        """The stream is gone: tell the call, take no more from it. Safe to repeat."""
        self.ended = True
        if self.waiting:
            self._outbox.forget(self)
        if self._delivered or self._held:
            self._release()
        call, self.call = self.call, None
        if call is not None:
            self._tell(call)

    def _release(self) -> None:
        """Nothing of what came is kept any more."""
        self._owner.share.receive(-self._held - self._delivered)
        self._held = self._delivered = self._missing = 0
        self._parts.clear()

    def _as_announced(self, size: int) -> bool:
        """Count against content-length (RFC 9113 section 8.1.1)."""
        self._expected = (self._expected or 0) - size
        if self._expected >= 0:
            return True
        self._owner.reset(self, frames.PROTOCOL_ERROR)
        return False

    def _discard(self, size: int) -> None:
        """Content nobody reads: of a request that is not gRPC, or of a call already answered."""
        self._discarded += size
        if self._discarded > self._owner.limits.message_bytes:
            self._owner.reset(self, frames.ENHANCE_YOUR_CALM, "message-bytes")

    def _begin(self, chunk: bytes, start: int, stop: int, size: int) -> None:
        self._fraction = b""
        self._missing = size
        self._keep(chunk[start:stop])

    def _continue(self, chunk: bytes, start: int, stop: int) -> int:
        """More of the message begun; returns where the next message starts."""
        if stop - start < self._missing:
            self._keep(chunk[start:stop])
            return stop
        end = start + self._missing
        self._parts.append(chunk[start:end])
        message = b"".join(self._parts)
        self._parts.clear()
        self._owner.share.receive(-self._held)
        self._held = self._missing = 0
        self._deliver(message)
        return end

    def _keep(self, piece: bytes) -> None:
        size = len(piece)
        self._missing -= size
        self._held += size
        parts = self._parts
        if size >= _SMALL_PIECE:
            parts.append(piece)
        elif parts and isinstance(parts[-1], bytearray):
            parts[-1] += piece
        else:
            parts.append(bytearray(piece))
        if not self._owner.share.receive(size):
            self._owner.reset(self, frames.ENHANCE_YOUR_CALM, "held-bytes")

    def _unacceptable(self, flag: int) -> None:
        if flag == 1:
            self._abort(frames.UNIMPLEMENTED, "compressed messages are not supported")
        elif flag:
            self._abort(frames.INTERNAL, "reserved bits in a message prefix")
        else:
            self._owner.ended("message-bytes")
            self._abort(
                frames.RESOURCE_EXHAUSTED, f"a message is over {self._owner.limits.message_bytes} bytes"
            )

    # -- calls into the service: its exceptions end its call, never the connection

    def _deliver(self, message: bytes) -> None:
        call = self.call
        if call is None:
            return
        self._unanswered = True
        try:
            call.message(message)
        except Exception as error:  # noqa: BLE001 - whatever a call raises ends that call
            self._crashed(error)
        if self._unanswered and self.call is not None and not self.lasting:
            self._keep_delivered(len(message))

    def _keep_delivered(self, size: int) -> None:
        """The call may keep a message until it answers."""
        self._delivered += size
        if not self._owner.share.receive(size):
            self._owner.reset(self, frames.ENHANCE_YOUR_CALM, "held-bytes")

    def _half_close(self, call: Call) -> None:
        try:
            call.half_closed()
        except Exception as error:  # noqa: BLE001 - whatever a call raises ends that call
            self._crashed(error)

    def _tell(self, call: Call) -> None:
        try:
            call.cancelled()
        except Exception as error:  # noqa: BLE001 - the stream is gone, the others must not be
            _report(error)

    def _crashed(self, error: Exception) -> None:
        _report(error)
        self._abort(frames.UNKNOWN, "internal error")

    def _abort(self, status: int, message: str) -> None:
        """End the call from our side, with a reason."""
        call, self.call = self.call, None
        if call is not None:
            self._tell(call)
        self.close(status, message)

    # -- the sink

    def send(self, data: bytes) -> None:
        """Send one gRPC message. A reader too slow is reset: ``cancelled`` may come before this returns."""
        if self.ended:
            return
        box = self._outbox
        size = len(data) + 5
        if box.size + box.waiting_bytes + size > box.limit or (
            box.parked and self._owner.share.refuses(size)
        ):
            self._owner.reset(self, frames.ENHANCE_YOUR_CALM, "unread")
            return
        self._unanswered = False
        if self._delivered:
            self._owner.share.receive(-self._delivered)
            self._delivered = 0
        if not self._started:
            self._started = True
            box.put(_RESPONSE_HEAD + self.id + frames.RESPONSE)
        if size <= self.window and size <= box.window and size <= box.max_frame and not self.waiting:
            self.window -= size
            box.window -= size
            head = frames.pack_message_head(size >> 16, size & 0xFFFF, frames.DATA, 0, self.id, 0, size - 5)
            box.put(head + data)
        else:
            self._hold(data, size)

    def _hold(self, data: bytes, size: int) -> None:
        """Send what the windows allow; the rest waits, if that is not too much."""
        owner = self._owner
        if self.waiting_bytes + size > owner.limits.stream_send_bytes or owner.share.refuses(size):
            owner.reset(self, frames.ENHANCE_YOUR_CALM, "unread")
            return
        self._outbox.hold(self, b"\0" + len(data).to_bytes(4, "big"))
        self._outbox.hold(self, data)

    def close(self, status: int = 0, message: str = "") -> None:
        """End with a grpc-status, after whatever still waits for the peer's window."""
        if self.ended:
            return
        if self._started and status == frames.OK and not message:
            self._end(_OK_HEAD + self.id + frames.TRAILERS_OK)
            return
        block = frames.trailers(status, message)
        if not self._started:
            block = frames.RESPONSE + block
        self._end(frames.frame(frames.HEADERS, _BLOCK_FLAGS, self.id, block))

    def drained(self) -> None:
        """Nothing waits for a window any more; what ends the stream may follow."""
        if self._tail:
            self._finish_sending(self._tail)

    def _end(self, tail: bytes) -> None:
        self.ended = True
        self.call = None
        if self._delivered or self._held:
            self._release()
        if self.waiting:
            self._tail = tail
        else:
            self._finish_sending(tail)

    def _finish_sending(self, tail: bytes) -> None:
        self._tail = b""
        self.sent = True
        self._outbox.put(tail)
        self._owner.finished(self)

    def _not_found(self) -> None:
        if self.head.bodyless:
            self._end(frames.frame(frames.HEADERS, _BLOCK_FLAGS, self.id, frames.NOT_FOUND))
            return
        self._outbox.put(frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, frames.NOT_FOUND))
        self._outbox.hold(self, frames.NOT_FOUND_BODY)
        self._end(frames.frame(frames.DATA, frames.END_STREAM, self.id))
