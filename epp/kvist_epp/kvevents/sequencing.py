"""Sequencing of one publisher's batches: apply, hold, request a replay, or forget what was applied. Pure.

An engine numbers its batches from 0 and keeps the last ones in a replay buffer (``ZmqEventPublisher`` in
``vllm/distributed/kv_events.py``). A batch that is missed may contain a removal, and a block that is in the
index but no longer in the cache is a wrong pick for ever. Therefore no batch is applied beyond a gap until
the buffer has filled the gap, and if the buffer cannot, everything from before the gap is forgotten: any
*suffix* of an engine's history, applied to an empty index, contains only blocks that the engine really
caches.

Two layers. ``Cursor`` is an immutable position with one function for each kind of input (``judge_…``).
``EventSequencer`` carries the actions out: it owns the held messages and returns the steps that its caller
has to take, in their order.

Replays overlap by one: the last batch applied is requested again. If its ``mark`` (the first bytes of the
payload) differs, or the buffer no longer has it, the engine has restarted without our seeing its first
numbers. A live number that steps back, or a first one that the replay had already, raises a
``RestartSuspicion``, which the buffer settles in the same way: a restart (which no connection shows behind a
relay), a message that was overtaken on its way, or an overlap of replay and live stream.

A picker that starts beside others asks one of them for a snapshot before it asks the replay buffers: after
``wait_for_snapshot`` live messages are held until ``adopt_snapshot`` or ``skip_snapshot``. An adopted
snapshot is trusted only after the buffer, or a held message, has shown that the same engine continues.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

LONG_REPLAY = 256
"""Batches after which the end marker is not trusted: engines before 0.33 may have dropped the last ones."""
MARK_BYTES = 64
"""Leading bytes of a payload that identify it: a batch begins with its time stamp in microseconds, which
differs between two runs of an engine."""


class Action(Enum):
    """Action for the message, or for the end of a replay, that was just judged."""

    APPLY = "apply"
    IGNORE = "ignore"
    HOLD = "hold"
    """Keep the message until the replay in progress has ended."""
    REPLAY = "replay"
    """Request a replay from ``cursor.replay_from`` on; a live message is held."""
    RESTARTED = "restarted"
    """Forget everything, including held messages, and request a replay; a live message is held."""
    FIRST_AFTER_RESTART = "first after restart"
    """Forget everything, then apply this message: the engine's first one after a restart."""
    LOST = "lost"
    """Messages are lost for good: forget what was applied, then apply this one."""
    DONE = "done"
    """The replay has ended: judge the held messages."""


class RestartSuspicion(Enum):
    """Whether the engine is suspected to have restarted."""

    NONE = "none"
    RAISED = "raised"
    """A number stepped back during a replay, whose answer may be older than that."""
    ASKED = "asked"
    """The replay in progress settles it."""


class Cursor(NamedTuple):
    """Sequence position of one publisher; a tuple, since each message makes a new one."""

    next: int = 0
    """Sequence number to be applied next."""
    mark: Hashable = None
    """Mark of batch ``next - 1``; None before the first batch was applied."""
    last_live: int | None = None
    """Number of the last live message; it only grows while an engine runs."""
    trust_empty: bool = True
    """Whether an empty replay means a restart; False for a buffer empty twice that never had a batch."""
    proven: bool = False
    """Whether the replay buffer has ever answered with a batch."""
    replay_from: int | None = None
    """First number requested of the replay buffer; None while no replay is in progress."""
    next_at_request: int = 0
    """``next`` at the time of the request: beyond it, the replay has brought something new."""
    published_at_request: int = -1
    """Last number known to be published at the time of the request: up to it, the answer is final."""
    answered: bool = False
    """Whether this replay has brought any batch."""
    suspicion: RestartSuspicion = RestartSuspicion.NONE

    @property
    def empty(self) -> bool:
        """True if no batch was applied, so that nothing can be stale."""
        return self.mark is None

    @property
    def advanced(self) -> bool:
        """True if this replay brought something new: only then may another request bring more."""
        return self.next > self.next_at_request


