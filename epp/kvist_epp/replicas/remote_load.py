"""Requests that the other replicas routed, added to this replica's load. Pure; clocks are parameters.

A replica that sends no update for a while is silent: its requests leave the load tracker, and scrapes count
them as untracked. When it is heard again it sends all of its open requests. A replica that said farewell
before it shut down is different: its requests stay, as orphans, until the gateway, a scrape or their age ends
them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.load.in_flight import Attempt, InFlightRequest
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.replicas.messages import LoadUpdate, RemoteRequest
from kvist_epp.replicas.prompt_digests import PrefixesInFlight, PromptDigests

SILENCE_SECONDS: Final = 3.0
"""Time without an update after which a replica is silent; replicas send at least one per second."""
FORGET_SECONDS: Final = 60.0
"""Time after which a replica that stays silent is removed."""
MAX_REQUESTS: Final = 100_000
"""Open requests kept of one replica: the load tracker's own bound."""
MAX_OUTBOX: Final = 10_000
"""Access-log entries kept for a replica that cannot be reached now; the oldest are dropped first."""


class ReplicaState(Enum):
    """State of another replica; the label of ``kvist_epp_peers``."""

    HEARD = "heard"
    SILENT = "silent"
    LEFT = "left"
    """The replica has announced its shutdown."""


