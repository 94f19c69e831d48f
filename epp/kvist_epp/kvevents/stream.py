"""One publisher's messages in order: the fence's verdicts carried out, live messages held during a replay.

Pure: every call returns what the shell has to do, in that order. The shell (``subscriber``) owns sockets and
time; this owns the queue of held messages and the two facts others ask about: ``warm`` and ``suspect``.

A picker that starts beside others asks one of them before it asks rings: from ``wait`` on, live messages are
held, until ``adopt`` says up to where a peer's snapshot goes, or ``resume`` that there is none. What was
adopted is believed only when the ring, or a message that was held, has shown that the same engine goes on.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from kvist_epp.kvevents import sequencing as fence
from kvist_epp.kvevents.sequencing import Cursor, Doubt, Verdict

MARK_BYTES = 64
"""A batch begins with its time stamp in microseconds: this much of it tells two lives of an engine apart."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Give this payload to the ingestor."""

    payload: bytes
    seq: int = field(default=-1, compare=False)
    """Its number: after it is learned, a snapshot of this publisher goes up to there."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Everything this publisher ever said is void."""

    restarted: bool
    """The engine began anew; otherwise messages were lost for good."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the ring for every batch from ``start`` on; a replay under way is abandoned."""

    start: int


Step: TypeAlias = Apply | Forget | Ask


