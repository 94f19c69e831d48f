"""One publisher: its line, its ``Intake``, and the timer that looks at it while it is idle."""

import asyncio
from collections.abc import Callable
from time import perf_counter

from kvist_epp.kvevents.followed import FollowedPublisher
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.intake import Intake, Position
from kvist_epp.kvevents.observation import Observation
from kvist_epp.kvevents.ports import Hub, Line
from kvist_epp.kvevents.replay import Replay
from kvist_epp.kvevents.stream import Stream


class Feed:
    """A job of the pump."""

    def __init__(
        self,
        hub: Hub,
        followed: FollowedPublisher,
        ingestor: Ingestor,
        observe: Callable[[Observation], None],
        learned: Callable[[], None],
    ) -> None:
        self._hub = hub
        self._learned = learned
        stream = Stream(has_ring=followed.replay is not None)
        self.intake = Intake(followed.source, ingestor, stream, observe=observe, ask=self._ask)
        self._replay = Replay(hub, followed.replay or "", self.intake, wake=self.wake, ended=self.replayed)
        self._line: Line | None = None
        self.endpoint = followed.endpoint
        self._settled = self._closed = False
        self._checked = 0
        self._timer: asyncio.TimerHandle | None = None

    def connect(self, address: str) -> None:
        """Subscribes; a handshake, the first or a later one, begins with a replay."""
        self._line = self._hub.subscribe(address, self.wake, self.begin)

    def wake(self) -> None:
        """There is work."""
        self._hub.pump.ready(self)

    def work(self, deadline: float) -> bool:
        """Learns and receives in turn, so that what is not learned yet waits in ZMQ's queue."""
        more = True
        while more and perf_counter() < deadline:
            more = self.intake.work(deadline) or (not self.intake.paused and self._receive())
        self._learned()
        return more

    def pause(self) -> None:
        """The batch at hand is learned to its end, then nothing more; each ``pause`` needs its ``go_on``."""
        self.intake.paused += 1
        self.wake()

    def go_on(self) -> None:
        """Continue after ``pause``."""
        self.intake.paused -= 1
        if not self._closed:
            self.wake()

    def adopt(self, position: Position) -> None:
        """A peer's snapshot of the publisher was learned, up to there."""
        self.intake.adopted(position)
        self.wake()

    def resume(self) -> None:
        """No peer has a snapshot of the publisher."""
        self.intake.push(self.intake.stream.resume())
        self.wake()

    def live(self, frames: list[bytes]) -> None:
        """A message of this publisher."""
        self.intake.live(frames, self._hub.loop.time())
        self._replay.settle()

    def begin(self) -> None:
        """The publisher (re)appeared: whatever we know is to be checked against its ring."""
        self._replay.dead = self._settled = False
        self.intake.push(self.intake.stream.connected())
        self.wake()

    def replayed(self) -> None:
        """A replay is over: one more look soon, then now and then."""
        limits = self._hub.limits
        delay = limits.check if self._settled else limits.settle
        self._settled = True
        self._checked = self.intake.stats.messages
        self._cancel_timer()
        self._timer = self._hub.loop.call_later(delay, self._check)

    def close(self) -> None:
        """Closes the sockets and the timers."""
        self._closed = True
        self._cancel_timer()
        self._replay.stop()
        self._hub.pump.drop(self)
        if self._line is not None:
            self._line.close()
            self._line = None

    def _ask(self, start: int) -> None:
        self._replay.ask(start)

    def _receive(self) -> bool:
        """One message: of a replay as long as there are any, else a live one."""
        if self._replay.receive():
            return True
        frames = None if self._line is None else self._line.receive()
        if frames is not None:
            self.live(frames)
        return frames is not None

    def _check(self) -> None:
        """One that spoke since needs no check, a gap would have shown; but a ring must show itself once."""
        spoke = self.intake.stats.messages != self._checked
        if self._replay.dead or (spoke and self.intake.stream.proven):
            self.replayed()
            return
        self.intake.push(self.intake.stream.connected())
        self.wake()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
