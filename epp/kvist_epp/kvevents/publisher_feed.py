"""One publisher's way from its sockets to the index: receive, sequence, decode, apply, request replays."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from kvist_epp.errors import EventError, traceback_without_text
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.io_context import EventSocket, IoContext
from kvist_epp.kvevents.observation import Observation
from kvist_epp.kvevents.sequencing import MARK_BYTES, Apply, EventSequencer, Forget, RequestReplay, Step

_log = logging.getLogger(__name__)

END_SEQ = (1 << 64) - 1
"""Sequence number of the end marker of a replay: -1 in 8 bytes."""


@dataclass(frozen=True, slots=True)
class FollowedPublisher:
    """Addresses of one publisher: one data-parallel rank of an endpoint."""

    endpoint: str
    """"namespace/name"."""
    name: str
    """Name of the publisher in the index, with its rank."""
    rank: int
    events: str
    """ZMQ address of the PUB socket; not used in bind mode."""
    replay: str | None
    """ZMQ address of the ROUTER socket; None: lost messages cannot be requested again."""
    topics: tuple[str, ...] = ()
    """Names that the endpoint may use in its topic, in bind mode: "ip:port", "name", "namespace/name"."""
    storage: str = ""
    """Name of the storage of KV blocks that its engine shares with others."""
    storage_tokens: int | None = None
    """Tokens that this storage can hold, where it is a server of LMCache; None: not known."""


class Position(NamedTuple):
    """Position up to which a publisher's batches are applied."""

    next: int
    """Number of the first batch that is not applied."""
    mark: bytes
    """First bytes of the last batch that is applied."""


@dataclass(frozen=True, slots=True)
class _Retry:
    """Step after a replay: apply the events in quarantine whose parents it brought."""


