"""The server's side of TLS for one connection, without I/O: encrypted bytes in, plain bytes out, and back.

The event loop's own TLS is not used: it cannot half-close (asyncio's was observed to cut off a peer that
still sends), and it reports a connection only after its handshake, too late to bound how many there are and
for how long.
"""

import ssl
from collections.abc import Iterator
from typing import Final

from kvist_epp.errors import ProtocolError
from kvist_epp.http2.tls import ALPN

_RECORD_BYTES: Final = 16 * 1024
"""Largest plaintext of one TLS record (RFC 8446 section 5.1): a read never returns more."""


PREFIX: Final = "TLS: "
"""Prefix of the messages of its errors."""

_MAX_HELLO_BYTES: Final = 16 * 1024
"""First bytes of a client that are kept; a ClientHello with keys of post-quantum methods has 2,000."""
_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_VERSION_AND_RANDOM_BYTES: Final = 34
_ALPN_EXTENSION: Final = b"\x00\x10"


class TlsSession:
    """TLS of one accepted connection. After every other call the bytes of `take` go to the socket."""

    __slots__ = ("_hello", "_incoming", "_outgoing", "_tls", "begun", "ended", "established")

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._hello: ClientHello | None = ClientHello()
        self.begun = False
        """True once the peer has sent a byte."""
        self.established = False
        """True once the handshake is over, with ``h2`` agreed."""
        self.ended = False
        """True once the peer announced that it sends no more (``close_notify``)."""

    def receive(self, data: bytes) -> bytes:
        """Return the plaintext that ``data`` completes; raises ProtocolError if the session failed.

        Then `take` has the alert for the peer.
        """
        if self._hello is not None:
            self._hello.receive(data)
        self._incoming.write(data)
        self.begun = True
        try:
            return self._read() if self.established or self._handshake() else b""
        except ssl.SSLError as error:
            # The reason is OpenSSL's own and quotes no input of the peer.
            raise ProtocolError(PREFIX + (error.reason or "failed").replace("_", " ").lower()) from error

    def encrypt(self, plain: bytes) -> None:
        """Encrypt bytes to send; only once ``established``."""
        view = memoryview(plain)
        while view:
            view = view[self._tls.write(view) :]

    def finish(self) -> None:
        """Announce that no more is sent (``close_notify``); further bytes of the peer must not be read."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            return  # OpenSSL waits for the peer's close_notify, or there never was a handshake.

    def take(self) -> bytes:
        """Return the encrypted bytes to write now."""
        return self._outgoing.read()

    def _handshake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        # RFC 9113 section 3.2: HTTP/2 over TLS is agreed by ALPN. Without a common protocol OpenSSL continues
        # without any. A client that offers none speaks gRPC by prior knowledge or fails at the preface.
        if self._tls.selected_alpn_protocol() != ALPN and (self._hello is None or self._hello.offers_alpn):
            raise ProtocolError(f"{PREFIX}the client did not offer h2 by ALPN")
        self._hello = None
        self.established = True
        return True

    def _read(self) -> bytes:
        pieces: list[bytes] = []
        try:
            while piece := self._tls.read(_RECORD_BYTES):
                pieces.append(piece)
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        return b"".join(pieces)


class ClientHello:
    """The first message of a TLS client, however it is split, read for the protocols offered by ALPN.

    OpenSSL reports the protocol agreed on. If there is none it does not report whether the client offered no
    protocol at all (gRPC clients without ALPN, such as Envoy's health check without ``alpn_protocols``), or
    none in common.
    """

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen = b""

    def receive(self, data: bytes) -> None:
        """Add bytes that the client sends until its handshake is over."""
        self._seen += data[: _MAX_HELLO_BYTES - len(self._seen)]

    def __len__(self) -> int:
        """Return the number of bytes held."""
        return len(self._seen)

    @property
    def offers_alpn(self) -> bool:
        """Return whether it has the ALPN extension (RFC 7301 section 3.1); true if it cannot be parsed."""
        try:
            return _ALPN_EXTENSION in _extensions(_message(self._seen))
        except ValueError:
            return True


def _message(seen: bytes) -> bytes:
    """Return the body of a ClientHello, which may be spread over records (RFC 8446 section 5.1)."""
    joined = b"".join(_records(seen))
    if joined[:1] != bytes((_CLIENT_HELLO,)):
        raise ValueError
    return _vector(joined, 1, 3)[0]


def _records(seen: bytes) -> Iterator[bytes]:
    """Yield the payloads of the handshake's records as far as they are complete or begun."""
    at = 0
    while at < len(seen) and seen[at] == _HANDSHAKE:
        length = int.from_bytes(seen[at + 3 : at + 5])
        yield seen[at + 5 : at + 5 + length]
        at += 5 + length


def _extensions(body: bytes) -> set[bytes]:
    """Return the types of the extensions (RFC 8446 section 4.1.2)."""
    at = _VERSION_AND_RANDOM_BYTES
    for width in (1, 2, 1):  # session id, cipher suites, compression
        _, at = _vector(body, at, width)
    extensions = _vector(body, at, 2)[0] if at < len(body) else b""
    found, at = set(), 0
    while at < len(extensions):
        found.add(extensions[at : at + 2])
        _, at = _vector(extensions, at + 2, 2)
    return found


def _vector(data: bytes, at: int, width: int) -> tuple[bytes, int]:
    """Return a vector that follows its length of ``width`` bytes, and its end. Raises ValueError if cut."""
    start = at + width
    end = start + int.from_bytes(data[at:start])
    if start > len(data) or end > len(data):
        raise ValueError
    return data[start:end], end
