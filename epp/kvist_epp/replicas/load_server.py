"""Send this replica's load to the replicas that follow it. No transport, and clocks are parameters.

A follower first receives all open requests, then the changes. At most one update per follower is in flight,
so a follower that does not acknowledge costs no more memory than that. Changes are kept for it meanwhile, up
to a bound; beyond the bound it receives all open requests again.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.http2.call import Sink
from kvist_epp.load.in_flight import Attempt, RequestListener
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.replicas.messages import Handshake, decode_ack, encode_update
from kvist_epp.replicas.prompt_digests import ANNOUNCED_TOKENS, PromptDigests
from kvist_epp.replicas.remote_load import RemoteLoad
from kvist_epp.telemetry.counters import ReplicationStats

MAX_ROWS: Final = 1000
"""Requests, and log entries, in one update: about a millisecond to encode, and 100 KB."""
MAX_CHANGES: Final = 20_000
"""Changes kept for a follower that does not keep up; as many as a busy replica makes in half a minute."""
HEARTBEAT_SECONDS: Final = 1.0
"""Interval in which an update is sent even without a change."""
STALLED_SECONDS: Final = 10.0
"""Time without an acknowledgement after which a follower is disconnected; it reconnects if it is alive."""
MAX_FOLLOWERS: Final = 512
"""Maximum number of followers at once."""

_INVALID_ARGUMENT: Final = 3
_RESOURCE_EXHAUSTED: Final = 8
_ABORTED: Final = 10


class UpdateStream:
    """Updates for one follower, from its handshake on. Pure."""

    def __init__(
        self,
        local_attempts: Callable[[], list[Attempt]],
        outbox: deque[AccessLogEntry],
        digests_of: Callable[[Attempt], PromptDigests | None] = lambda _attempt: None,
    ) -> None:
        """``local_attempts`` returns what this replica has routed and has not ended. ``outbox`` holds
        access-log entries of the follower's requests and is consumed. ``digests_of`` returns the digests to
        announce of a request."""
        self.seq = 0
        """Number of the last update."""
        self.round_trip: float | None = None
        """Seconds between the last acknowledged update and its acknowledgement."""
        self.farewell_sent = False
        """The last update said that this replica leaves; none follows."""
        self._acknowledged = 0
        self._sent_at = 0.0
        self._local_attempts = local_attempts
        self._outbox = outbox
        self._digests_of = digests_of
        self._changes: deque[Attempt] = deque()
        self._full: list[Attempt] = []
        self._full_begins = self._full_ends = False
        self._begin_full()

    @property
    def in_flight(self) -> bool:
        """Whether an update is not acknowledged yet."""
        return self._acknowledged < self.seq

    @property
    def behind(self) -> bool:
        """Whether more is pending than one update takes, so that the next one need not wait for its time."""
        return bool(self._full) or len(self._changes) > MAX_ROWS or len(self._outbox) > MAX_ROWS

    def waiting_seconds(self, now: float) -> float:
        """Return for how long the update in flight has waited for its acknowledgement; 0 if there is none."""
        return now - self._sent_at if self.in_flight else 0.0

    def add_changes(self, requests: Iterable[Attempt]) -> None:
        """Add requests of this replica that were routed or have ended."""
        self._changes.extend(requests)
        if len(self._changes) > MAX_CHANGES:
            self._begin_full()

    def on_ack(self, seq: int, now: float) -> None:
        """Handle an acknowledgement. Raises ProtocolError for an update that is not in flight."""
        if seq != self.seq or not self.in_flight:
            raise ProtocolError("a replica acknowledged an update that was not sent to it")
        self._acknowledged = seq
        self.round_trip = now - self._sent_at

    def poll(self, now: float, *, handshake: Handshake | None = None, leaving: bool = False) -> bytes | None:
        """Return the next update, or None if none is due or one is in flight.

        ``leaving``: this replica shuts down; the update that has no successor says so.
        """
        if self.in_flight or self.farewell_sent:
            return None
        if self._full_begins or self._full_ends:
            rows, self._full = self._full[:MAX_ROWS], self._full[MAX_ROWS:]
            return self._encode(now, rows, handshake)
        if not (self._changes or self._outbox or leaving or now - self._sent_at >= HEARTBEAT_SECONDS):
            return None
        changed = [self._changes.popleft() for _ in range(min(len(self._changes), MAX_ROWS))]
        self.farewell_sent = leaving and not self._changes and len(self._outbox) <= MAX_ROWS
        return self._encode(now, list(dict.fromkeys(changed)), handshake, leaving=self.farewell_sent)

    def _begin_full(self) -> None:
        self._full = self._local_attempts()
        self._full_begins = self._full_ends = True
        self._changes.clear()

    def _encode(
        self, now: float, rows: list[Attempt], handshake: Handshake | None, *, leaving: bool = False
    ) -> bytes:
        full = self._full_begins, self._full_ends and not self._full
        self._full_begins, self._full_ends = False, self._full_ends and not full[1]
        self.seq += 1
        self._sent_at = now
        open_rows = [row for row in rows if row.open]
        for load in {row.load for row in open_rows}:
            load.drain(now)
        # The first update takes no entries: a follower that finds that it already follows this replica at
        # another address ignores it.
        entries = min(len(self._outbox), MAX_ROWS if self.seq > 1 else 0)
        return encode_update(
            self.seq,
            now,
            open_rows,
            handshake=handshake,
            full=full,
            ended_numbers=[row.number for row in rows if not row.open],
            log_entries=[self._outbox.popleft() for _ in range(entries)],
            leaving=leaving,
            digests_of=self._digests_of,
        )


@dataclass(slots=True, eq=False)
class LoadServer(RequestListener):
    """Server side of the load exchange: sends each follower its updates."""

    handshake: Callable[[], Handshake]
    tracker: LoadTracker
    remote_load: RemoteLoad
    stats: ReplicationStats
    clock: Callable[[], float]
    digests: dict[Attempt, PromptDigests] = field(default_factory=dict)
    """Digests of open requests."""
    changes: list[Attempt] = field(default_factory=list)
    """Attempts that were routed or have ended since the last tick."""
    followers: "dict[str, FollowerCall]" = field(default_factory=dict)
    """Calls by replica id; of two calls of one replica the newer one counts."""
    unconfirmed: "set[FollowerCall]" = field(default_factory=set)
    """Calls without an acknowledgement yet. A follower that already follows this replica at another address
    never sends one."""

    def on_routed(self, attempt: Attempt) -> None:
        """Add the attempt to the next update."""
        self.changes.append(attempt)

    def on_moved(self, old: Attempt, new: Attempt) -> None:
        """Add both attempts to the next update, since followers know attempts by their numbers."""
        self.changes += (old, new)

    def on_ended(self, attempt: Attempt) -> None:
        """Add the end of the attempt to the next update."""
        self.changes.append(attempt)

    def start(self, sink: Sink) -> "FollowerCall":
        """Start a call of the ``Follow`` method."""
        return FollowerCall(self, sink)

    def tick(self, *, leaving: bool = False) -> None:
        """Send what has changed to each follower that is ready for it; called every gossip interval."""
        changes, self.changes = self.changes, []
        for attempt in changes:
            if not attempt.open:
                self.digests.pop(attempt, None)
            elif (digests := self._digests_of(attempt)) is not None:
                self.digests[attempt] = digests
        now = self.clock()
        for call in [*self.followers.values(), *self.unconfirmed]:
            call.updates.add_changes(changes)
            if call.updates.waiting_seconds(now) >= STALLED_SECONDS:
                call.end(_ABORTED, "no update was acknowledged for too long")
            else:
                call.send_due(now, leaving=leaving)

    def _digests_of(self, attempt: Attempt) -> PromptDigests | None:
        """Digests of a prompt that is mostly new to its endpoint; the load tracker stores them, too."""
        request = attempt.request
        if attempt.uncached < ANNOUNCED_TOKENS or request.prompt is None:
            return None
        digests = PromptDigests.compute(request.root, request.prompt)
        self.tracker.set_content(attempt, digests.content)
        return digests

    @property
    def farewell_complete(self) -> bool:
        """Whether every follower has acknowledged that this replica leaves."""
        return all(c.updates.farewell_sent and not c.updates.in_flight for c in self.followers.values())

    def lag(self) -> float:
        """Return the delay of the slowest follower in seconds: its last round trip or its present wait."""
        now = self.clock()
        updates = [call.updates for call in self.followers.values()]
        lags = [max(one.round_trip or 0.0, one.waiting_seconds(now)) for one in updates]
        return max(lags, default=0.0)


class FollowerCall:
    """One follower: a ``Call`` of the ``Follow`` method."""

    __slots__ = ("_replica", "_server", "_sink", "updates")

    updates: UpdateStream

    def __init__(self, server: LoadServer, sink: Sink) -> None:
        self._server = server
        self._sink = sink
        self._replica = ""

    def on_message(self, data: bytes) -> None:
        """Handle the handshake, then acknowledgements."""
        try:
            handshake, seq = decode_ack(data)
            if self._replica:
                self._on_ack(seq)
            elif handshake is None:
                self.end(_INVALID_ARGUMENT, "a follower sent no handshake")
            else:
                self._on_handshake(handshake)
        except ProtocolError as error:
            self.end(_INVALID_ARGUMENT, str(error))

    def on_half_closed(self) -> None:
        """Close the call, since the follower has closed its side."""
        self.end()

    def on_cancelled(self) -> None:
        """Remove the follower."""
        self._remove()

    def end(self, status: int = 0, reason: str = "") -> None:
        """Remove the follower and close its call with a gRPC status."""
        self._remove()
        self._sink.close(status, reason)

    def send_due(self, now: float, *, handshake: Handshake | None = None, leaving: bool = False) -> None:
        """Send the next update, if one is due."""
        update = self.updates.poll(now, handshake=handshake, leaving=leaving)
        if update is not None:
            self._server.stats.on_sent(len(update))
            self._sink.send(update)

    def _on_handshake(self, handshake: Handshake) -> None:
        server, own = self._server, self._server.handshake()
        if len(server.followers) + len(server.unconfirmed) >= MAX_FOLLOWERS:
            self.end(_RESOURCE_EXHAUSTED, "too many followers")
            return
        self._replica = handshake.replica
        if handshake.replica == own.replica:  # this replica dialled itself and will see its own id
            self.updates = UpdateStream(list, deque())
        else:
            outbox = server.remote_load.outbox(handshake.replica)
            self.updates = UpdateStream(server.tracker.own, outbox, server.digests.get)
            server.unconfirmed.add(self)
        self.send_due(server.clock(), handshake=own)

    def _on_ack(self, seq: int) -> None:
        server, now = self._server, self._server.clock()
        self.updates.on_ack(seq, now)
        if self in server.unconfirmed:
            server.unconfirmed.discard(self)
            previous = server.followers.get(self._replica)
            if previous is not None:
                previous.end(_ABORTED, "replaced by a newer call of the same replica")
            server.followers[self._replica] = self
        if self.updates.behind:
            self.send_due(now)

    def _remove(self) -> None:
        self._server.unconfirmed.discard(self)
        if self._server.followers.get(self._replica) is self:
            del self._server.followers[self._replica]
