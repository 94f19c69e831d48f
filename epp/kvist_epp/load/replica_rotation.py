"""Order in which replicas of the picker may send queued requests to one endpoint. Pure.

A new request goes to an endpoint with capacity at once. Of the queued ones, the newest of each replica

- waits for its replica's turn: replicas hear of an engine's progress in the same moment, and all of them
  would send one. The replica that sent there longest ago goes first, the next one a step later if capacity is
  left;
- gives way when it has waited too long already: if old requests take capacity as soon as there is some, the
  next new one has to wait too long as well, and then none is served in time. So it is sent when the endpoint
  has had capacity for a while, or when no new request has come for it lately (trunk reservation: F. Kelly,
  "Loss networks", Ann. Appl. Prob. 1/3, 1991).
"""

from math import inf
from typing import Final

OVERDUE_SECONDS: Final = 1.0
"""A request that has waited longer gives way to new ones, until the endpoint has had capacity for as long:
0.5 lost six points of goodput on groups, 2 s leaves endpoints idle. A share of the prompt's own time is no
better."""
NEW_REQUEST_SECONDS: Final = 3.0
"""An endpoint keeps nothing free if no new request has come for it in this time: with caches still cold
(documents) there is nothing to give way to. 1 s lost nine points on groups. Multiplied by the number of
replicas that send there: each sees its own new requests only."""
REPLICA_SECONDS: Final = 10.0
"""Time without a request to the endpoint after which a replica counts as having none that waits."""
TURN_SECONDS: Final = 0.04
"""Time between the turns of replicas: an urgent update (0.02 s), and as long again for network and work."""


class ReplicaRotation:
    """The rotation of one endpoint, as one replica sees it."""

    __slots__ = ("_new_at", "_open_at", "_sent")

    def __init__(self) -> None:
        self._open_at: float | None = None
        """Since when it has had capacity."""
        self._new_at = -inf
        """When a new request last had this endpoint as its best."""
        self._sent: dict[str, float] = {}
        """When each replica last sent it a request; the empty name is this replica."""

    def on_new_request(self, now: float) -> None:
        """Note a new request that has this endpoint as its best, wherever it is sent."""
        self._new_at = now

    def on_sent(self, replica: str, now: float) -> None:
        """Note that a replica sent a request: whether there is capacity left is not known."""
        if replica not in self._sent:  # replicas come and go for months
            self._sent = {name: at for name, at in self._sent.items() if at > now - REPLICA_SECONDS}
        self._sent[replica] = max(now, self._sent.get(replica, now))
        self._open_at = None

    def may_send(self, since: float, now: float, *, capacity: bool) -> bool:
        """Return whether the newest queued request may be sent; it has waited since ``since``."""
        if not capacity:
            self._open_at = None
            return False
        if self._open_at is None:
            self._open_at = now
        return now >= self._open_at + self._pause(since, now)

    def seconds_until_turn(self, since: float, now: float) -> float:
        """Return the seconds until it may be sent if capacity stays; infinite without, or if it may be
        now."""
        left = 0.0 if self._open_at is None else self._open_at + self._pause(since, now) - now
        return left if left > 0 else inf

    def _pause(self, since: float, now: float) -> float:
        recent = [at for at in self._sent.values() if at > now - REPLICA_SECONDS]
        earlier = sum(at < self._sent.get("", -inf) for at in recent)
        new = now - self._new_at < NEW_REQUEST_SECONDS * max(1, len(recent))
        overdue = now - since > OVERDUE_SECONDS
        return TURN_SECONDS * earlier + OVERDUE_SECONDS * (overdue and new)
