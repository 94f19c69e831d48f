"""One accepted socket: reading, writing with back-pressure, fair reads, and the time-outs of a peer.

The server stops reading from a peer that does not read: once its socket is full, no more is taken from it
until it has caught up, or ``stall_seconds`` have passed.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Final, cast

from kvist_epp.errors import ProtocolError
from kvist_epp.http2.call import UNKNOWN_PEER
from kvist_epp.http2.http2_connection import Http2Connection
from kvist_epp.http2.limits import CHECKS_PER_STALL, HUNG_UP, Limits
from kvist_epp.http2.tls_session import PREFIX, TlsSession

if TYPE_CHECKING:
    from kvist_epp.http2.server import Http2Server

_log = logging.getLogger(__name__)

_WRITE_BYTES: Final = 512 * 1024
"""Bytes given to the socket at once: the largest usual answer, the echo of a long prompt, goes as one."""
_WRITE_BUFFER_BYTES: Final = 1024 * 1024
"""Bytes of a full socket's output that the event loop may hold; the rest waits in the outbox, counted."""


LARGE_BYTES: Final = 64 * 1024
"""Pieces from this size on pass through `FairReads`; most requests are smaller."""
TURN_SECONDS: Final = 0.01
"""Seconds spent on large pieces in one turn; the one under way is finished."""

Work = Callable[[], None]


class FairReads:
    """Shares the event loop among flooded connections of a port, and with the rest of the process.

    libuv hands over up to 32 pieces of 256 KB of one socket in a row, and goes on with the next socket: with
    small requests that is seconds of work, in which no health check, scrape or timer runs. A large piece is
    therefore processed at once only while its turn of the loop is young; otherwise it waits, and its socket
    is not read meanwhile.
    """

    __slots__ = ("_clock", "_scheduled", "_soon", "_spent", "_waiting")

    def __init__(self, soon: Callable[[Work], object], clock: Callable[[], float] = perf_counter) -> None:
        """``soon`` schedules work for the loop's next turn; ``clock`` returns seconds."""
        self._soon = soon
        self._clock = clock
        self._waiting: deque[Work] = deque()
        self._spent = 0.0
        self._scheduled = False

    def __len__(self) -> int:
        """Return the number of waiting pieces."""
        return len(self._waiting)

    def run(self, work: Work) -> bool:
        """Run ``work`` now and return True; or, if this turn is used up, run it later and return False."""
        if not self._scheduled:
            self._scheduled = True
            self._soon(self._begin_turn)
        if self._waiting or self._spent >= TURN_SECONDS:
            self._waiting.append(work)
            return False
        self._measure(work)
        return True

    def _begin_turn(self) -> None:
        self._scheduled, self._spent = False, 0.0
        try:
            while self._waiting and self._spent < TURN_SECONDS:
                self._measure(self._waiting.popleft())
        finally:
            if self._waiting and not self._scheduled:
                self._scheduled = True
                self._soon(self._begin_turn)

    def _measure(self, work: Work) -> None:
        begun = self._clock()
        try:
            work()
        finally:
            self._spent += self._clock() - begun