@dataclass(slots=True, eq=False)
class RemoteReplica:
    """Another replica and its requests."""

    replica: str
    state: ReplicaState = ReplicaState.SILENT
    heard_at: float = 0.0
    """Time of its last update."""
    complete: bool = False
    """All requests that were open there have been received."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    """Attempts in the load tracker, by the number that the replica gave them."""
    unplaced: dict[int, tuple[RemoteRequest, float]] = field(default_factory=dict)
    """Requests on endpoints that are not known here (yet), with the time they were received."""
    seq: int = 0
    """Number of the last update applied."""
    unconfirmed: set[int] | None = None
    """While the full list is received: numbers known before that have not been listed; None otherwise."""


class RemoteLoad:
    """All other replicas by their id, and their requests."""

    def __init__(self, replica: str, tracker: LoadTracker, is_known: Callable[[str], bool]) -> None:
        """``replica``: id of this one. ``is_known`` says whether an endpoint key is known here."""
        self.replicas: dict[str, RemoteReplica] = {}
        self.overflows = 0
        """Requests that were dropped because a replica has too many."""
        self.prefixes = PrefixesInFlight()
        """Prompts that other replicas have sent to endpoints."""
        self._replica = replica
        self._tracker = tracker
        self._is_known = is_known
        self._outboxes: dict[str, deque[AccessLogEntry]] = {}
        self._digests: dict[Attempt, PromptDigests] = {}

    def __len__(self) -> int:
        """Return the number of requests of other replicas in the load tracker."""
        return sum(len(replica.attempts) for replica in self.replicas.values())

    def on_connected(self, replica: str, now: float) -> None:
        """Prepare for a new stream of updates of a replica, which begins with all of its requests."""
        found = self.replicas.setdefault(replica, RemoteReplica(replica, heard_at=now))
        found.seq, found.complete, found.unconfirmed = 0, False, None

    def apply(self, replica: str, update: LoadUpdate, now: float) -> None:
        """Apply an update. Raises ProtocolError if one before it is missing: a new stream must be opened."""
        found = self.replicas.get(replica, RemoteReplica(replica))
        begun = update.full_begins or found.complete or found.unconfirmed is not None
        if update.seq != found.seq + 1 or not begun:
            raise ProtocolError("updates of a replica are missing")
        found.seq, found.heard_at, found.state = update.seq, now, ReplicaState.HEARD
        if update.full_begins:
            found.complete, found.unconfirmed = False, {*found.attempts, *found.unplaced}
        for request in update.requests:
            self._add(found, request, now)
        for number in update.ended_numbers:
            self._end(found, number, now)
        if update.full_ends:
            for number in found.unconfirmed or ():
                self._end(found, number, now)
            found.complete, found.unconfirmed = True, None
        if update.leaving:
            found.state = ReplicaState.LEFT
            for entry in found.attempts.values():
                entry.request.orphan = True

    def poll(self, now: float) -> None:
        """Find silent replicas, expired requests and endpoints that have become known; called every
        second."""
        for replica in list(self.replicas.values()):
            if replica.state is ReplicaState.HEARD and now - replica.heard_at >= SILENCE_SECONDS:
                replica.state, replica.complete, replica.unconfirmed = ReplicaState.SILENT, False, None
                for number in [*replica.attempts, *replica.unplaced]:
                    self._end(replica, number, now, silent=True)
            self._expire(replica, now)
            for request, received_at in list(replica.unplaced.values()):
                if self._is_known(request.endpoint):
                    self._place(replica, request, received_at, now)
            silent = replica.state is not ReplicaState.HEARD and now - replica.heard_at >= FORGET_SECONDS
            if silent and not replica.attempts:
                del self.replicas[replica.replica]
                self._outboxes.pop(replica.replica, None)

    def forward(self, entry: AccessLogEntry, now: float) -> int:
        """Queue an access-log entry of a request that was not routed here for the replica that routed it.

        A session id that a picker made names its replica. A session id of a client is looked up among the
        requests received; if it is not found, the entry goes to all replicas. Returns the number of
        recipients.
        """
        session = entry.session or ""
        owners = self._owners(session)
        for owner in owners:
            self.outbox(owner).append(entry)
        self.end_orphan(session, now)
        return len(owners)

    def end_orphan(self, session: str, now: float) -> None:
        """End the request of a session if the replica that routed it has left."""
        for request in self._tracker.table.of_session(session):
            if request.orphan:
                self._end(self.replicas[request.origin], request.attempt.number, now)
                return

    def outbox(self, replica: str) -> deque[AccessLogEntry]:
        """Return the access-log entries queued for a replica: the same object until the replica is
        removed."""
        return self._outboxes.setdefault(replica, deque(maxlen=MAX_OUTBOX))

    def forget_prompt(self, attempt: Attempt) -> None:
        """Forget the announced prompt of an attempt: the index knows what its engine has kept of it."""
        digests = self._digests.pop(attempt, None)
        if digests is not None:
            self.prefixes.remove(attempt.endpoint, digests)

    def counts(self) -> dict[str, int]:
        """Return the number of replicas by state."""
        found = dict.fromkeys((state.value for state in ReplicaState), 0)
        for replica in self.replicas.values():
            found[replica.state.value] += 1
        return found

    def _owners(self, session: str) -> list[str]:
        present = {name for name, one in self.replicas.items() if one.state is not ReplicaState.LEFT}
        named = session.rpartition(".")[0]
        if named in present or named == self._replica:
            return [named] if named in present else []
        routed = {request.origin for request in self._tracker.table.of_session(session)}
        return sorted(routed & present or present)

    def _add(self, replica: RemoteReplica, request: RemoteRequest, now: float) -> None:
        if replica.unconfirmed is not None:
            replica.unconfirmed.discard(request.number)
        known = replica.attempts.get(request.number)
        if known is not None and known.open:
            return
        if len(replica.attempts) + len(replica.unplaced) >= MAX_REQUESTS:
            self.overflows += 1
        elif self._is_known(request.endpoint):
            self._place(replica, request, now, now)
        else:
            replica.unplaced[request.number] = request, now

    def _place(self, replica: RemoteReplica, remote: RemoteRequest, received_at: float, now: float) -> None:
        self._remove(replica, remote.number)
        request = InFlightRequest(
            remote.session,
            remote.total,
            origin=replica.replica,
            orphan=replica.state is ReplicaState.LEFT,
            content=None if remote.digests is None else remote.digests.content,
        )
        attempt = Attempt(
            request,
            self._tracker.load(remote.endpoint),
            uncached=float(remote.uncached),
            routed_at=received_at - remote.age,
            last_event_at=received_at - remote.idle,
            backlog=float(min(remote.remaining, remote.uncached)),
            number=remote.number,
            progressed=remote.progressed,
        )
        request.attempts.append(attempt)
        replica.attempts[remote.number] = attempt
        self._tracker.add_remote(attempt, now)
        if remote.digests is not None:
            self._digests[attempt] = remote.digests
            self.prefixes.add(remote.endpoint, remote.digests)

    def _end(self, replica: RemoteReplica, number: int, now: float, *, silent: bool = False) -> None:
        attempt = self._remove(replica, number)
        if attempt is not None:
            self._tracker.end_remote(attempt, now, untracked=silent)

    def _remove(self, replica: RemoteReplica, number: int) -> Attempt | None:
        """Remove an attempt from all tables but the load tracker's."""
        replica.unplaced.pop(number, None)
        attempt = replica.attempts.pop(number, None)
        if attempt is not None:
            self.forget_prompt(attempt)
        return attempt

    def _expire(self, replica: RemoteReplica, now: float) -> None:
        """End requests that the load tracker has dropped, or that are too old."""
        oldest = now - self._tracker.expire_seconds
        for number in [
            number for number, one in replica.attempts.items() if not one.open or one.last_event_at <= oldest
        ]:
            self._end(replica, number, now)
