"""What a message's sequence number means: apply it, ask for a replay, or forget what we believed.

An engine numbers its batches from 0 and keeps the last ones in a ring (``ZmqEventPublisher`` in
``vllm/distributed/kv_events.py``). Missing one batch may mean missing a removal, and a block that is
believed in but gone is a wrong pick for ever; so nothing is applied past a hole until the ring has filled it,
and where it cannot, everything from before the hole is forgotten: any *suffix* of an engine's history,
applied to an empty index, credits only blocks that are really there.

Pure: a frozen ``Cursor`` and its transitions: ``advance`` (a live message), ``replayed`` (one from the ring),
``ended`` (the ring said "no more"), ``release`` (a live message that was held). ``stream.Stream`` obeys.

Replays overlap by one: the last batch applied is asked for again. If its ``mark`` (a fingerprint of the
payload) differs, or the ring no longer knows it, the engine has begun a new life without our seeing its first
numbers. A live number that steps back is a ``Doubt`` that the ring settles the same way: a new life, or a
message that was overtaken on its way.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum

LONG_REPLAY = 256
"""Batches after which an end marker is doubted: engines before 0.33 may have dropped the last batches."""


class Verdict(Enum):
    """Action for the message, or the end of a replay, that was just judged."""

    APPLY = "apply"
    IGNORE = "ignore"
    HOLD = "hold"
    """Keep it until the replay under way has ended."""
    ASK = "ask"
    """Ask the ring, from ``cursor.asked`` on; a live message is held."""
    RESTARTED = "restarted"
    """Forget everything, held messages too, and ask the ring as for ASK; a live message is held."""
    RENEWED = "renewed"
    """The engine's first message after a restart: forget everything, apply this."""
    LOST = "lost"
    """Messages are lost for good: forget what was applied, then apply this."""
    DONE = "done"
    """The replay has ended: release what was held."""


class Doubt(Enum):
    """Whether the engine may have begun a new life."""

    NONE = "none"
    RAISED = "raised"
    """A number stepped back during a replay, whose answer may be older than that."""
    ASKED = "asked"
    """The replay under way settles it."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Sequence position of one publisher (pod, rank)."""

    next: int = 0
    """Sequence number to be applied next."""
    mark: Hashable = None
    """Fingerprint of batch ``next - 1``; None while nothing was applied."""
    live: int | None = None
    """Number of the last live message; these only grow while an engine lives."""
    ring: bool = True
    """Whether empty answers mean anything; not of a ring that gave one twice and never a batch."""
    proven: bool = False
    """Whether the ring has ever answered with a batch."""
    asked: int | None = None
    """First number asked of the ring; None while no replay is under way."""
    base: int = 0
    """``next`` when the ring was asked: beyond it, the replay has brought something new."""
    known: int = -1
    """The last number known to be published when the ring was asked: up to it, the answer is final."""
    heard: bool = False
    """Whether this replay has brought any batch."""
    doubt: Doubt = Doubt.NONE

    @property
    def empty(self) -> bool:
        """Nothing was applied, so nothing can be stale."""
        return self.mark is None

    @property
    def advanced(self) -> bool:
        """Whether this replay brought anything new: only then can asking once more bring something else."""
        return self.next > self.base


def begin(cursor: Cursor) -> Cursor:
    """A replay is asked: on a connection, a reconnection, a gap, or to check an idle engine."""
    asked = 0 if cursor.empty else cursor.next - 1
    known = -1 if cursor.live is None else cursor.live
    doubt = Doubt.NONE if cursor.doubt is Doubt.NONE else Doubt.ASKED
    return replace(cursor, asked=asked, base=cursor.next, known=known, heard=False, doubt=doubt)


def stop(cursor: Cursor) -> Cursor:
    """No replay is to be had, or it has ended."""
    return replace(cursor, asked=None)


