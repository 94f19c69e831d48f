"""Asking a publisher's ring, with patience and without insisting."""

import asyncio
from collections.abc import Callable

from kvist_epp.kvevents.intake import Intake
from kvist_epp.kvevents.ports import Hub, Line


class Replay:
    """The replay side of one publisher: a DEALER for each question, so that no late answer is mistaken."""

    def __init__(
        self,
        hub: Hub,
        address: str,
        intake: Intake,
        *,
        wake: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self.dead = False
        """The last question had no answer: the next is asked once only."""
        self._hub = hub
        self._address = address
        self._intake = intake
        self._wake = wake
        self._ended = ended
        self._asking = False
        self._start = 0
        self._attempts = 0
        self._heard = False
        self._line: Line | None = None
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, start: int) -> None:
        """Asks for every batch from ``start`` on."""
        self._asking = True
        self._start = start
        self._attempts = 0
        self._intake.stats.replays += 1
        self._hub.slots.enter(self, self._open)

    def receive(self) -> bool:
        """Reads one message; False when there is none."""
        frames = None if self._line is None else self._line.receive()
        if frames is None:
            return False
        self._heard, self.dead = True, False
        self._intake.ring(frames)
        self.settle()
        return True

    def settle(self) -> None:
        """Stops when the stream waits for no answer any more."""
        if self._asking and not self._intake.stream.replaying:
            self.stop()
            self._ended()

    def stop(self) -> None:
        """Closes the socket and lets the next publisher ask."""
        self._asking = False
        self._hang_up()
        self._hub.slots.leave(self)

    def _open(self) -> None:
        self._hang_up()
        self._heard = False
        self._line = self._hub.dealer(self._address, self._wake)
        self._line.send([b"", self._start.to_bytes(8, "big")])
        self._arm()
        self._wake()

    def _arm(self) -> None:
        patience = self._hub.limits.replay_timeout * 2**self._attempts
        self._timer = self._hub.loop.call_later(patience, self._timed_out)

    def _timed_out(self) -> None:
        if self._line is not None and (self._heard or self._line.pending()):
            self._heard = False
            self._arm()
            self._wake()
            return
        again = self._intake.stream.stalled()
        if again:
            self._intake.push(again)
            return
        self._attempts += 1
        if not self.dead and self._attempts < self._hub.limits.replay_attempts:
            self._open()
        else:
            self._give_up()

    def _give_up(self) -> None:
        self.dead = True
        self._intake.stats.replay_failures += 1
        self._intake.push(self._intake.stream.failed())
        self.settle()
        self._wake()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
