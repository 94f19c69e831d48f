"""When the picker may be asked: readiness, decided once, on the way up."""

import logging
from collections.abc import Callable, Sequence

from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.http2.grpc_health import Health

logger = logging.getLogger(__name__)

Condition = Callable[[], str]
"""What is still waited for, in a few words; empty when nothing is."""


class Gate:
    """Ready, once: when the fleet was listed and the index has caught up, or the wait for it is over.

    An empty fleet is listed too: requests then wait for the first pod.
    """

    def __init__(
        self,
        registry: EndpointRegistry,
        health: Health,
        patience_seconds: float,
        *,
        conditions: Sequence[Condition] = (),
    ) -> None:
        """``conditions``: what else must be done before it opens, within the same patience."""
        self._registry = registry
        self._health = health
        self._patience = patience_seconds
        self._conditions = conditions
        self._listed_at: float | None = None
        self.opened = False
        self._shut = ""

    @property
    def why_shut(self) -> str:
        """What is waited for, or why it was shut; empty while it is open."""
        if self._shut or self.opened:
            return self._shut
        return ", ".join(self._waiting_for()) or "warming up"

    def look(self) -> None:
        """Open it if it is time."""
        if self._shut or self.opened or self._registry.fleet is None:
            return
        now = self._registry.clock()
        self._listed_at = now if self._listed_at is None else self._listed_at
        waiting = self._waiting_for()
        if not waiting or now - self._listed_at >= self._patience:
            self._open(waiting)

    def not_ready(self, problem: str) -> str:
        """``why_shut`` for people; ``problem``: why the fleet cannot be listed, if it cannot."""
        unlisted = problem and not self._shut and not self.opened
        return f"{self.why_shut}: {problem}" if unlisted else self.why_shut

    def shut(self, why: str) -> None:
        """For good: the picker ends."""
        self._shut = why
        self._health.set(False)

    def _waiting_for(self) -> list[str]:
        if self._registry.fleet is None:
            return ["the fleet is not listed yet"]
        cold = self._registry.cold()
        replays = [f"events of {', '.join(cold)} are not caught up with"] if cold else []
        return replays + [why for condition in self._conditions if (why := condition())]

    def _open(self, missing: Sequence[str]) -> None:
        self.opened = True
        self._health.set(True)
        without = f", without waiting longer: {'; '.join(missing)}" if missing else ""
        logger.info("ready: %r%s", self._registry.director.index, without)
