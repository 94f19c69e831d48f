"""What feeds need of the outside: sockets, time, a pump. ``subscriber`` has the real one."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvist_epp.kvevents.cooperative_scheduler import Pump
from kvist_epp.kvevents.followed import SubscriberLimits
from kvist_epp.kvevents.replay_semaphore import Slots


class Line(Protocol):
    """One socket."""

    def receive(self) -> list[bytes] | None:
        """One message, as frames; None when there is none."""

    def pending(self) -> bool:
        """Whether there is something to read."""

    def send(self, frames: list[bytes]) -> None:
        """Never blocks."""

    def close(self) -> None:
        """Nothing is left of it."""


class Hub(Protocol):
    """Resources that all feeds share."""

    limits: SubscriberLimits
    loop: asyncio.AbstractEventLoop
    pump: Pump
    slots: Slots

    def subscribe(self, address: str, wake: Callable[[], None], handshake: Callable[[], None]) -> Line:
        """Follows a publisher; ``wake``: something to read; ``handshake``: a connection came up."""

    def dealer(self, address: str, wake: Callable[[], None]) -> Line:
        """A line to a replay socket."""

    def door(self, address: str, wake: Callable[[], None]) -> tuple[Line, str]:
        """A line that publishers connect to, and its address."""