class Stream:
    """State of one publisher.

    ``hold_limit``: bytes of live messages kept while a replay runs; beyond it the replay is given up, because
    memory is worth more than a pod's old blocks.
    """

    def __init__(self, *, has_ring: bool = True, hold_limit: int = 64 << 20) -> None:
        self.cursor = Cursor()
        self.gaps = 0
        """Holes seen in the live numbers."""
        self.warm = False
        """The first replay is over, one way or the other."""
        self.suspect = False
        """Messages are missing, or the engine began anew, and the ring has not explained it yet."""
        self._has_ring = has_ring
        self._hold_limit = hold_limit
        self.waiting = False
        """A peer's snapshot may come; the ring is not asked before it has, or has not."""
        self._adopted = False
        """What was adopted is not proven yet."""
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0

    @property
    def replaying(self) -> bool:
        """Whether an answer of the ring is awaited."""
        return self.cursor.asked is not None

    @property
    def proven(self) -> bool:
        """Whether the ring has ever answered with a batch: from then on, an empty answer is a new life."""
        return self.cursor.proven

    @property
    def held(self) -> int:
        """Messages that wait for the replay to end."""
        return len(self._held)

    def wait(self) -> None:
        """From the start: a peer's snapshot may come."""
        self.waiting = True
        self.cursor = fence.begin(self.cursor)

    def resume(self) -> list[Step]:
        """No snapshot comes."""
        self.waiting = False
        self.cursor = fence.stop(self.cursor)
        return self.connected()

    def adopt(self, following: int, mark: bytes) -> list[Step]:
        """A snapshot that goes up to batch ``following - 1``, which begins with ``mark``, was learned.

        Without a ring, that batch must be among those held; else the snapshot is forgotten. Both this and
        ``resume`` are for a stream that is ``waiting``: any other has gone its own way.
        """
        self.waiting = False
        self._adopted = not self._has_held(following - 1, mark)
        self.cursor = Cursor(next=following, mark=mark, live=self.cursor.live)
        return self.connected()

    def connected(self) -> list[Step]:
        """A connection came up (the first or a later one), or an idle engine is to be checked."""
        if self.waiting:  # what came before says nothing of the engine behind the new connection
            self._drop_held()
        if self.replaying:
            return []
        self.cursor = fence.begin(self.cursor)
        return [Ask(self.cursor.asked or 0)] if self._has_ring else self.failed()

    def live(self, seq: int, payload: bytes) -> list[Step]:
        """A message from the publisher's socket."""
        mark = payload[:MARK_BYTES]
        self.cursor, verdict = fence.advance(self.cursor, seq, mark, ring=self._has_ring)
        if verdict is Verdict.APPLY:
            return [Apply(payload, seq)]
        if verdict is Verdict.IGNORE:
            return []
        if verdict is Verdict.RENEWED:
            return self._renewed(seq, payload)
        steps = self._begin_anew() if verdict is Verdict.RESTARTED else []
        self._hold(seq, payload)
        self._note(verdict)
        if not (self._has_ring or self.waiting) or self._held_bytes > self._hold_limit:
            return [*steps, *self.failed()]
        return steps if verdict is Verdict.HOLD else [*steps, Ask(self.cursor.asked or 0)]

    def ring(self, seq: int, payload: bytes) -> list[Step]:
        """A batch of a replay."""
        known = self.cursor.next
        self.cursor, verdict = fence.replayed(self.cursor, seq, payload[:MARK_BYTES])
        if verdict is Verdict.ASK:
            return [Ask(self.cursor.asked or 0)]
        if verdict is Verdict.RESTARTED:
            return [*self._begin_anew(), Ask(0)]
        return [*self._proven_by(seq, known), *_applying(verdict, seq, payload)]

    def ring_ended(self) -> list[Step]:
        """The end marker of a replay."""
        self.cursor, verdict = fence.ended(self.cursor)
        if verdict is Verdict.RESTARTED:
            return [*self._begin_anew(), Ask(0)]
        if verdict is Verdict.ASK:
            return [Ask(self.cursor.asked or 0)]
        return self._release(ring=True) if verdict is Verdict.DONE else []

    def stalled(self) -> list[Step]:
        """The answer broke off: what to ask next if it had brought anything; nothing when it had not."""
        if not self.replaying or not self.cursor.advanced:
            return []
        self.cursor = fence.begin(self.cursor)
        return [Ask(self.cursor.asked or 0)]

    def failed(self) -> list[Step]:
        """No replay is to be had: what was held is applied, and what lies before a hole forgotten."""
        forget: list[Step] = []
        if self.cursor.doubt is not Doubt.NONE:  # what was held may be of two lives
            self._drop_held()
            self.cursor = Cursor(ring=self.cursor.ring, proven=self.cursor.proven)
            forget = [Forget(restarted=True)]
        elif self._adopted or self.waiting:  # a snapshot that is not proven, or has come in part
            self.cursor = Cursor(live=self.cursor.live)
            forget = [Forget(restarted=False)]
        self.waiting = False
        self.cursor = fence.stop(self.cursor)
        return [*forget, *self._release(ring=False)]

    def _has_held(self, seq: int, mark: bytes) -> bool:
        return any(held == seq and payload[:MARK_BYTES] == mark for held, payload in self._held)

    def _proven_by(self, seq: int, following: int) -> list[Step]:
        """The first batch that tells of what was adopted: the last one of the snapshot itself, whose mark was
        found equal; or a later one, when the ring has wrapped, and then nothing shows that it is the same
        engine's."""
        if not self._adopted or seq < following - 1:
            return []
        self._adopted = False
        return [] if seq == following - 1 else [Forget(restarted=False)]

    def _release(self, *, ring: bool) -> list[Step]:
        steps: list[Step] = []
        while self._held:
            seq, payload = self._held[0]
            self.cursor, verdict = fence.release(self.cursor, seq, payload[:MARK_BYTES], ring=ring)
            if verdict is Verdict.ASK:
                self._note(verdict)
                return [*steps, Ask(self.cursor.asked or 0)]
            self._held.popleft()
            self._held_bytes -= len(payload)
            steps += _applying(verdict, seq, payload)
        self.warm = True
        self.suspect = self._adopted = False
        return steps

    def _renewed(self, seq: int, payload: bytes) -> list[Step]:
        self._drop_held()
        self.warm, self.suspect = True, False
        self.waiting = self._adopted = False
        return [Forget(restarted=True), Apply(payload, seq)]

    def _note(self, verdict: Verdict) -> None:
        self.gaps += verdict is Verdict.ASK
        self.suspect = self.suspect or verdict is Verdict.ASK

    def _begin_anew(self) -> list[Step]:
        self._drop_held()
        self.suspect = True
        self.waiting = self._adopted = False
        return [Forget(restarted=True)]

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _hold(self, seq: int, payload: bytes) -> None:
        self._held.append((seq, payload))
        self._held_bytes += len(payload)


def _applying(verdict: Verdict, seq: int, payload: bytes) -> list[Step]:
    if verdict is Verdict.APPLY:
        return [Apply(payload, seq)]
    return [Forget(restarted=False), Apply(payload, seq)] if verdict is Verdict.LOST else []