def begin_replay(cursor: Cursor) -> Cursor:
    """Return the cursor after a replay was requested: on a connection, a gap, or to check an idle engine."""
    suspected = cursor.suspicion is not RestartSuspicion.NONE
    return cursor._replace(
        replay_from=0 if cursor.empty else cursor.next - 1,
        next_at_request=cursor.next,
        published_at_request=-1 if cursor.last_live is None else cursor.last_live,
        answered=False,
        suspicion=RestartSuspicion.ASKED if suspected else RestartSuspicion.NONE,
    )


def judge_live(cursor: Cursor, seq: int, mark: Hashable, *, has_replay: bool = True) -> tuple[Cursor, Action]:
    """Judge a live message; ``has_replay``: whether there is a replay buffer to ask.

    A number at or below the last live one means a restart, or that the message was overtaken: the buffer
    tells which. 0 is always a restart. One that is only below ``next`` is where replay and live stream
    overlap; of the first live message the buffer is asked.
    """
    if cursor.last_live is not None and seq <= cursor.last_live:
        return _judge_step_back(cursor, seq, mark, has_replay=has_replay)
    if seq == cursor.next and cursor.replay_from is None:  # nearly all; _replace costs several times as much
        return Cursor(seq + 1, mark, seq, *cursor[3:]), Action.APPLY
    first, cursor = cursor.last_live is None, cursor._replace(last_live=seq)
    if cursor.replay_from is not None:
        return cursor, Action.HOLD
    if seq < cursor.next:
        if not first or not has_replay or (seq, mark) == (cursor.next - 1, cursor.mark):
            return cursor, Action.IGNORE
        cursor = cursor._replace(suspicion=RestartSuspicion.RAISED)
    return begin_replay(cursor), Action.REPLAY


def _judge_step_back(cursor: Cursor, seq: int, mark: Hashable, *, has_replay: bool) -> tuple[Cursor, Action]:
    if seq == 0:
        return _reset(cursor)._replace(next=1, mark=mark, last_live=0), Action.FIRST_AFTER_RESTART
    if not has_replay or cursor.empty:
        return begin_replay(_reset(cursor)._replace(last_live=seq)), Action.RESTARTED
    if cursor.replay_from is None:
        return begin_replay(cursor._replace(suspicion=RestartSuspicion.RAISED)), Action.REPLAY
    return cursor._replace(suspicion=RestartSuspicion.RAISED), Action.HOLD


def judge_replayed(cursor: Cursor, seq: int, mark: Hashable) -> tuple[Cursor, Action]:
    """Judge a batch from the replay buffer.

    A gap after some progress is requested again (engines before 0.33 drop messages of a long replay). A gap
    at once means that the buffer has wrapped, or that the number was never sent: it is lost.
    """
    if cursor.replay_from is None or seq < cursor.next - 1:
        return cursor, Action.IGNORE
    cursor = cursor._replace(answered=True, trust_empty=True, proven=True)
    if seq == cursor.next - 1 and mark != cursor.mark:
        return begin_replay(_reset(cursor)), Action.RESTARTED
    if seq > cursor.next and cursor.advanced:
        return begin_replay(cursor), Action.REPLAY
    asked = cursor.suspicion is RestartSuspicion.ASKED
    if asked:  # settled by this batch; a suspicion raised since the request is not
        cursor = cursor._replace(suspicion=RestartSuspicion.NONE)
    if seq == cursor.next - 1:
        return cursor, Action.IGNORE
    if asked:  # the buffer has wrapped, so that nothing shows that this is the same run of the engine
        return _applied(cursor, seq, mark), Action.LOST
    return _applied(cursor, seq, mark), _apply_or_lost(cursor, seq)


def judge_replay_end(cursor: Cursor) -> tuple[Cursor, Action]:
    """Judge the end marker of a replay.

    A replay buffer holds at least the last batch published. If it has nothing from our last batch on, the
    engine has restarted and not come as far. After a long replay the buffer is asked once more whether that
    was all.
    """
    if cursor.replay_from is None:
        return cursor, Action.IGNORE
    asked = cursor.suspicion is RestartSuspicion.ASKED
    if (cursor.trust_empty or asked) and not cursor.answered and not cursor.empty:
        return begin_replay(_reset(cursor._replace(trust_empty=cursor.proven))), Action.RESTARTED
    if cursor.suspicion is RestartSuspicion.RAISED or cursor.next - cursor.next_at_request >= LONG_REPLAY:
        return begin_replay(cursor), Action.REPLAY
    return cursor._replace(replay_from=None), Action.DONE


