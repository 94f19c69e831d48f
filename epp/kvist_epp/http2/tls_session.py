"""The server's side of TLS for one connection, sans I/O: sealed bytes in, plain bytes out, and back.

Not the event loop's own TLS: it cannot half-close (asyncio's was seen to cut off a peer that still sends),
and it tells of a connection only after its handshake, too late to bound how many there are and for how long.
"""

import ssl
from typing import Final

from kvist_epp.errors import ProtocolError
from kvist_epp.http2.client_hello import ClientHello
from kvist_epp.http2.tls import ALPN

_RECORD_BYTES: Final = 16 * 1024
"""Largest plaintext of one TLS record (RFC 8446 section 5.1): a read never gives more."""


PREFIX: Final = "TLS: "
"""How messages of its errors begin."""


class TlsSession:
    """TLS of one accepted connection. What ``take`` gives goes to the socket, after every other verb."""

    __slots__ = ("_hello", "_incoming", "_outgoing", "_tls", "begun", "ended", "established")

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._hello: ClientHello | None = ClientHello()
        self.begun = False
        """The peer has said something."""
        self.established = False
        """The handshake is over, and it is ``h2`` that follows."""
        self.ended = False
        """The peer said that it sends no more (``close_notify``)."""

    def receive(self, data: bytes) -> bytes:
        """The plaintext that ``data`` completes; raises ProtocolError when there is no going on.

        Then ``take`` has the alert that tells the peer.
        """
        if self._hello is not None:
            self._hello.receive(data)
        self._incoming.write(data)
        self.begun = True
        try:
            return self._opened() if self.established or self._shaken() else b""
        except ssl.SSLError as error:
            # The reason is OpenSSL's own word for it and quotes nothing of the peer's.
            raise ProtocolError(PREFIX + (error.reason or "failed").replace("_", " ").lower()) from error

    def seal(self, plain: bytes) -> None:
        """Encrypt; only once ``established``."""
        view = memoryview(plain)
        while view:
            view = view[self._tls.write(view) :]

    def finish(self) -> None:
        """Say that nothing more comes (``close_notify``); what the peer still sends is not to be read."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            return  # It asks for the peer's own farewell, or there never was a handshake.

    def take(self) -> bytes:
        """What is to be written now."""
        return self._outgoing.read()

    def _shaken(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        # RFC 9113 section 3.2: HTTP/2 over TLS is agreed by ALPN. Without a protocol in common OpenSSL goes
        # on without any. Who offers none at all speaks gRPC by prior knowledge or fails at the preface.
        if self._tls.selected_alpn_protocol() != ALPN and (self._hello is None or self._hello.offers):
            raise ProtocolError(f"{PREFIX}the client did not offer h2 by ALPN")
        self._hello = None
        self.established = True
        return True

    def _opened(self) -> bytes:
        pieces: list[bytes] = []
        try:
            while piece := self._tls.read(_RECORD_BYTES):
                pieces.append(piece)
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        return b"".join(pieces)