class PublisherFeed:
    """One publisher; a job of the scheduler."""

    def __init__(
        self,
        io: IoContext,
        publisher: FollowedPublisher,
        ingestor: Ingestor,
        *,
        observe: Callable[[Observation], None],
        on_applied: Callable[[], None],
    ) -> None:
        """``observe`` gets what events reveal about requests; ``on_applied`` is called after each turn."""
        self.endpoint = publisher.endpoint
        self.sequencer = EventSequencer(has_replay=publisher.replay is not None)
        self.stats = ingestor.stats(publisher.name)
        self.position: Position | None = None
        """Position of the last batch that was applied whole; None before the first one."""
        self.between_steps = True
        """True if no step is in progress, so that the index is as ``position`` says."""
        self.pauses = 0
        """Number of ``pause`` calls without their ``unpause``."""
        self._publisher = publisher
        self._io = io
        self._ingestor = ingestor
        self._observe = observe
        self._on_applied = on_applied
        self._steps: deque[Step | _Retry] = deque()
        self._batch: Iterator[Observation | None] = iter(())
        self._applying: Position | None = None
        self._replay = _Replay(io, publisher.replay or "", self)
        self._socket: EventSocket | None = None
        self._settled = self._closed = False
        self._reported: set[str] = set()
        """Kinds of bugs that were logged."""
        self._messages_at_check = 0
        self._timer: asyncio.TimerHandle | None = None

    def connect(self) -> None:
        """Subscribe; every handshake, the first and later ones, starts a replay."""
        self._socket = self._io.connect_subscriber(self._publisher.events, self.wake, self.on_connected)

    def close(self) -> None:
        """Close the sockets and stop the timers."""
        self._closed = True
        self._cancel_timer()
        self._replay.stop()
        self._io.scheduler.remove(self)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def wake(self) -> None:
        """Schedule a turn, since there may be work."""
        self._io.scheduler.add(self)

    def work(self, deadline: float) -> bool:
        """Apply and receive in turn, so that messages not applied yet wait in ZMQ's queue."""
        more = True
        while more and perf_counter() < deadline:
            more = self._apply_steps(deadline) or (not self.pauses and self._receive())
        self._on_applied()
        return more

    def pause(self) -> None:
        """Stop after the step in progress, so that nothing of the publisher changes.

        Each ``pause`` needs its ``unpause``.
        """
        self.pauses += 1
        self.wake()

    def unpause(self) -> None:
        """Continue after ``pause``."""
        self.pauses -= 1
        if not self._closed:
            self.wake()

    def adopt_snapshot(self, position: Position) -> None:
        """Continue from a snapshot of the publisher that was applied and extends to ``position``."""
        self._applying = self.position = position
        self._push(self.sequencer.adopt_snapshot(*position))
        self.wake()

    def skip_snapshot(self) -> None:
        """Continue without a snapshot."""
        self._push(self.sequencer.skip_snapshot())
        self.wake()

    def on_connected(self) -> None:
        """Request a replay, since the publisher (re)appeared and may be another run of the engine."""
        self._replay.failed = self._settled = False
        self._push(self.sequencer.on_connected())
        self.wake()

    def on_live(self, frames: list[bytes]) -> None:
        """Handle ``topic, seq, payload`` from the publisher's PUB socket."""
        stats = self.stats
        stats.messages += 1
        stats.last_message_at = self._io.loop.time()
        if len(frames) != 3 or len(frames[1]) != 8:
            stats.garbage += 1
        else:
            self._push(self.sequencer.on_live(int.from_bytes(frames[1], "big"), frames[2]))
        self._replay.stop_if_answered()

    def on_replayed(self, frames: list[bytes]) -> None:
        """Handle ``"", [topic,] seq, payload`` from the replay socket; older releases send no topic."""
        if len(frames) not in {3, 4} or len(frames[-2]) != 8:
            self.stats.garbage += 1
            return
        seq = int.from_bytes(frames[-2], "big")
        if seq != END_SEQ:
            self._push(self.sequencer.on_replayed(seq, frames[-1]))
            return
        self._push(self.sequencer.on_replay_end())
        if not self.sequencer.replaying:
            self._steps.append(_Retry())

    def on_replay_stalled(self) -> bool:
        """Request the rest of a replay that broke off; return False if it had brought nothing."""
        steps = self.sequencer.on_replay_stalled()
        self._push(steps)
        return bool(steps)

    def on_replay_failed(self) -> None:
        """Continue without the replay."""
        self.stats.replay_failures += 1
        self._push(self.sequencer.on_replay_failed())

    def on_replay_over(self) -> None:
        """Schedule the next check of the publisher: one soon, then at the interval of an idle publisher."""
        limits = self._io.limits
        delay = limits.check if self._settled else limits.settle
        self._settled = True
        self._messages_at_check = self.stats.messages
        self._cancel_timer()
        self._timer = self._io.loop.call_later(delay, self._check)

    def _check(self) -> None:
        """Request a replay unless messages came since, in which a gap would have shown.

        A replay buffer that has never answered is asked in any case.
        """
        active = self.stats.messages != self._messages_at_check
        if self._replay.failed or (active and self.sequencer.cursor.proven):
            self.on_replay_over()
            return
        self._push(self.sequencer.on_connected())
        self.wake()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _receive(self) -> bool:
        """Receive one message: of a replay as long as there are any, else a live one."""
        if self._replay.receive():
            return True
        frames = None if self._socket is None else self._socket.receive()
        if frames is not None:
            self.on_live(frames)
        return frames is not None

    def _push(self, steps: list[Step]) -> None:
        """Queue steps; replays are requested at once."""
        for step in steps:
            if isinstance(step, RequestReplay):
                self._replay.request(step.start)
            else:
                self._steps.append(step)
        stats, sequencer = self.stats, self.sequencer
        stats.gaps, stats.held, stats.suspect = sequencer.gaps, sequencer.held, sequencer.suspect

    def _apply_steps(self, deadline: float) -> bool:
        """Carry out steps until none is left (False) or until ``deadline`` (True)."""
        while True:
            for seen in self._batch:
                if seen is not None:
                    self._pass_on(seen)
                if perf_counter() >= deadline:
                    return True
            self.between_steps, self.position = True, self._applying
            if self.pauses:
                return False
            if not self._steps:
                self.stats.warm = self.sequencer.warm
                return False
            self._start_step(self._steps.popleft())

    def _start_step(self, step: Step | _Retry) -> None:
        name, ingestor = self._publisher.name, self._ingestor
        self.between_steps = False
        if isinstance(step, Apply):
            self._applying = Position(step.seq + 1, step.payload[:MARK_BYTES])
            self._batch = self._guarded(lambda: ingestor.apply_in_steps(name, ingestor.decode(step.payload)))
        elif isinstance(step, Forget):
            self._applying = None
            self.stats.restarts += step.restarted
            self._ingestor.forget(name)
        elif isinstance(step, _Retry):
            self._batch = self._guarded(lambda: ingestor.retry_quarantined(name))

    def _guarded(self, begin: Callable[[], Iterator[Observation | None]]) -> Iterator[Observation | None]:
        """Yield from a batch. One that cannot be read may have contained removals, and one that a bug stops
        is not applied whole: in both cases all blocks of the publisher are forgotten
        (``docs/decisions/0006``)."""
        try:
            yield from begin()
        except Exception as error:  # noqa: BLE001  the other publishers must not be affected
            if not isinstance(error, EventError):
                self._report("events of %s were not applied: %s", error)
            self.stats.garbage += 1
            self._ingestor.forget(self._publisher.name)

    def _pass_on(self, seen: Observation) -> None:
        """Pass on what an event reveals about a request; a bug there must not stop the events."""
        try:
            self._observe(seen)
        except Exception as error:  # noqa: BLE001  as above
            self._report("what events of %s say of requests was not used: %s", error)

    def _report(self, text: str, error: Exception) -> None:
        """Log a bug; one of each kind, since every message may meet it again."""
        if text not in self._reported:
            self._reported.add(text)
            _log.error(text, self._publisher.name, traceback_without_text(error))


