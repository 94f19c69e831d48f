"""When those who wait for a pod may use the room that it has. Pure.

A newcomer goes to a pod with room at once. Of those who wait, the newest of each picker

- goes in its turn: pickers hear of an engine's progress in the same moment, and all of them would send one.
  The picker that sent there longest ago goes first, the next one a step later, if there is room still;
- gives way when it is late already: room that is taken up by the late at once makes the next newcomer late,
  too, and then nobody is served in time. So it goes when the pod has had room for a while, or when nobody new
  has come for it lately (trunk reservation: F. Kelly, "Loss networks", Ann. Appl. Prob. 1/3, 1991).
"""

from math import inf
from typing import Final

LATE_SECONDS: Final = 1.0
"""Who has waited longer is late. Half of it is as good; a share of the prompt's own time no better."""
QUIET_SECONDS: Final = 1.0
"""With room, until the late may go: 0.5 lost six points of goodput on groups, 2 s leaves pods idle."""
NEWCOMER_SECONDS: Final = 3.0
"""A pod that nobody new came for in that time keeps nothing free: with caches still cold (documents) the late
have nobody to give way to. 1 s lost nine points on groups. Times the pickers that send there: each sees its
own newcomers only."""
STEP_SECONDS: Final = 0.04
"""Between pickers: a hurried update (0.02 s), as long again for the network and the work."""
PICKER_SECONDS: Final = 10.0
"""A picker that has sent nothing there for so long has nobody who waits."""


class Turn:
    """One pod's, as one picker sees it."""

    __slots__ = ("_new_at", "_open_at", "_sent")

    def __init__(self) -> None:
        self._open_at: float | None = None
        """Since when it has had room."""
        self._new_at = -inf
        """When a newcomer last wanted it."""
        self._sent: dict[str, float] = {}
        """When each picker last sent it a request, by replica; empty: this one."""

    def wanted(self, now: float) -> None:
        """A newcomer came for it, wherever it went."""
        self._new_at = now

    def sent(self, origin: str, now: float) -> None:
        """It got a request by this replica; what room it has now is another question."""
        if origin not in self._sent:  # replicas come and go for months
            self._sent = {who: at for who, at in self._sent.items() if at > now - PICKER_SECONDS}
        self._sent[origin] = max(now, self._sent.get(origin, now))
        self._open_at = None

    def comes(self, since: float, now: float, *, room: bool) -> bool:
        """Whether the newest of those who wait, ``since`` then, may go, as the pod has ``room`` or not."""
        if not room:
            self._open_at = None
            return False
        if self._open_at is None:
            self._open_at = now
        return now >= self._open_at + self._pause(since, now)

    def comes_in(self, since: float, now: float) -> float:
        """Seconds until it may if the pod keeps the room it has; infinite without any, or if it may now."""
        left = 0.0 if self._open_at is None else self._open_at + self._pause(since, now) - now
        return left if left > 0 else inf

    def _pause(self, since: float, now: float) -> float:
        lately = [at for at in self._sent.values() if at > now - PICKER_SECONDS]
        before = sum(at < self._sent.get("", -inf) for at in lately)
        new = now - self._new_at < NEWCOMER_SECONDS * max(1, len(lately))
        late = now - since > LATE_SECONDS
        return STEP_SECONDS * before + QUIET_SECONDS * (late and new)
