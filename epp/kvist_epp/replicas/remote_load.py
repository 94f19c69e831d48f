"""What the other replicas routed and has not ended, as they told it, in the ledger.

Pure; clocks are parameters. A replica that was not heard of for a while is silent: its requests leave the
ledger, and scrapes see them as foreign. When it is heard again it tells all that is open. One that has said
farewell is believed: its requests stay, as orphans, until the gateway, a scrape or their age ends them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.access_log import Ended
from kvist_epp.load.endpoint_load import Request
from kvist_epp.load.ledger import Ledger
from kvist_epp.replicas.prefixes import Prefix, Prefixes
from kvist_epp.replicas.updates import Entry, Update

SILENCE_SECONDS: Final = 3.0
"""Without an update for this long a replica is silent; it sends one a second at least."""
FORGET_SECONDS: Final = 60.0
"""A replica that stays silent for this long is not spoken of any more."""
ENTRIES: Final = 100_000
"""Open requests of one replica that are kept: the ledger's own bound."""
MAIL: Final = 10_000
"""Ended requests kept for a replica that cannot be told now; the oldest go first."""


class Standing(Enum):
    """How a replica stands with us; the label of ``kvist_epp_peers``."""

    HEARD = "heard"
    SILENT = "silent"
    LEFT = "left"
    """It said farewell."""


@dataclass(slots=True, eq=False)
class Peer:
    """One other replica."""

    replica: str
    standing: Standing = Standing.SILENT
    heard_at: float = 0.0
    """When its last update came."""
    complete: bool = False
    """All that was open there has been told."""
    entries: dict[int, Request] = field(default_factory=dict)
    """By the replica's own number."""
    parked: dict[int, tuple[Entry, float]] = field(default_factory=dict)
    """On endpoints that are not ours (yet), with the time they were told."""
    seq: int = 0
    """Of the last update taken."""
    stale: set[int] | None = None
    """While everything is told anew: known numbers that were not told again; None: it is not."""


