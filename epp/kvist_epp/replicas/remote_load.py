"""Requests that the other replicas routed, entered in this replica's ledger. Pure; clocks are parameters.

A replica that sends no update for a while is silent: its requests leave the ledger, and scrapes count them as
untracked. When it is heard again it sends all of its open requests. A replica that said farewell before it
shut down is different: its requests stay, as orphans, until the gateway, a scrape or their age ends them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.load.endpoint_load import Request
from kvist_epp.load.ledger import Ledger
from kvist_epp.replicas.messages import LoadUpdate, RemoteRequest
from kvist_epp.replicas.prompt_digests import PrefixesInFlight, PromptDigests

SILENCE_SECONDS: Final = 3.0
"""Time without an update after which a replica is silent; replicas send at least one per second."""
FORGET_SECONDS: Final = 60.0
"""Time after which a replica that stays silent is removed."""
MAX_REQUESTS: Final = 100_000
"""Open requests kept of one replica: the ledger's own bound."""
MAX_OUTBOX: Final = 10_000
"""Access-log entries kept for a replica that cannot be reached now; the oldest are dropped first."""


class ReplicaState(Enum):
    """State of another replica; the label of ``kvist_epp_peers``."""

    HEARD = "heard"
    SILENT = "silent"
    LEFT = "left"
    """The replica said farewell."""


@dataclass(slots=True, eq=False)
class RemoteReplica:
    """Another replica and its requests."""

    replica: str
    state: ReplicaState = ReplicaState.SILENT
    heard_at: float = 0.0
    """Time of its last update."""
    complete: bool = False
    """All requests that were open there have been received."""
    requests: dict[int, Request] = field(default_factory=dict)
    """Requests in the ledger, by the number that the replica gave them."""
    unplaced: dict[int, tuple[RemoteRequest, float]] = field(default_factory=dict)
    """Requests on endpoints that are not known here (yet), with the time they were received."""
    seq: int = 0
    """Number of the last update applied."""
    unconfirmed: set[int] | None = None
    """While the full list is received: numbers known before that have not been listed; None otherwise."""


class RemoteLoad:
    """All other replicas by their id, and their requests."""

    def __init__(self, replica: str, ledger: Ledger, is_known: Callable[[str], bool]) -> None:
        """``replica``: id of this one. ``is_known`` says whether an endpoint key is known here."""
        self.replicas: dict[str, RemoteReplica] = {}
        self.overflows = 0
        """Requests that were dropped because a replica has too many."""
        self.prefixes = PrefixesInFlight()
        """Prompts that other replicas have sent to endpoints."""
        self._replica = replica
        self._ledger = ledger
        self._is_known = is_known
        self._outboxes: dict[str, deque[AccessLogEntry]] = {}
        self._sessions: dict[str, list[Request]] = {}
        self._digests: dict[Request, PromptDigests] = {}

    def __len__(self) -> int:
        """Return the number of requests of other replicas in the ledger."""
        return sum(len(replica.requests) for replica in self.replicas.values())

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
            found.complete, found.unconfirmed = False, {*found.requests, *found.unplaced}
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
            for entry in found.requests.values():
                entry.orphan = True

    def poll(self, now: float) -> None:
        """Find silent replicas, expired requests and endpoints that have become known; called every
        second."""
        for replica in list(self.replicas.values()):
            if replica.state is ReplicaState.HEARD and now - replica.heard_at >= SILENCE_SECONDS:
                replica.state, replica.complete, replica.unconfirmed = ReplicaState.SILENT, False, None
                for number in [*replica.requests, *replica.unplaced]:
                    self._end(replica, number, now, silent=True)
            self._expire(replica, now)
            for request, received_at in list(replica.unplaced.values()):
                if self._is_known(request.endpoint):
                    self._place(replica, request, received_at, now)
            silent = replica.state is not ReplicaState.HEARD and now - replica.heard_at >= FORGET_SECONDS
            if silent and not replica.requests:
                del self.replicas[replica.replica]
                self._outboxes.pop(replica.replica, None)

    def find(self, session: str, endpoint: str) -> Request | None:
        """Return the request of another replica that an event of this endpoint belongs to, or None."""
        requests = [r for r in self._sessions.get(session, ()) if r.load.key == endpoint and r.open]
        return next((r for r in requests if r.remaining > 0), requests[0] if requests else None)

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
        for request in self._sessions.get(session, ()):
            if request.orphan:
                self._end(self.replicas[request.origin], request.number, now)
                return

    def outbox(self, replica: str) -> deque[AccessLogEntry]:
        """Return the access-log entries queued for a replica: the same object until the replica is
        removed."""
        return self._outboxes.setdefault(replica, deque(maxlen=MAX_OUTBOX))

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
        routed = {request.origin for request in self._sessions.get(session, ())}
        return sorted(routed & present or present)

    def _add(self, replica: RemoteReplica, request: RemoteRequest, now: float) -> None:
        if replica.unconfirmed is not None:
            replica.unconfirmed.discard(request.number)
        known = replica.requests.get(request.number)
        if known is not None and known.open:
            return
        if len(replica.requests) + len(replica.unplaced) >= MAX_REQUESTS:
            self.overflows += 1
        elif self._is_known(request.endpoint):
            self._place(replica, request, now, now)
        else:
            replica.unplaced[request.number] = request, now

    def _place(self, replica: RemoteReplica, remote: RemoteRequest, received_at: float, now: float) -> None:
        """Enter a request in the ledger."""
        self._remove(replica, remote.number)
        request = Request(
            session=remote.session,
            load=self._ledger.load(remote.endpoint),
            uncached=float(remote.uncached),
            total=remote.total,
            routed_at=received_at - remote.age,
            heard_at=received_at - remote.idle,
            remaining=float(min(remote.remaining, remote.uncached)),
            progressed=remote.progressed,
            number=remote.number,
            origin=replica.replica,
            orphan=replica.state is ReplicaState.LEFT,
            content=None if remote.digests is None else remote.digests.content,
        )
        replica.requests[remote.number] = request
        self._sessions.setdefault(request.session, []).append(request)
        self._ledger.taken(request, now)
        if remote.digests is not None:
            self._digests[request] = remote.digests
            self.prefixes.add(remote.endpoint, remote.digests)

    def _end(self, replica: RemoteReplica, number: int, now: float, *, silent: bool = False) -> None:
        request = self._remove(replica, number)
        if request is not None:
            self._ledger.parted(request, now, silent=silent)

    def _remove(self, replica: RemoteReplica, number: int) -> Request | None:
        """Remove a request from all tables but the ledger."""
        replica.unplaced.pop(number, None)
        request = replica.requests.pop(number, None)
        if request is not None:
            requests = self._sessions[request.session]
            requests.remove(request)
            if not requests:
                del self._sessions[request.session]
            digests = self._digests.pop(request, None)
            if digests is not None:
                self.prefixes.remove(request.load.key, digests)
        return request

    def _expire(self, replica: RemoteReplica, now: float) -> None:
        """End requests that the ledger has dropped, or that are too old."""
        oldest = now - self._ledger.expire_seconds
        for number in [n for n, one in replica.requests.items() if not one.open or one.heard_at <= oldest]:
            self._end(replica, number, now)
