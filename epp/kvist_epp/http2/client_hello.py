"""Whether a TLS client offers any protocol by ALPN, read off its first message.

OpenSSL tells what was agreed on. When nothing was it does not tell why: nothing was offered (gRPC clients
that leave ALPN out, such as Envoy's health check without ``alpn_protocols``), or nothing in common.
"""

from collections.abc import Iterator
from typing import Final

_MOST_BYTES: Final = 16 * 1024
"""Of a client's first bytes that are kept; messages with keys of post-quantum methods have 2,000."""
_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_VERSION_AND_RANDOM_BYTES: Final = 34
_ALPN: Final = b"\x00\x10"


class ClientHello:
    """The first message of one client, however it is cut."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen = b""

    def receive(self, data: bytes) -> None:
        """What the client sends until its handshake is over."""
        self._seen += data[: _MOST_BYTES - len(self._seen)]

    def __len__(self) -> int:
        """Bytes that it holds."""
        return len(self._seen)

    @property
    def offers(self) -> bool:
        """Whether it has the extension of ALPN (RFC 7301 section 3.1). True where that cannot be told."""
        try:
            return _ALPN in _extensions(_message(self._seen))
        except ValueError:
            return True


def _message(seen: bytes) -> bytes:
    """The body of a ClientHello, which may be spread over records (RFC 8446 section 5.1)."""
    joined = b"".join(_records(seen))
    if joined[:1] != bytes((_CLIENT_HELLO,)):
        raise ValueError
    return _vector(joined, 1, 3)[0]


def _records(seen: bytes) -> Iterator[bytes]:
    """Payloads of the handshake's records as far as they are there."""
    at = 0
    while at < len(seen) and seen[at] == _HANDSHAKE:
        length = int.from_bytes(seen[at + 3 : at + 5])
        yield seen[at + 5 : at + 5 + length]
        at += 5 + length


def _extensions(body: bytes) -> set[bytes]:
    """Types of its extensions (RFC 8446 section 4.1.2)."""
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
    """A vector behind its length of so many bytes, and where it ends. Raises ValueError when it is cut."""
    start = at + width
    end = start + int.from_bytes(data[at:start])
    if start > len(data) or end > len(data):
        raise ValueError
    return data[start:end], end