class Book:
    """All other replicas by their id."""

    def __init__(self, replica: str, ledger: Ledger, known: Callable[[str], bool]) -> None:
        """``replica``: ours. ``known``: whether an endpoint key is of our fleet."""
        self.peers: dict[str, Peer] = {}
        self.overflows = 0
        """Requests that were told and not kept: a replica has too many."""
        self._replica = replica
        self._ledger = ledger
        self._known = known
        self._mail: dict[str, deque[Ended]] = {}
        self._sessions: dict[str, list[Request]] = {}
        self.prefixes = Prefixes()
        """What is on its way to endpoints by other replicas."""
        self._prefix_of: dict[Request, Prefix] = {}

    def __len__(self) -> int:
        """Requests of other replicas in the ledger."""
        return sum(len(peer.entries) for peer in self.peers.values())

    # What replicas tell

    def begin(self, replica: str, now: float) -> None:
        """A conversation with the replica begins, the first or another one: it will tell everything."""
        peer = self.peers.setdefault(replica, Peer(replica, heard_at=now))
        peer.seq, peer.complete, peer.stale = 0, False, None

    def take(self, replica: str, update: Update, now: float) -> None:
        """An update came. Raises ProtocolError when one before it is missing: the conversation must begin
        anew."""
        peer = self.peers.get(replica, Peer(replica))
        if update.seq != peer.seq + 1 or not (update.whole_begins or peer.complete or peer.stale is not None):
            raise ProtocolError("updates of a peer are missing")
        peer.seq, peer.heard_at, peer.standing = update.seq, now, Standing.HEARD
        if update.whole_begins:
            peer.complete, peer.stale = False, {*peer.entries, *peer.parked}
        for entry in update.entries:
            self._routed(peer, entry, now)
        for number in update.gone:
            self._end(peer, number, now)
        if update.whole_ends:
            for number in peer.stale or ():
                self._end(peer, number, now)
            peer.complete, peer.stale = True, None
        if update.leaving:
            self._left(peer)

    def look(self, now: float) -> None:
        """Every second or so: who is silent, what has expired, which endpoints have become known."""
        for peer in list(self.peers.values()):
            if peer.standing is Standing.HEARD and now - peer.heard_at >= SILENCE_SECONDS:
                self._silent(peer, now)
            self._tidy(peer, now)
            self._unpark(peer, now)
            if (
                peer.standing is not Standing.HEARD
                and now - peer.heard_at >= FORGET_SECONDS
                and not peer.entries
            ):
                del self.peers[peer.replica]
                self._mail.pop(peer.replica, None)

    # What others ask

    def of(self, session: str, endpoint: str) -> Request | None:
        """The request of another replica that an event on this endpoint tells of."""
        requests = [r for r in self._sessions.get(session, ()) if r.load.key == endpoint and r.open]
        return next((r for r in requests if r.remaining > 0), requests[0] if requests else None)

    def ended(self, entry: Ended, now: float) -> int:
        """A gateway told us of a request that we did not route: whoever did is told, or else everybody.

        A session id of ours names its replica. One that a client chose may be known from the replica that
        routed it; if not, it is not known yet, and everybody is told. Returns how many are told.
        """
        session = entry.session or ""
        owners = self._owners(session)
        for owner in owners:
            self.mail(owner).append(entry)
        self.orphan_ended(session, now)
        return len(owners)

    def orphan_ended(self, session: str, now: float) -> None:
        """A request has ended; if its replica has gone, nobody else will say so."""
        for request in self._sessions.get(session, ()):
            if request.orphan:
                self._end(self.peers[request.origin], request.number, now)
                return

    def mail(self, replica: str) -> deque[Ended]:
        """Ended requests that a replica is to be told of: the same object until it is forgotten."""
        return self._mail.setdefault(replica, deque(maxlen=MAIL))

    def counts(self) -> dict[str, int]:
        """Replicas by standing."""
        found = dict.fromkeys((one.value for one in Standing), 0)
        for peer in self.peers.values():
            found[peer.standing.value] += 1
        return found

    def _owners(self, session: str) -> list[str]:
        present = {name for name, peer in self.peers.items() if peer.standing is not Standing.LEFT}
        named = session.rpartition(".")[0]
        if named in present or named == self._replica:
            return [named] if named in present else []
        routed = {request.origin for request in self._sessions.get(session, ())}
        return sorted(routed & present or present)

    # Changes

    def _routed(self, peer: Peer, entry: Entry, now: float) -> None:
        if peer.stale is not None:
            peer.stale.discard(entry.number)
        known = peer.entries.get(entry.number)
        if known is not None and known.open:
            return
        if len(peer.entries) + len(peer.parked) >= ENTRIES:
            self.overflows += 1
        elif self._known(entry.endpoint):
            self._place(peer, entry, now, now)
        else:
            peer.parked[entry.number] = entry, now

    def _place(self, peer: Peer, entry: Entry, told_at: float, now: float) -> None:
        self._remove(peer, entry.number)
        request = Request(
            session=entry.session,
            load=self._ledger.load(entry.endpoint),
            uncached=float(entry.uncached),
            total=entry.total,
            routed_at=told_at - entry.age,
            heard_at=told_at - entry.silent,
            remaining=float(min(entry.remaining, entry.uncached)),
            progressed=entry.progressed,
            number=entry.number,
            origin=peer.replica,
            orphan=peer.standing is Standing.LEFT,
            content=None if entry.prefix is None else entry.prefix.content,
        )
        peer.entries[entry.number] = request
        self._sessions.setdefault(request.session, []).append(request)
        self._ledger.taken(request, now)
        if entry.prefix is not None:
            self._prefix_of[request] = entry.prefix
            self.prefixes.add(entry.endpoint, entry.prefix)

    def _end(self, peer: Peer, number: int, now: float, *, silent: bool = False) -> None:
        request = self._remove(peer, number)
        if request is not None:
            self._ledger.parted(request, now, silent=silent)

    def _remove(self, peer: Peer, number: int) -> Request | None:
        peer.parked.pop(number, None)
        request = peer.entries.pop(number, None)
        if request is not None:
            requests = self._sessions[request.session]
            requests.remove(request)
            if not requests:
                del self._sessions[request.session]
            prefix = self._prefix_of.pop(request, None)
            if prefix is not None:
                self.prefixes.drop(request.load.key, prefix)
        return request

    def _silent(self, peer: Peer, now: float) -> None:
        peer.standing, peer.complete, peer.stale = Standing.SILENT, False, None
        for number in [*peer.entries, *peer.parked]:
            self._end(peer, number, now, silent=True)

    def _left(self, peer: Peer) -> None:
        peer.standing = Standing.LEFT
        for request in peer.entries.values():
            request.orphan = True

    def _tidy(self, peer: Peer, now: float) -> None:
        """Requests that the ledger has let go, or that are too old."""
        oldest = now - self._ledger.expire_seconds
        for number in [
            number for number, one in peer.entries.items() if not one.open or one.heard_at <= oldest
        ]:
            self._end(peer, number, now)

    def _unpark(self, peer: Peer, now: float) -> None:
        for entry, told_at in list(self._of_known(peer)):
            self._place(peer, entry, told_at, now)

    def _of_known(self, peer: Peer) -> Iterator[tuple[Entry, float]]:
        return (one for one in peer.parked.values() if self._known(one[0].endpoint))
