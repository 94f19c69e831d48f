"""One publisher's way from frames to the index, without its sockets: number, order, decode, learn.

``subscriber`` feeds it frames and gives it time; asked for a replay, it calls ``ask``.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from kvist_epp.engines.vllm.kv_events import decode
from kvist_epp.errors import EventError
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.observation import Observation
from kvist_epp.kvevents.stream import MARK_BYTES, Apply, Ask, Forget, Step, Stream

END_SEQ = (1 << 64) - 1
"""The number in the end marker of a replay: -1 in 8 bytes."""


@dataclass(frozen=True, slots=True)
class Retry:
    """After what a replay brought was learned: what waits for a parent may be explained now."""


class Position(NamedTuple):
    """Progress of a publisher's learning."""

    next: int
    """The first batch that is not."""
    mark: bytes
    """The beginning of the last one that is."""


class Intake:
    """Owns the publisher's ``Stream``; ``observe`` is told what events reveal about requests."""

    def __init__(
        self,
        source: str,
        ingestor: Ingestor,
        stream: Stream,
        *,
        observe: Callable[[Observation], None],
        ask: Callable[[int], None],
    ) -> None:
        self.source = source
        self.stream = stream
        self.stats = ingestor.stats(source)
        self._ingestor = ingestor
        self._observe = observe
        self._ask = ask
        self._steps: deque[Step | Retry] = deque()
        self._batch: Iterator[Observation | None] = iter(())
        self._applying: Position | None = None
        self._learned: Position | None = None
        self._between = True
        self.paused = 0
        """How many want it to stop before the next step, so that nothing of the publisher changes."""

    @property
    def between(self) -> bool:
        """Whether no step is under way: what is learned is what ``position`` says."""
        return self._between

    @property
    def position(self) -> Position | None:
        """Up to where the publisher is learned; None: nothing is."""
        return self._learned

    def live(self, frames: list[bytes], now: float) -> None:
        """``topic, seq, payload`` from the publisher's socket."""
        self.stats.messages += 1
        self.stats.heard_at = now
        if len(frames) != 3 or len(frames[1]) != 8:
            self.stats.garbage += 1
            return
        self.push(self.stream.live(int.from_bytes(frames[1], "big"), frames[2]))

    def ring(self, frames: list[bytes]) -> None:
        """``"", [topic,] seq, payload`` from the replay socket; the topic is absent in older releases."""
        if len(frames) not in {3, 4} or len(frames[-2]) != 8:
            self.stats.garbage += 1
            return
        seq = int.from_bytes(frames[-2], "big")
        if seq != END_SEQ:
            self.push(self.stream.ring(seq, frames[-1]))
            return
        self.push(self.stream.ring_ended())
        if not self.stream.replaying:
            self._steps.append(Retry())

    def push(self, steps: list[Step]) -> None:
        """Steps to carry out, after those that are waiting; a replay is asked for at once."""
        for step in steps:
            if isinstance(step, Ask):
                self._ask(step.start)
            else:
                self._steps.append(step)
        self._note()

    def work(self, deadline: float) -> bool:
        """Learns until nothing is left (False) or ``deadline``."""
        while True:
            for seen in self._batch:
                if seen is not None:
                    self._observe(seen)
                if perf_counter() >= deadline:
                    return True
            self._between, self._learned = True, self._applying
            if self.paused:
                return False
            if not self._steps:
                self.stats.warm = self.stream.warm
                return False
            self._begin(self._steps.popleft())

    def adopted(self, position: Position) -> None:
        """A peer's snapshot of the publisher was learned: it stands there now."""
        self._applying = self._learned = position
        self.push(self.stream.adopt(*position))

    def _begin(self, step: Step | Retry) -> None:
        self._between = False
        if isinstance(step, Apply):
            self._applying = Position(step.seq + 1, step.payload[:MARK_BYTES])
            self._apply(step.payload)
        elif isinstance(step, Forget):
            self._applying = None
            self.stats.restarts += step.restarted
            self._ingestor.forget(self.source)
        elif isinstance(step, Retry):
            self._batch = self._ingestor.retry(self.source)

    def _apply(self, payload: bytes) -> None:
        try:
            self._batch = self._ingestor.steps(self.source, decode(payload))
        except EventError:
            self.stats.garbage += 1
            self._ingestor.forget(self.source)  # it may have told of removals

    def _note(self) -> None:
        stats, stream = self.stats, self.stream
        stats.gaps, stats.held = stream.gaps, stream.held
        stats.suspect = stream.suspect