class ServerTransport(asyncio.Protocol):
    """One accepted connection: connects asyncio's transport with `Http2Connection`."""

    def __init__(self, server: "Http2Server", loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._limits = server.limits
        self.connection = Http2Connection(
            server.methods,
            server.limits,
            wake=lambda: loop.call_soon(self._flush),  # once for all answers of one turn of the loop
            clock=loop.time,
            lasting=server.lasting,
            stats=server.stats,
            peer=self._peer,
        )
        self._tls = None if server.ssl is None else TlsSession(server.ssl)
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._deferred = False
        """True while a received piece waits for its turn; the socket is not read before."""
        self._leaving = False
        self._counted_as_idle = False
        self._accepted_at = self._active_at = loop.time()
        """Time when the peer last sent anything, or its socket filled up, or we closed our side."""
        self._busy_at = self._active_at
        self._checked_at = self._active_at
        self._last_stream = 0
        self._probed = False

    def __repr__(self) -> str:
        state = "leaving" if self._leaving else "full" if self._paused else "open"
        return f"<ServerTransport {state}, {self.connection!r}>"

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it
        self._transport = stream
        if not self._server.add(self):
            stream.abort()
            return
        stream.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        _keep_alive(stream, self._limits)
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._leaving:
            return
        self._active_at = self._loop.time()
        self._probed = False
        if len(data) < LARGE_BYTES:
            self._take(data)
        elif not self._server.fair_reads.run(lambda: self._take(data)):
            self._deferred = True
            self._read(False)

    def _take(self, data: bytes) -> None:
        if self._deferred:
            self._deferred = False
            self._read(not self._paused)
        if self._leaving or self._transport is None:
            return
        if self._tls is None:
            self.connection.receive(data)
        else:
            self._decrypt(self._tls, data)
        self._flush()

    def eof_received(self) -> bool:
        self._count_if_in_handshake()
        return False

    def pause_writing(self) -> None:
        self._paused = True
        self._active_at = self._loop.time()
        self._read(False)

    def resume_writing(self) -> None:
        self._paused = False
        self._active_at = self._loop.time()
        self._read(not self._deferred)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._count_if_in_handshake()
        self._transport = None
        self.connection.on_lost()
        self._server.remove(self)

    def _read(self, go_on: bool) -> None:
        """Resume or pause reading from the socket."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if go_on:
            transport.resume_reading()
        else:
            transport.pause_reading()

    # -- called by the server

    @property
    def unsent_bytes(self) -> int:
        """Return the bytes of answers that wait for this peer, including the event loop's buffer."""
        buffered = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return self.connection.outbox.size + self.connection.outbox.waiting_bytes + buffered

    def idle_for(self, now: float) -> float:
        """Return the seconds without a call; 0 while there is one."""
        connection = self.connection
        if connection.streams or connection.stream_table.last != self._last_stream:
            self._last_stream = connection.stream_table.last
            self._busy_at = now
        return now - self._busy_at

    def drain(self) -> None:
        """Send GOAWAY once; a client that has not sent its preface is not asked, and cut off by `check`."""
        if self.connection.established:
            self.connection.drain()
            self._flush()

    def abort(self, reason: str = "") -> None:
        """Cut the connection; ``connection_lost`` follows. ``reason`` is one of ``CONNECTION_ENDS``."""
        if self._transport is None:
            return
        if reason:
            self._server.stats.connections_ended[reason] += 1
        self._transport.abort()

    def check(self, now: float) -> None:
        """Check the peer's time-outs: handshake, reading, leaving, idleness; every ``sweep_seconds``."""
        limits = self._limits
        if self._leaving or self._paused or not self.connection.established:
            self._check_transient(now)
            return
        if now - self._checked_at >= limits.stall_seconds / CHECKS_PER_STALL:
            self._checked_at = now
            self.connection.check_streams(now)
        if not self._server.draining:
            self._check_idle(self.idle_for(now))
        self._check_alive(now - self._active_at)
        self._flush()

    def _check_transient(self, now: float) -> None:
        """Check the states that must end soon: a full socket, our side closed, no preface yet."""
        limits, quiet = self._limits, now - self._active_at
        if self._paused:
            late, reason = quiet > limits.stall_seconds, "stalled"
        elif self._leaving:
            late, reason = quiet > limits.linger_seconds, ""
        else:
            # Measured from accept, not from the last byte: a byte now and then is no handshake.
            late, reason = now - self._accepted_at > limits.handshake_seconds, "handshake"
            late = late or (self._server.draining and quiet > limits.linger_seconds)
        if late:
            self.abort(reason)

    def _check_idle(self, idle: float) -> None:
        if idle <= self._limits.idle_seconds:
            return
        if not self._counted_as_idle:
            self._counted_as_idle = True
            self._server.stats.connections_ended["idle"] += 1
        if idle > self._limits.idle_seconds + self._limits.stall_seconds:
            self.abort()
        else:
            self.drain()

    def _check_alive(self, quiet: float) -> None:
        """Send a silent peer one PING; it then has the time-out to send anything at all."""
        limits = self._limits
        if quiet > limits.keepalive_seconds + limits.keepalive_timeout_seconds and self._probed:
            self.abort("keepalive")
        elif quiet > limits.keepalive_seconds and not self._probed:
            self._probed = True
            self.connection.probe()

    # -- TLS

    def _decrypt(self, tls: TlsSession, data: bytes) -> None:
        try:
            plain = tls.receive(data)
        except ProtocolError as error:
            # Nothing but the TLS alert can be sent now.
            self._server.stats.connections_ended["tls"] += 1
            if tls.established:
                _log.debug("connection ended: %s", error)
            else:
                self._count_failed_handshake(str(error).removeprefix(PREFIX))
            self.connection.on_lost()
            return
        if plain:
            self.connection.receive(plain)
        if tls.ended:
            self.connection.on_lost()

    def _count_if_in_handshake(self) -> None:
        """Count a failed handshake if the peer left in the middle of one."""
        tls = self._tls
        if tls is not None and tls.begun and not (tls.established or self._leaving):
            self._count_failed_handshake(HUNG_UP)

    def _count_failed_handshake(self, reason: str) -> None:
        if self._transport is None:
            return
        own = self._transport.get_extra_info("sockname")
        failures, now = self._server.stats.handshake_failures, self._loop.time()
        if warning := failures.add(reason, self._peer(), now):
            _log.warning("port %s: %s", own[1] if own else "?", warning)

    def _peer(self) -> str:
        """Return the peer's address without its port, for log lines."""
        found = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(found[0]) if found else UNKNOWN_PEER

    # -- writing

    def _flush(self) -> None:
        transport = self._transport
        if transport is None or self._leaving:
            return
        if self._tls is None or self._tls.established:
            self._write(transport)
        if self._paused:
            self.connection.outbox.park(transport.get_write_buffer_size())
        elif self.connection.closing:
            self._leave(transport)
        elif self._tls is not None:
            self._write_encrypted(self._tls, transport)

    def _write(self, transport: asyncio.Transport) -> None:
        """Write as much as the socket takes; the rest waits in the outbox."""
        while not self._paused:
            chunks = self.connection.outbox.take(_WRITE_BYTES)
            if not chunks:
                return
            plain = b"".join(chunks)
            if self._tls is None:
                transport.write(plain)
            else:
                self._tls.encrypt(plain)
                self._write_encrypted(self._tls, transport)

    @staticmethod
    def _write_encrypted(tls: TlsSession, transport: asyncio.Transport) -> None:
        if encrypted := tls.take():
            transport.write(encrypted)

    def _leave(self, transport: asyncio.Transport) -> None:
        """Close our side and wait for the peer to close the connection.

        To close with bytes of the peer unread would make the kernel send a TCP reset, and the peer lose
        answers it has not read yet.
        """
        self._leaving = True
        self._active_at = self._loop.time()
        if self._tls is not None:
            self._tls.finish()
            self._write_encrypted(self._tls, transport)
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()


def _keep_alive(transport: asyncio.Transport, limits: Limits) -> None:
    """Enable TCP keep-alive, which notices a vanished host also where our own PING cannot be sent."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, int(limits.keepalive_seconds))
    for name, value in (
        ("TCP_KEEPIDLE", seconds),
        ("TCP_KEEPINTVL", max(1, seconds // 4)),
        ("TCP_KEEPCNT", 4),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
