"""Replicas in virtual time: ledgers, books and the updates between them, over a network that loses some."""

from collections import deque
from dataclasses import dataclass, field
from itertools import count, permutations
from math import inf

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.load.endpoint_load import Request
from kvist_epp.load.ledger import Ledger
from kvist_epp.replicas.load_server import UpdateStream
from kvist_epp.replicas.messages import decode_update
from kvist_epp.replicas.prompt_digests import STEP_BYTES, PromptDigests
from kvist_epp.replicas.remote_load import SILENCE_SECONDS, RemoteLoad

EXPIRE = 60.0
TICK = 0.1
PODS = ("ns/a", "ns/b")


def ended(session: str) -> AccessLogEntry:
    """An entry of the access log."""
    return AccessLogEntry(session, None, None, None, 200, None, None)


def beginning(request: Request) -> PromptDigests | None:
    """Some prompts are long, and some of those begin alike."""
    alike = b"%d" % (request.number % 3) * STEP_BYTES
    return PromptDigests.compute((None, None), alike * 3) if request.number % 2 else None


@dataclass(eq=False)
class Replica:
    """One picker, as far as its peers see it. ``skew``: its clock minus everybody's."""

    name: str
    skew: float
    ledger: Ledger = field(init=False)
    remote_load: RemoteLoad = field(init=False)
    turns: "count[int]" = field(default_factory=count)

    def __post_init__(self) -> None:
        self.ledger = Ledger(default_rate=1000.0, expire_seconds=EXPIRE)
        self.ledger.changes = []
        self.remote_load = RemoteLoad(self.name, self.ledger, lambda key: key in PODS)

    def routed(self, pod: str, uncached: int, now: float, session: str = "") -> str:
        """It sends a request to a pod; the session."""
        session = session or f"{self.name}.{next(self.turns)}"
        self.ledger.routed(session, pod, uncached, uncached + 100, now + self.skew)
        return session

    def logged(self, session: str, now: float) -> None:
        """A gateway tells it that a request has ended."""
        if self.ledger.settled(session, now + self.skew) is None:
            self.remote_load.forward(ended(session), now + self.skew)

    def state(self, since: float = -inf) -> set[tuple[str, int, str, str]]:
        """Open requests in its ledger, whoever routed them, that were heard of after ``since``."""
        requests = [
            r for pod in PODS for r in self.ledger.load(pod).requests if r.heard_at - self.skew > since
        ]
        return {(r.origin or self.name, r.number, r.session, r.load.key) for r in requests}


@dataclass(eq=False)
class Talk:
    """``follower`` follows ``followed`` over one connection."""

    follower: Replica
    followed: Replica
    out: UpdateStream
    updates: deque[bytes] = field(default_factory=deque)
    acknowledged: deque[int] = field(default_factory=deque)
    quiet_since: float = 0.0


class World:
    """All of them; ``tick`` lets time pass."""

    def __init__(self, replicas: int) -> None:
        self.now = 1000.0
        self.names = count()
        self.replicas: list[Replica] = []
        self.talks: list[Talk] = []
        self.cut: set[frozenset[str]] = set()
        for _ in range(replicas):
            self.join()

    def join(self) -> Replica:
        """A replica starts and everybody finds it; its clock is its own."""
        new = Replica(f"r{next(self.names)}", skew=len(self.replicas) * 1e6)
        self.replicas.append(new)
        for one, other in permutations(self.replicas, 2):
            if new in (one, other):
                self.talk(one, other)
        return new

    def talk(self, follower: Replica, followed: Replica) -> None:
        """A connection is opened; an older one ends."""
        self.talks = [t for t in self.talks if (t.follower, t.followed) != (follower, followed)]
        out = UpdateStream(followed.ledger.ours, followed.remote_load.outbox(follower.name), beginning)
        follower.remote_load.on_connected(followed.name, self.now + follower.skew)
        self.talks.append(Talk(follower, followed, out, quiet_since=self.now))

    def die(self, replica: Replica) -> None:
        """It is killed."""
        self.replicas.remove(replica)
        self.talks = [t for t in self.talks if replica not in (t.follower, t.followed)]

    def leave(self, replica: Replica) -> None:
        """It says farewell to those it reaches, and goes."""
        for talk in [t for t in self.talks if t.followed is replica and self.passes(t)]:
            self.collect()
            for _ in range(5):
                now = self.now + replica.skew
                self.send(talk, talk.out.poll(now, leaving=True))
                self.receive(talk)
        self.die(replica)

    def passes(self, talk: Talk) -> bool:
        """Whether the network lets it through."""
        return frozenset((talk.follower.name, talk.followed.name)) not in self.cut

    def tick(self) -> None:
        """A gossip interval passes."""
        self.now += TICK
        self.collect()
        for talk in list(self.talks):
            self.send(talk, talk.out.poll(self.now + talk.followed.skew))
            if self.passes(talk):
                self.receive(talk)
            if self.now - talk.quiet_since >= SILENCE_SECONDS:
                self.talk(talk.follower, talk.followed)
        for replica in self.replicas:
            replica.remote_load.poll(self.now + replica.skew)

    def collect(self) -> None:
        """What has changed since the last time goes to all conversations."""
        for replica in self.replicas:
            changes, replica.ledger.changes = replica.ledger.changes or [], []
            for talk in self.talks:
                if talk.followed is replica:
                    talk.out.add_changes(changes)

    def send(self, talk: Talk, update: bytes | None) -> None:
        """Puts an update on the wire."""
        if update is not None:
            talk.updates.append(update)

    def receive(self, talk: Talk) -> None:
        """Everything that is on the wire of a conversation arrives."""
        while talk.updates:
            update = decode_update(talk.updates.popleft())
            now = self.now + talk.follower.skew
            try:
                talk.follower.remote_load.apply(talk.followed.name, update, now)
            except ProtocolError:
                self.talk(talk.follower, talk.followed)
                return
            talk.quiet_since = self.now
            for entry in update.log_entries:
                if talk.follower.ledger.settled(entry.session or "", now) is None:
                    talk.follower.remote_load.end_orphan(entry.session or "", now)
            talk.acknowledged.append(update.seq)
        while talk.acknowledged:
            talk.out.on_ack(talk.acknowledged.popleft(), self.now + talk.followed.skew)

    def calm(self, seconds: float) -> None:
        """The network is whole, and nothing happens for a while."""
        self.cut.clear()
        for _ in range(round(seconds / TICK)):
            self.tick()
