"""One accepted socket of the fast server: read, write with back-pressure, and the times a peer may take.

A peer that does not read is not read from either: once its socket is full, nothing more is taken from it
until it has caught up, or ``stall_seconds`` have passed.
"""

import asyncio
import logging
import socket
from collections.abc import Collection, Mapping
from ssl import SSLContext
from typing import Final, Protocol, cast

from kvist_epp.errors import ProtocolError
from kvist_epp.http2.call import Method
from kvist_epp.http2.connection import Connection
from kvist_epp.http2.fair_reads import LARGE_BYTES, FairReads
from kvist_epp.http2.handshake_failures import HUNG_UP
from kvist_epp.http2.limits import Limits
from kvist_epp.http2.port_stats import PortStats
from kvist_epp.http2.stall_detector import CHECKS_PER_STALL
from kvist_epp.http2.tls_session import PREFIX, TlsSession

_log = logging.getLogger(__name__)

_WRITE_BYTES: Final = 256 * 1024
_WRITE_BUFFER_BYTES: Final = 1024 * 1024
"""What the event loop may hold of what a full socket did not take; the rest waits here, and is counted."""


class Host(Protocol):
    """The server, as its connections see it."""

    methods: Mapping[str, Method]
    limits: Limits
    lasting: Collection[str]
    ssl: SSLContext | None
    stats: PortStats
    turns: FairReads
    draining: bool

    def admit(self, link: "ServerTransport") -> bool:
        """A connection begins; False: there are too many."""

    def left(self, link: "ServerTransport") -> None:
        """A connection is gone."""


