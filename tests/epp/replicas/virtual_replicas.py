"""Replicas in virtual time: loads and the updates between them, over a network that loses some."""

from collections import deque
from dataclasses import dataclass, field
from itertools import count, permutations
from math import inf

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.load.in_flight import Attempt, InFlightRequest, RequestListener
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.replicas.load_server import UpdateStream
from kvist_epp.replicas.messages import decode_update
from kvist_epp.replicas.prompt_digests import STEP_BYTES, PromptDigests
from kvist_epp.replicas.remote_load import SILENCE_SECONDS, RemoteLoad

EXPIRE = 60.0
TICK = 0.1
PODS = ("ns/a", "ns/b")


def ended(session: str) -> AccessLogEntry:
    """Return an entry of the access log."""
    return AccessLogEntry(session, None, None, 200)


def digests_of(attempt: Attempt) -> PromptDigests | None:
    """Return digests for every second attempt; some of these prompts have common prefixes."""
    alike = b"%d" % (attempt.number % 3) * STEP_BYTES
    return PromptDigests.compute((None, None), alike * 3) if attempt.number % 2 else None


@dataclass(eq=False)
class Replica(RequestListener):
    """One picker as the other replicas see it; ``skew`` is the offset of its clock."""

    name: str
    skew: float
    tracker: LoadTracker = field(init=False)
    remote_load: RemoteLoad = field(init=False)
    changes: list[Attempt] = field(default_factory=list)
    turns: "count[int]" = field(default_factory=count)

    def __post_init__(self) -> None:
        self.tracker = LoadTracker(default_rate=1000.0, expire_seconds=EXPIRE, listeners=[self])
        self.remote_load = RemoteLoad(self.name, self.tracker, lambda key: key in PODS)

    def on_routed(self, attempt: Attempt) -> None:
        """Keep it for the followers."""
        self.changes.append(attempt)

    def on_ended(self, attempt: Attempt) -> None:
        """Keep it for the followers."""
        self.changes.append(attempt)

    def routed(self, pod: str, uncached: int, now: float, session: str = "") -> str:
        """Route a request to an endpoint; return its session."""
        session = session or f"{self.name}.{next(self.turns)}"
        self.tracker.add(InFlightRequest(session, uncached + 100), pod, uncached, now + self.skew)
        return session

    def logged(self, session: str, now: float) -> None:
        """Report the end of a request by an access-log entry."""
        if not self.end(session, now):
            self.remote_load.forward(ended(session), now + self.skew)

    def end(self, session: str, now: float) -> bool:
        """End the oldest local request of a session; return whether there was one."""
        request = self.tracker.table.find(session)
        if request is not None:
            self.tracker.end(request, now + self.skew)
        return request is not None

    def state(self, since: float = -inf) -> set[tuple[str, int, str, str]]:
        """Return the open requests, local and remote, with an event after ``since``."""
        attempts = [
            one
            for pod in PODS
            for one in self.tracker.load(pod).attempts
            if one.last_event_at - self.skew > since
        ]
        return {
            (one.request.origin or self.name, one.number, one.request.session, one.endpoint)
            for one in attempts
        }


@dataclass(eq=False)
class Connection:
    """A connection over which ``follower`` follows ``followed``."""

    follower: Replica
    followed: Replica
    outgoing: UpdateStream
    updates: deque[bytes] = field(default_factory=deque)
    acknowledged: deque[int] = field(default_factory=deque)
    quiet_since: float = 0.0


class World:
    """All replicas and connections; ``tick`` lets time pass."""

    def __init__(self, replicas: int) -> None:
        self.now = 1000.0
        self.names = count()
        self.replicas: list[Replica] = []
        self.connections: list[Connection] = []
        self.cut: set[frozenset[str]] = set()
        for _ in range(replicas):
            self.join()

    def join(self) -> Replica:
        """Start a replica that all others find; its clock differs from theirs."""
        new = Replica(f"r{next(self.names)}", skew=len(self.replicas) * 1e6)
        self.replicas.append(new)
        for one, other in permutations(self.replicas, 2):
            if new in (one, other):
                self.connect(one, other)
        return new

    def connect(self, follower: Replica, followed: Replica) -> None:
        """Open a connection; an older one ends."""
        self.connections = [t for t in self.connections if (t.follower, t.followed) != (follower, followed)]
        stream = UpdateStream(followed.tracker.own, followed.remote_load.outbox(follower.name), digests_of)
        follower.remote_load.on_connected(followed.name, self.now + follower.skew)
        self.connections.append(Connection(follower, followed, stream, quiet_since=self.now))

    def die(self, replica: Replica) -> None:
        """Kill a replica."""
        self.replicas.remove(replica)
        self.connections = [t for t in self.connections if replica not in (t.follower, t.followed)]

    def leave(self, replica: Replica) -> None:
        """Let a replica say farewell to those that it reaches, and stop it."""
        for connection in [t for t in self.connections if t.followed is replica and self.passes(t)]:
            self.collect()
            for _ in range(5):
                now = self.now + replica.skew
                self.send(connection, connection.outgoing.poll(now, leaving=True))
                self.receive(connection)
        self.die(replica)

    def passes(self, connection: Connection) -> bool:
        """Return whether the network delivers messages of a connection."""
        return frozenset((connection.follower.name, connection.followed.name)) not in self.cut

    def tick(self) -> None:
        """Let one gossip interval pass."""
        self.now += TICK
        self.collect()
        for connection in list(self.connections):
            self.send(connection, connection.outgoing.poll(self.now + connection.followed.skew))
            if self.passes(connection):
                self.receive(connection)
            if self.now - connection.quiet_since >= SILENCE_SECONDS:
                self.connect(connection.follower, connection.followed)
        for replica in self.replicas:
            replica.remote_load.poll(self.now + replica.skew)

    def collect(self) -> None:
        """Pass the changes since the last call to all connections."""
        for replica in self.replicas:
            changes, replica.changes = replica.changes, []
            for connection in self.connections:
                if connection.followed is replica:
                    connection.outgoing.add_changes(changes)

    def send(self, connection: Connection, update: bytes | None) -> None:
        """Put an update on the wire."""
        if update is not None:
            connection.updates.append(update)

    def receive(self, connection: Connection) -> None:
        """Deliver everything that is on the wire of a connection."""
        while connection.updates:
            update = decode_update(connection.updates.popleft())
            now = self.now + connection.follower.skew
            try:
                connection.follower.remote_load.apply(connection.followed.name, update, now)
            except ProtocolError:
                self.connect(connection.follower, connection.followed)
                return
            connection.quiet_since = self.now
            for entry in update.log_entries:
                if not connection.follower.end(entry.session or "", self.now):
                    connection.follower.remote_load.end_orphan(entry.session or "", now)
            connection.acknowledged.append(update.seq)
        while connection.acknowledged:
            connection.outgoing.on_ack(connection.acknowledged.popleft(), self.now + connection.followed.skew)

    def calm(self, seconds: float) -> None:
        """Remove all partitions and let time pass without other events."""
        self.cut.clear()
        for _ in range(round(seconds / TICK)):
            self.tick()
