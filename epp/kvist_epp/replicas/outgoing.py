"""What one follower is told of our load: first what is open, then what changes. Pure; clocks are parameters.

At most one update is under way, so a follower that does not acknowledge costs no more than that. Meanwhile
changes are kept, up to a bound; beyond it the follower is told everything again.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.access_log import Ended
from kvist_epp.load.endpoint_load import Request
from kvist_epp.replicas.prefixes import Prefix
from kvist_epp.replicas.updates import Hello, encode

ROWS: Final = 1000
"""Requests, and ended ones, in one update: about a millisecond to make and 100 KB."""
BACKLOG: Final = 20_000
"""Changes kept for a follower that does not keep up; as many as a busy replica has in half a minute."""
HEARTBEAT_SECONDS: Final = 1.0
"""An update is sent this often even if there is nothing to tell."""


class Outgoing:
    """One follower, from its hello on."""

    def __init__(
        self,
        ours: Callable[[], list[Request]],
        mail: deque[Ended],
        prefix: Callable[[Request], Prefix | None] = lambda _request: None,
    ) -> None:
        """``ours``: our open requests. ``mail``: ended requests of the follower, told to us by gateways;
        taken from. ``prefix``: how a request's prompt begins, where that is to be told."""
        self.seq = 0
        """Of the last update made."""
        self.round_trip: float | None = None
        """Seconds from the last acknowledged update to its acknowledgement."""
        self.farewell = False
        """Nothing more is told."""
        self._acknowledged = 0
        self._made_at = 0.0
        self._ours = ours
        self._mail = mail
        self._prefix = prefix
        self._changes: deque[Request] = deque()
        self._whole: list[Request] = []
        self._begins = self._ends = False
        self._begin()

    @property
    def waits(self) -> bool:
        """An update is not acknowledged yet."""
        return self._acknowledged < self.seq

    @property
    def behind(self) -> bool:
        """There is more to tell than one update takes: the next one need not wait for its time."""
        return bool(self._whole) or len(self._changes) > ROWS or len(self._mail) > ROWS

    def waits_since(self, now: float) -> float:
        """Seconds that the update under way waits for its acknowledgement; 0: none does."""
        return now - self._made_at if self.waits else 0.0

    def changed(self, requests: Iterable[Request]) -> None:
        """Requests of ours were routed or have ended."""
        self._changes.extend(requests)
        if len(self._changes) > BACKLOG:
            self._begin()

    def acknowledged(self, seq: int, now: float) -> None:
        """The follower has taken an update in. Raises ProtocolError for one that was never sent."""
        if seq != self.seq or not self.waits:
            raise ProtocolError("a peer acknowledges what it was not sent")
        self._acknowledged = seq
        self.round_trip = now - self._made_at

    def next(self, now: float, *, hello: Hello | None = None, leaving: bool = False) -> bytes | None:
        """The next update, if one is due and none is under way."""
        if self.waits or self.farewell:
            return None
        if self._begins or self._ends:
            return self._tell(now, self._take_whole(), hello)
        if not (self._changes or self._mail or leaving or now - self._made_at >= HEARTBEAT_SECONDS):
            return None
        rows = dict.fromkeys(self._take_changes())
        self.farewell = leaving and not self._changes and len(self._mail) <= ROWS
        return self._tell(now, list(rows), hello, leaving=self.farewell)

    def _tell(self, now: float, rows: list[Request], hello: Hello | None, *, leaving: bool = False) -> bytes:
        whole = self._begins, self._ends and not self._whole
        self._begins, self._ends = False, self._ends and not whole[1]
        self.seq += 1
        self._made_at = now
        told = [row for row in rows if row.open]
        for load in {row.load for row in told}:
            load.drain(now)
        return encode(
            self.seq,
            now,
            told,
            hello=hello,
            whole=whole,
            gone=[row.number for row in rows if not row.open],
            ended=self._take_mail(),
            leaving=leaving,
            prefix=self._prefix,
        )

    def _begin(self) -> None:
        self._whole = self._ours()
        self._begins = self._ends = True
        self._changes.clear()

    def _take_whole(self) -> list[Request]:
        rows, self._whole = self._whole[:ROWS], self._whole[ROWS:]
        return rows

    def _take_mail(self) -> list[Ended]:
        """Not with the first update: a follower that follows us elsewhere already takes no notice of it."""
        return [self._mail.popleft() for _ in range(min(len(self._mail), ROWS if self.seq > 1 else 0))]

    def _take_changes(self) -> Iterable[Request]:
        return [self._changes.popleft() for _ in range(min(len(self._changes), ROWS))]
