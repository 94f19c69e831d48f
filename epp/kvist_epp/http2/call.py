"""The interface between gRPC methods and their transport, without I/O.

Both servers (``server``, ``grpc_server``) drive the same `Call` objects, so that one service definition is
served twice and one data-plane suite tests both.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

UNKNOWN_PEER: Final = "an unknown address"
NO_TRACE_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
ENVOY_HEADER: Final = "x-envoy-internal"
"""Metadata that Envoy's own gRPC client gives each call, unless its configuration forbids it."""


class SplitMessage(NamedTuple):
    """A long gRPC message in two parts, so that its content need not be copied."""

    head: bytes
    content: memoryview

    def __bytes__(self) -> bytes:
        """Return the whole message."""
        return b"".join(self)


Message = bytes | SplitMessage
"""One serialised message."""


class Call(Protocol):
    """One gRPC call in progress: an ext_proc stream, an access-log stream, a health check or watch.

    The transport calls these from one thread, in order: any number of ``on_message``, then at most one of
    ``on_half_closed`` and ``on_cancelled``; ``on_cancelled`` may also follow ``on_half_closed``. No method is
    called once the call has closed its sink.
    """

    def on_message(self, data: bytes) -> None:
        """Process a whole gRPC message (without its five-byte prefix)."""

    def on_half_closed(self) -> None:
        """Note that the client ended its side; the call may still answer."""

    def on_cancelled(self) -> None:
        """Note that the stream was reset or the connection lost; further answers are dropped."""


class Sink(Protocol):
    """Takes a call's answers, at any later time from the loop's thread; they are ignored after the end."""

    @property
    def trace_headers(self) -> Mapping[str, str]:
        """Return ``traceparent`` and ``tracestate`` of the call's metadata, if it has them."""

    @property
    def from_envoy(self) -> bool:
        """Return whether an Envoy made the call, as its metadata says (`ENVOY_HEADER`)."""

    @property
    def peer(self) -> str:
        """Return the address of the client, for log lines."""

    def send(self, data: bytes, content: bytes | memoryview = b"") -> None:
        """Send one gRPC message, ``data`` and then ``content``, which is not copied and must not change."""

    def close(self, status: int = 0, message: str = "") -> None:
        """End the call with a grpc-status and, if not empty, a grpc-message."""


Method = Callable[[Sink], Call]
"""Starts a call; tables of methods are keyed by ``/package.Service/Method``."""


class Server(Protocol):
    """A listening gRPC server, of either transport."""

    port: int
    """Port that the server listens on; the one the system chose if 0 was requested."""

    async def drain(self, grace_seconds: float) -> None:
        """Accept no new connections or calls, let running calls end, then close; at most this long."""

    async def close(self) -> None:
        """Close at once: open calls are cancelled."""