def judge_held(cursor: Cursor, seq: int, mark: Hashable, *, has_replay: bool = True) -> tuple[Cursor, Action]:
    """Judge a message held during a replay; ``has_replay``: whether the buffer may be asked again."""
    if seq < cursor.next:
        return cursor, Action.IGNORE
    final = seq <= cursor.published_at_request and not cursor.advanced
    if seq > cursor.next and has_replay and not final:
        return begin_replay(cursor), Action.REPLAY
    return _applied(cursor, seq, mark), _apply_or_lost(cursor, seq)


def _reset(cursor: Cursor) -> Cursor:
    return Cursor(trust_empty=cursor.trust_empty, proven=cursor.proven)


def _applied(cursor: Cursor, seq: int, mark: Hashable) -> Cursor:
    return cursor._replace(next=seq + 1, mark=mark)


def _apply_or_lost(cursor: Cursor, seq: int) -> Action:
    return Action.APPLY if seq == cursor.next or cursor.empty else Action.LOST


@dataclass(frozen=True, slots=True)
class Apply:
    """Step: decode this payload and apply its events."""

    payload: bytes
    seq: int = field(default=-1, compare=False)
    """Sequence number: once it is applied, a snapshot of this publisher extends to it."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Step: remove everything that this publisher's events brought."""

    restarted: bool
    """True if the engine has restarted; False if messages were lost for good."""


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Step: request every batch from ``start`` on; a replay in progress is abandoned."""

    start: int


Step: TypeAlias = Apply | Forget | RequestReplay


class EventSequencer:
    """Sequencing of one publisher; every ``on_…`` method returns the steps to take, in order.

    ``hold_limit``: bytes of live messages kept during a replay. Beyond it the replay is abandoned, because
    bounded memory matters more than the publisher's older blocks.
    """

    def __init__(self, *, has_replay: bool = True, hold_limit: int = 64 << 20) -> None:
        self.cursor = Cursor()
        self.gaps = 0
        """Gaps seen in the numbers of live messages."""
        self.warm = False
        """True after the first replay has ended or failed."""
        self.suspect = False
        """True while messages are missing, or the engine has restarted, and no replay has settled it yet."""
        self.waiting_for_snapshot = False
        """True while another replica's snapshot may come; no replay is requested until then."""
        self._unproven_snapshot = False
        """True if a snapshot was adopted and nothing has shown yet that the same engine process continues."""
        self._has_replay = has_replay
        self._hold_limit = hold_limit
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0

    @property
    def replaying(self) -> bool:
        """True while an answer of the replay buffer is awaited."""
        return self.cursor.replay_from is not None

    @property
    def held(self) -> int:
        """Number of messages held until the replay ends."""
        return len(self._held)

    def wait_for_snapshot(self) -> None:
        """Hold live messages, since another replica may send a snapshot; called before anything else."""
        self.waiting_for_snapshot = True
        self.cursor = begin_replay(self.cursor)

    def skip_snapshot(self) -> list[Step]:
        """Continue without a snapshot."""
        self.waiting_for_snapshot = False
        self.cursor = self.cursor._replace(replay_from=None)
        return self.on_connected()

    def adopt_snapshot(self, following: int, mark: bytes) -> list[Step]:
        """Continue after a snapshot that extends to batch ``following - 1``, which has this ``mark``.

        Without a replay buffer that batch must be among those held, or the snapshot is forgotten. Call this
        or ``skip_snapshot`` only while ``waiting_for_snapshot``.
        """
        self.waiting_for_snapshot = False
        self._unproven_snapshot = not any(
            seq == following - 1 and payload[:MARK_BYTES] == mark for seq, payload in self._held
        )
        self.cursor = Cursor(next=following, mark=mark, last_live=self.cursor.last_live)
        return self.on_connected()

    def on_connected(self) -> list[Step]:
        """Handle a new connection (the first or a later one), or check an idle engine."""
        if self.waiting_for_snapshot:  # earlier messages say nothing of the engine behind the new connection
            self._drop_held()
        if self.replaying:
            return []
        self.cursor = begin_replay(self.cursor)
        return self._request_replay() if self._has_replay else self.on_replay_failed()

    def on_live(self, seq: int, payload: bytes) -> list[Step]:
        """Handle a message from the publisher's PUB socket."""
        last = self.cursor
        self.cursor, action = judge_live(last, seq, payload[:MARK_BYTES], has_replay=self._has_replay)
        if action is Action.APPLY:
            return [Apply(payload, seq)]
        if action is Action.IGNORE:
            return []
        steps = self._on_restart() if action in {Action.RESTARTED, Action.FIRST_AFTER_RESTART} else []
        if action is Action.FIRST_AFTER_RESTART:
            self.warm, self.suspect = True, False
            return [*steps, Apply(payload, seq)]
        self._held.append((seq, payload))
        self._held_bytes += len(payload)
        if action is Action.REPLAY:
            self.gaps += last.last_live is not None or seq > last.next
            self.suspect = True
        if not (self._has_replay or self.waiting_for_snapshot) or self._held_bytes > self._hold_limit:
            return [*steps, *self.on_replay_failed()]
        return steps if action is Action.HOLD else [*steps, *self._request_replay()]

    def on_replayed(self, seq: int, payload: bytes) -> list[Step]:
        """Handle a batch of a replay."""
        following = self.cursor.next
        self.cursor, action = judge_replayed(self.cursor, seq, payload[:MARK_BYTES])
        if action is Action.REPLAY:
            return self._request_replay()
        if action is Action.RESTARTED:
            return [*self._on_restart(), RequestReplay(0)]
        steps = _steps(action, seq, payload)
        if self._unproven_snapshot and seq >= following - 1:
            self._unproven_snapshot = False
            if seq >= following:  # not the snapshot's last batch, whose mark was equal: nothing proves it
                return [Forget(restarted=False), *steps]
        return steps

    def on_replay_end(self) -> list[Step]:
        """Handle the end marker of a replay."""
        self.cursor, action = judge_replay_end(self.cursor)
        if action is Action.RESTARTED:
            return [*self._on_restart(), RequestReplay(0)]
        if action is Action.REPLAY:
            return self._request_replay()
        return self._release(has_replay=True) if action is Action.DONE else []

    def on_replay_stalled(self) -> list[Step]:
        """Request the rest if the answer broke off after it had brought something; else return no step."""
        if not self.replaying or not self.cursor.advanced:
            return []
        self.cursor = begin_replay(self.cursor)
        return self._request_replay()

    def on_replay_failed(self) -> list[Step]:
        """Continue without a replay: apply what was held, and forget what lies before a gap."""
        forget: list[Step] = []
        if self.cursor.suspicion is not RestartSuspicion.NONE:  # held messages may be of two runs
            self._drop_held()
            self.cursor = _reset(self.cursor)
            forget = [Forget(restarted=True)]
        elif self._unproven_snapshot or self.waiting_for_snapshot:  # a snapshot unproven or incomplete
            self.cursor = Cursor(last_live=self.cursor.last_live)
            forget = [Forget(restarted=False)]
        self.waiting_for_snapshot = False
        self.cursor = self.cursor._replace(replay_from=None)
        return [*forget, *self._release(has_replay=False)]

    def _release(self, *, has_replay: bool) -> list[Step]:
        steps: list[Step] = []
        while self._held:
            seq, payload = self._held[0]
            self.cursor, action = judge_held(self.cursor, seq, payload[:MARK_BYTES], has_replay=has_replay)
            if action is Action.REPLAY:
                self.gaps += 1
                self.suspect = True
                return [*steps, *self._request_replay()]
            self._held.popleft()
            self._held_bytes -= len(payload)
            steps += _steps(action, seq, payload)
        self.warm = True
        self.suspect = self._unproven_snapshot = False
        return steps

    def _request_replay(self) -> list[Step]:
        return [RequestReplay(self.cursor.replay_from or 0)]

    def _on_restart(self) -> list[Step]:
        self._drop_held()
        self.suspect = True
        self.waiting_for_snapshot = self._unproven_snapshot = False
        return [Forget(restarted=True)]

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0


def _steps(action: Action, seq: int, payload: bytes) -> list[Step]:
    if action is Action.APPLY:
        return [Apply(payload, seq)]
    return [Forget(restarted=False), Apply(payload, seq)] if action is Action.LOST else []