class ServerTransport(asyncio.Protocol):
    """One accepted connection."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        self._host = host
        self._loop = loop
        self._limits = host.limits
        self.connection = Connection(
            host.methods,
            host.limits,
            wake=self._wake,
            clock=loop.time,
            lasting=host.lasting,
            stats=host.stats,
        )
        self._secure = None if host.ssl is None else TlsSession(host.ssl)
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._late = False
        """A piece that was received waits for its turn; nothing is read before."""
        self._leaving = False
        self._dismissed = False
        self._begun = self._since = loop.time()
        """When the peer last sent anything, or its socket filled up, or we said goodbye."""
        self._busy_at = self._since
        self._looked_at = self._since
        self._last_stream = 0
        self._probed = False

    def __repr__(self) -> str:
        state = "leaving" if self._leaving else "full" if self._paused else "open"
        return f"<ServerTransport {state}, {self.connection!r}>"

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._transport = stream
        if not self._host.admit(self):
            stream.abort()
            return
        stream.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        _keep_alive(stream, self._limits)
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._leaving:
            return
        self._since = self._loop.time()
        self._probed = False
        if len(data) < LARGE_BYTES:
            self._take(data)
        elif not self._host.turns.now(lambda: self._take(data)):
            self._late = True
            self._read(False)

    def _take(self, data: bytes) -> None:
        if self._late:
            self._late = False
            self._read(not self._paused)
        if self._leaving or self._transport is None:
            return
        if self._secure is None:
            self.connection.receive(data)
        else:
            self._opened(self._secure, data)
        self._flush()

    def eof_received(self) -> bool:
        self._gave_up()
        return False

    def pause_writing(self) -> None:
        self._paused = True
        self._since = self._loop.time()
        self._read(False)

    def resume_writing(self) -> None:
        self._paused = False
        self._since = self._loop.time()
        self._read(not self._late)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._gave_up()
        self._transport = None
        self.connection.lost()
        self._host.left(self)

    def _read(self, go_on: bool) -> None:
        """Whether more is taken from the socket: not while it is full itself, nor while a piece waits."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if go_on:
            transport.resume_reading()
        else:
            transport.pause_reading()

    # -- the server's side

    @property
    def unsent_bytes(self) -> int:
        """Answers that wait for this peer, in the event loop's buffer too."""
        buffered = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return self.connection.unsent_bytes + buffered

    def idle_for(self, now: float) -> float:
        """Seconds without a call; 0 as long as there is one."""
        connection = self.connection
        if connection.streams or connection.last_stream != self._last_stream:
            self._last_stream = connection.last_stream
            self._busy_at = now
        return now - self._busy_at

    def drain(self) -> None:
        """Send GOAWAY; whoever has not introduced itself yet gets it later, or is cut off by ``check``."""
        if self.connection.established:
            self.connection.drain()
            self._flush()

    def abort(self, reason: str = "") -> None:
        """Cut the connection; ``connection_lost`` follows. ``reason``: one of ``stats.CONNECTION_ENDS``."""
        if self._transport is None:
            return
        if reason:
            self._host.stats.connections_ended[reason] += 1
        self._transport.abort()

    def check(self, now: float) -> None:
        """Every so often: peers that do not introduce themselves, do not read, do not go, or do nothing."""
        limits = self._limits
        if self._leaving or self._paused or not self.connection.established:
            self._check_passing(now)
            return
        if now - self._looked_at >= limits.stall_seconds / CHECKS_PER_STALL:
            self._looked_at = now
            self.connection.look(now)
        if self._host.draining:
            self.drain()
        else:
            self._check_idle(self.idle_for(now))
        self._check_alive(now - self._since)
        self._flush()

    def _check_passing(self, now: float) -> None:
        """States that must pass soon."""
        limits, quiet = self._limits, now - self._since
        if self._paused:
            late, reason = quiet > limits.stall_seconds, "stalled"
        elif self._leaving:
            late, reason = quiet > limits.linger_seconds, ""
        else:
            # However busy: to send a byte now and then is no introduction.
            late, reason = now - self._begun > limits.handshake_seconds, "handshake"
            late = late or (self._host.draining and quiet > limits.linger_seconds)
        if late:
            self.abort(reason)

    def _check_idle(self, idle: float) -> None:
        if idle <= self._limits.idle_seconds:
            return
        if not self._dismissed:
            self._dismissed = True
            self._host.stats.connections_ended["idle"] += 1
        if idle > self._limits.idle_seconds + self._limits.stall_seconds:
            self.abort()
        else:
            self.drain()

    def _check_alive(self, quiet: float) -> None:
        """A peer that says nothing is asked, once; then it has the time-out to say anything at all."""
        limits = self._limits
        if quiet > limits.keepalive_seconds + limits.keepalive_timeout_seconds and self._probed:
            self.abort("keepalive")
        elif quiet > limits.keepalive_seconds and not self._probed:
            self._probed = True
            self.connection.probe()

    # -- TLS

    def _opened(self, secure: TlsSession, data: bytes) -> None:
        try:
            plain = secure.receive(data)
        except ProtocolError as error:
            # Nothing that waits can be sent any more, but the alert that says so.
            self._host.stats.connections_ended["tls"] += 1
            if secure.established:
                _log.debug("connection ended: %s", error)
            else:
                self._refused(str(error).removeprefix(PREFIX))
            self.connection.lost()
            return
        if plain:
            self.connection.receive(plain)
        if secure.ended:
            self.connection.lost()

    def _gave_up(self) -> None:
        """The peer went; in the middle of its handshake, perhaps."""
        secure = self._secure
        if secure is not None and secure.begun and not (secure.established or self._leaving):
            self._refused(HUNG_UP)

    def _refused(self, reason: str) -> None:
        if self._transport is None:
            return
        who, here = (self._transport.get_extra_info(side) for side in ("peername", "sockname"))
        refusals, now = self._host.stats.refusals, self._loop.time()
        if warning := refusals.refused(reason, who[0] if who else "somebody", now):
            _log.warning("port %s: %s", here[1] if here else "?", warning)

    # -- writing

    def _wake(self) -> None:
        """A call answered later; one flush for all that the same turn of the loop brings."""
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        transport = self._transport
        if transport is None or self._leaving:
            return
        if self._secure is None or self._secure.established:
            self._write(transport)
        if self._paused:
            self.connection.park(transport.get_write_buffer_size())
        elif self.connection.closing:
            self._leave(transport)
        elif self._secure is not None:
            self._write_sealed(self._secure, transport)

    def _write(self, transport: asyncio.Transport) -> None:
        """As much as the socket takes; what is left waits in the outbox."""
        while not self._paused:
            chunks = self.connection.take(_WRITE_BYTES)
            if not chunks:
                return
            if self._secure is None:
                transport.write(b"".join(chunks))
            else:
                self._secure.seal(b"".join(chunks))
                self._write_sealed(self._secure, transport)

    @staticmethod
    def _write_sealed(secure: TlsSession, transport: asyncio.Transport) -> None:
        if sealed := secure.take():
            transport.write(sealed)

    def _leave(self, transport: asyncio.Transport) -> None:
        """Say goodbye and let the peer hang up.

        To close with bytes of the peer unread would make the kernel send a TCP reset, and the peer lose
        answers it has not read yet.
        """
        self._leaving = True
        self._since = self._loop.time()
        if self._secure is not None:
            self._secure.finish()
            self._write_sealed(self._secure, transport)
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()


def _keep_alive(transport: asyncio.Transport, limits: Limits) -> None:
    """So that the system notices a host that has vanished, too: it goes on where our own PING cannot."""
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
