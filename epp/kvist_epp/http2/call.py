"""What a gRPC method and its transport say to each other: no transport, no I/O.

Both servers (``server.py``, ``grpc_server.py``) drive the same ``Call`` objects, so that one service
definition is served twice and one data-plane suite proves both.
"""

from collections.abc import Callable
from typing import Protocol


class Call(Protocol):
    """One gRPC call in progress: an ext_proc stream, an access-log stream, a health check or watch.

    The transport calls these from one thread, in order: any number of ``message``, then at most one of
    ``half_closed`` and ``cancelled``; ``cancelled`` may also follow ``half_closed``. Nothing is called
    once the call has closed its sink.
    """

    def message(self, data: bytes) -> None:
        """A whole gRPC message arrived (without its five-byte prefix)."""

    def half_closed(self) -> None:
        """The client ended its side; the call may still answer."""

    def cancelled(self) -> None:
        """The stream was reset or the connection lost; answers go nowhere from now on."""


class Sink(Protocol):
    """How a call answers. Usable at any later time from the loop's thread; ignored after the end."""

    def send(self, data: bytes) -> None:
        """Send one message."""

    def close(self, status: int = 0, message: str = "") -> None:
        """End the call with a grpc-status and, if not empty, a grpc-message."""


Method = Callable[[Sink], Call]
"""Starts a call; tables of methods are keyed by ``/package.Service/Method``."""


class Server(Protocol):
    """A listening gRPC server, whichever transport it is."""

    @property
    def port(self) -> int:
        """The port it listens on; the one the system chose if 0 was asked for."""

    async def drain(self, grace_seconds: float) -> None:
        """Take no new connections or calls, let running calls end, then close; at most this long."""

    async def close(self) -> None:
        """Close at once: open calls are cancelled."""