class _Replay:
    """Replays of one publisher: a DEALER socket for each request, so that no late answer is misattributed."""

    def __init__(self, io: IoContext, address: str, feed: PublisherFeed) -> None:
        self.failed = False
        """True if the last request had no answer: the next one is sent only once."""
        self._io = io
        self._address = address
        self._feed = feed
        self._requested = False
        self._start = 0
        self._attempts = 0
        self._answered = False
        """True if a batch came since the time-out was set."""
        self._socket: EventSocket | None = None
        self._timer: asyncio.TimerHandle | None = None

    def request(self, start: int) -> None:
        """Request every batch from ``start`` on."""
        self._requested = True
        self._start = start
        self._attempts = 0
        self._feed.stats.replays += 1
        self._io.replay_semaphore.acquire(self, self._open)

    def receive(self) -> bool:
        """Receive one message; return False if there is none."""
        frames = None if self._socket is None else self._socket.receive()
        if frames is None:
            return False
        self._answered, self.failed = True, False
        self._feed.on_replayed(frames)
        self.stop_if_answered()
        return True

    def stop_if_answered(self) -> None:
        """Stop if the sequencer no longer waits for an answer."""
        if self._requested and not self._feed.sequencer.replaying:
            self.stop()
            self._feed.on_replay_over()

    def stop(self) -> None:
        """Close the socket and let the next publisher request its replay."""
        self._requested = False
        self._close_socket()
        self._io.replay_semaphore.release(self)

    def _open(self) -> None:
        self._close_socket()
        self._answered = False
        self._socket = self._io.connect_dealer(self._address, self._feed.wake)
        self._socket.send([b"", self._start.to_bytes(8, "big")])
        self._start_timer()
        self._feed.wake()

    def _start_timer(self) -> None:
        seconds = self._io.limits.replay_timeout * 2**self._attempts
        self._timer = self._io.loop.call_later(seconds, self._on_timeout)

    def _on_timeout(self) -> None:
        if self._socket is not None and (self._answered or self._socket.readable()):
            self._answered = False
            self._start_timer()
            self._feed.wake()
            return
        if self._feed.on_replay_stalled():
            return
        self._attempts += 1
        if not self.failed and self._attempts < self._io.limits.replay_attempts:
            self._open()
            return
        self.failed = True
        self._feed.on_replay_failed()
        self.stop_if_answered()
        self._feed.wake()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
