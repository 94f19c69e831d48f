"""Readiness: when the picker reports that it can take requests. Decided once, at startup."""

import logging
from collections.abc import Callable, Sequence

from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.http2.grpc_health import Health

logger = logging.getLogger(__name__)

Condition = Callable[[], str]
"""Returns in a few words what startup still waits for, or an empty string."""


class Readiness:
    """Ready once the endpoints are listed and the index has caught up, or the wait for it has timed out.

    A list without endpoints counts as listed: requests then wait for the first endpoint.
    """

    def __init__(
        self,
        registry: EndpointRegistry,
        health: Health,
        timeout_seconds: float,
        *,
        conditions: Sequence[Condition] = (),
    ) -> None:
        """``conditions``: what else is waited for, within the same ``timeout_seconds``."""
        self._registry = registry
        self._health = health
        self._timeout = timeout_seconds
        self._conditions = conditions
        self._listed_at: float | None = None
        self._reached = False
        self._stopped = ""

    def not_ready_reason(self, discovery_problem: str = "") -> str:
        """Return what startup waits for, or why the picker stopped being ready; empty while it is ready.

        ``discovery_problem``: why the endpoints cannot be listed, if they cannot; added to the text.
        """
        if self._stopped or self._reached:
            return self._stopped
        reason = ", ".join(self._waiting_for()) or "warming up"
        return f"{reason}: {discovery_problem}" if discovery_problem else reason

    def update(self) -> None:
        """Become ready if nothing is waited for any longer, or if the time-out has passed."""
        if self._stopped or self._reached or self._registry.fleet is None:
            return
        now = self._registry.clock()
        self._listed_at = now if self._listed_at is None else self._listed_at
        waiting = self._waiting_for()
        if not waiting or now - self._listed_at >= self._timeout:
            self._reached = True
            self._health.set(True)
            without = f"; timed out waiting for: {'; '.join(waiting)}" if waiting else ""
            count = len(self._registry.fleet)
            logger.info("the picker is ready (endpoints: %d)%s", count, without)

    def stop(self, reason: str) -> None:
        """Stop being ready, for good: the picker shuts down."""
        self._stopped = reason
        self._health.set(False)

    def _waiting_for(self) -> list[str]:
        if self._registry.fleet is None:
            return ["the endpoints are not listed yet"]
        cold = self._registry.cold()
        replays = [f"the index has not caught up with the KV events of {', '.join(cold)}"] if cold else []
        return replays + [reason for condition in self._conditions if (reason := condition())]