def advance(cursor: Cursor, seq: int, mark: Hashable, *, ring: bool = True) -> tuple[Cursor, Verdict]:
    """Judges a live message; ``ring``: whether there is one to ask.

    A number at or below the last live one is a restart or was overtaken: the ring knows; 0 is always a
    restart. One that is only below ``next`` is where a replay and the live stream overlap.
    """
    if cursor.live is not None and seq <= cursor.live:
        return _stepped_back(cursor, seq, mark, ring=ring)
    cursor = replace(cursor, live=seq)
    if cursor.asked is not None:
        return cursor, Verdict.HOLD
    if seq < cursor.next:
        return cursor, Verdict.IGNORE
    if seq > cursor.next:
        return begin(cursor), Verdict.ASK
    return _applied(cursor, seq, mark), Verdict.APPLY


def _stepped_back(cursor: Cursor, seq: int, mark: Hashable, *, ring: bool) -> tuple[Cursor, Verdict]:
    if seq == 0:
        return replace(_fresh(cursor), next=1, mark=mark, live=0), Verdict.RENEWED
    if not ring or cursor.empty:
        return begin(replace(_fresh(cursor), live=seq)), Verdict.RESTARTED
    if cursor.asked is None:
        return begin(replace(cursor, doubt=Doubt.RAISED)), Verdict.ASK
    return replace(cursor, doubt=Doubt.RAISED), Verdict.HOLD


def replayed(cursor: Cursor, seq: int, mark: Hashable) -> tuple[Cursor, Verdict]:
    """Judges a batch from the ring.

    A hole after some progress is asked for again (engines before 0.33 drop messages of a long replay). A hole
    at once means that the ring has wrapped, or that the number was never sent: it is lost.
    """
    if cursor.asked is None or seq < cursor.next - 1:
        return cursor, Verdict.IGNORE
    cursor = replace(cursor, heard=True, ring=True, proven=True)
    if seq == cursor.next - 1:
        return (_believed(cursor), Verdict.IGNORE) if mark == cursor.mark else _new_life(cursor)
    if seq > cursor.next and cursor.advanced:
        return begin(cursor), Verdict.ASK
    if cursor.doubt is Doubt.ASKED:  # the ring has wrapped: nothing shows that it is the same engine's
        return _applied(_believed(cursor), seq, mark), Verdict.LOST
    return _applied(cursor, seq, mark), _continues(cursor, seq)


def _believed(cursor: Cursor) -> Cursor:
    """The question of a replay is answered; a doubt that came after it is not."""
    return replace(cursor, doubt=Doubt.NONE) if cursor.doubt is Doubt.ASKED else cursor


def _new_life(cursor: Cursor) -> tuple[Cursor, Verdict]:
    return begin(_fresh(cursor)), Verdict.RESTARTED


def _fresh(cursor: Cursor) -> Cursor:
    """Nothing applied, nothing known but the ring."""
    return Cursor(ring=cursor.ring, proven=cursor.proven)


def ended(cursor: Cursor) -> tuple[Cursor, Verdict]:
    """Judges the end marker.

    A ring holds at least the batch published last. If it has nothing from our last batch on, the engine is a
    new one that has not come as far. After a long replay the ring is asked once more, whether that was all.
    """
    if cursor.asked is None:
        return cursor, Verdict.IGNORE
    doubted = cursor.doubt is Doubt.ASKED
    if (cursor.ring or doubted) and not cursor.heard and not cursor.empty:
        return _new_life(replace(cursor, ring=cursor.proven))
    if cursor.doubt is Doubt.RAISED or cursor.next - cursor.base >= LONG_REPLAY:
        return begin(cursor), Verdict.ASK
    return stop(cursor), Verdict.DONE


def release(cursor: Cursor, seq: int, mark: Hashable, *, ring: bool = True) -> tuple[Cursor, Verdict]:
    """Judges a message that was held during a replay; ``ring``: whether it may be asked once more."""
    if seq < cursor.next:
        return cursor, Verdict.IGNORE
    final = seq <= cursor.known and not cursor.advanced
    if seq > cursor.next and ring and not final:
        return begin(cursor), Verdict.ASK
    return _applied(cursor, seq, mark), _continues(cursor, seq)


def _continues(cursor: Cursor, seq: int) -> Verdict:
    return Verdict.APPLY if seq == cursor.next or cursor.empty else Verdict.LOST


def _applied(cursor: Cursor, seq: int, mark: Hashable) -> Cursor:
    return replace(cursor, next=seq + 1, mark=mark)
