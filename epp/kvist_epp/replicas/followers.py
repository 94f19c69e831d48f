"""Those who follow us: the server's side of the load exchange, over the ``Call`` seam. No transport."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvist_epp.errors import ProtocolError
from kvist_epp.http2.call import Sink
from kvist_epp.load.endpoint_load import Request
from kvist_epp.load.ledger import Ledger
from kvist_epp.replicas.outgoing import Outgoing
from kvist_epp.replicas.prefixes import Prefix
from kvist_epp.replicas.remote_load import Book
from kvist_epp.replicas.replication_stats import Tally
from kvist_epp.replicas.updates import Hello, decode_heard

STALLED_SECONDS: Final = 10.0
"""A follower that acknowledges nothing for this long is let go; it comes back if it lives."""
MOST: Final = 512
"""Followers at once."""

_INVALID_ARGUMENT: Final = 3
_RESOURCE_EXHAUSTED: Final = 8
_ABORTED: Final = 10


@dataclass(slots=True, eq=False)
class Followers:
    """Gives each follower what it is to know, an update at a time."""

    hello: Callable[[], Hello]
    ledger: Ledger
    book: Book
    tally: Tally
    clock: Callable[[], float]
    describe: Callable[[Request], Prefix | None] = lambda _request: None
    """How a request's prompt begins, where that is worth telling; asked once of each."""
    prefixes: dict[Request, Prefix] = field(default_factory=dict)
    """Of open requests."""
    calls: "dict[str, Following]" = field(default_factory=dict)
    """By replica id; of two conversations with one replica the newer counts."""
    greeted: "set[Following]" = field(default_factory=set)
    """Those that have acknowledged nothing yet: whoever finds that it follows us elsewhere never will."""

    def start(self, sink: Sink) -> "Following":
        """A conversation begins: the ``Method``."""
        return Following(self, sink)

    def tick(self, *, leaving: bool = False) -> None:
        """Every gossip interval: what has changed goes to whoever is ready for it."""
        changes = self.ledger.changes
        if changes or changes is None:
            self.ledger.changes = []
        for request in changes or ():
            self._describe(request)
        now = self.clock()
        for call in [*self.calls.values(), *self.greeted]:
            call.outgoing.changed(changes or ())
            if call.outgoing.waits_since(now) >= STALLED_SECONDS:
                call.end(_ABORTED, "nothing was acknowledged for too long")
            else:
                call.push(now, leaving=leaving)

    @property
    def told_all(self) -> bool:
        """Whether every follower has taken in our farewell."""
        return all(call.outgoing.farewell and not call.outgoing.waits for call in self.calls.values())

    def lag(self) -> float:
        """Seconds that the slowest follower is behind: its last round trip, or the present wait."""
        now = self.clock()
        lags = [(c.outgoing.round_trip or 0.0, c.outgoing.waits_since(now)) for c in self.calls.values()]
        return max((max(pair) for pair in lags), default=0.0)

    def _describe(self, request: Request) -> None:
        if not request.open:
            self.prefixes.pop(request, None)
        elif (prefix := self.describe(request)) is not None:
            self.prefixes[request] = prefix

    def joined(self, replica: str, call: "Following") -> None:
        """A follower has taken in its first update."""
        self.greeted.discard(call)
        before = self.calls.get(replica)
        if before is not None:
            before.end(_ABORTED, "followed anew")
        self.calls[replica] = call

    def left(self, replica: str, call: "Following") -> None:
        """A conversation is over."""
        self.greeted.discard(call)
        if self.calls.get(replica) is call:
            del self.calls[replica]


class Following:
    """One follower: a ``Call``."""

    __slots__ = ("_followers", "_replica", "_sink", "outgoing")

    outgoing: Outgoing

    def __init__(self, followers: Followers, sink: Sink) -> None:
        self._followers = followers
        self._sink = sink
        self._replica = ""

    def message(self, data: bytes) -> None:
        """Its hello, then acknowledgements."""
        try:
            hello, seq = decode_heard(data)
            if self._replica:
                self._acknowledged(seq)
            elif hello is None:
                self.end(_INVALID_ARGUMENT, "a follower that does not say who it is")
            else:
                self._begin(hello)
        except ProtocolError as error:
            self.end(_INVALID_ARGUMENT, str(error))

    def half_closed(self) -> None:
        """It wants no more."""
        self.end()

    def cancelled(self) -> None:
        """It has gone."""
        self._followers.left(self._replica, self)

    def end(self, status: int = 0, why: str = "") -> None:
        """No more is told."""
        self._followers.left(self._replica, self)
        self._sink.close(status, why)

    def push(self, now: float, *, hello: Hello | None = None, leaving: bool = False) -> None:
        """Send the next update, if one is due."""
        update = self.outgoing.next(now, hello=hello, leaving=leaving)
        if update is not None:
            self._followers.tally.sent(len(update))
            self._sink.send(update)

    def _begin(self, hello: Hello) -> None:
        followers, own = self._followers, self._followers.hello()
        if len(followers.calls) + len(followers.greeted) >= MOST:
            self.end(_RESOURCE_EXHAUSTED, "too many followers")
            return
        self._replica = hello.replica
        if hello.replica == own.replica:  # it finds out by our name
            self.outgoing = Outgoing(list, deque())
        else:
            mail, prefix = followers.book.mail(hello.replica), followers.prefixes.get
            self.outgoing = Outgoing(followers.ledger.ours, mail, prefix)
            followers.greeted.add(self)
        self.push(followers.clock(), hello=own)

    def _acknowledged(self, seq: int) -> None:
        now = self._followers.clock()
        self.outgoing.acknowledged(seq, now)
        if self in self._followers.greeted:
            self._followers.joined(self._replica, self)
        if self.outgoing.behind:
            self.push(now)
