"""``GET /fleet``: what each endpoint is worth and how it stands, for the operator. A stable page.

``version`` changes when a field's meaning does or a field goes; fields may be added. Figures are this
replica's own: worth and prompts are of its own traffic and add up over replicas, what blocks and engines tell
is the same everywhere.
"""

import asyncio
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, TypeVar

from kvist_epp.director.endpoint_registry import Membership
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.endpoints.kubernetes.pods import TERMINATING
from kvist_epp.endpoints.scraper import EngineState
from kvist_epp.prefix_stats.cache_value import Worth
from kvist_epp.prefix_stats.window import WINDOW_SECONDS

VERSION: Final = 1
SLICE_SECONDS: Final = 0.001
"""Work between two chances to let a pick run."""
SHARE: Final = 0.02
"""Of a core that answers may take, however often somebody asks."""

T = TypeVar("T")


@dataclass(slots=True)
class FleetPage:
    """Works it out at most once at a time; whoever asks too soon gets what was found last."""

    membership: Membership
    began: float = field(init=False)
    _running: asyncio.Task[dict[str, Any]] | None = None
    _found: dict[str, Any] = field(default_factory=dict)
    _taken_at: float = 0.0
    _next_at: float = 0.0

    def __post_init__(self) -> None:
        self.began = self.membership.picker.clock()

    async def document(self) -> dict[str, Any]:
        """The page. Whoever stops waiting does not stop the others."""
        if self._running is None and (not self._found or perf_counter() >= self._next_at):
            self._running = asyncio.create_task(self._work_out(), name="fleet page")
        if self._running is not None:
            await asyncio.shield(self._running)
        return {**self._found, "age_seconds": round(perf_counter() - self._taken_at, 3)}

    async def close(self) -> None:
        """Nobody is answered any more."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))

    async def _work_out(self) -> dict[str, Any]:
        try:
            picker = self.membership.picker
            now, began = picker.clock(), perf_counter()
            publishers = {key: member.publishers for key, member in picker.lookup.members.items()}
            worth, worked = await gently(picker.savings.appraise(picker.index, publishers, now))
            self._found = document(self.membership, worth, now - self.began, now)
            self._taken_at = began
            self._next_at = began + worked / SHARE
            return self._found
        finally:
            self._running = None


async def gently(steps: Generator[None, None, T]) -> tuple[T, float]:
    """Runs it to its end, a millisecond at a time; what it returns, and the seconds of work."""
    worked, until = 0.0, 0.0
    began = perf_counter()
    try:
        while True:
            until = began + SLICE_SECONDS
            while perf_counter() < until:
                next(steps)
            worked += perf_counter() - began
            await asyncio.sleep(0)
            began = perf_counter()
    except StopIteration as end:
        return end.value, worked + perf_counter() - began


def document(
    membership: Membership, worth: Mapping[str, Worth], observed: float, now: float
) -> dict[str, Any]:
    """The page of one moment; ``observed``: seconds since this replica began."""
    picker, blocks = membership.picker, membership.blocks()
    states = [state for key, state in membership.scraper.states.items() if key in worth]
    return {
        "version": VERSION,
        "replica": picker.replica,
        "window_seconds": WINDOW_SECONDS,
        "observed_seconds": round(min(observed, WINDOW_SECONDS), 1),
        "prompts": picker.reuse.document(now),
        "endpoints": [
            _engine(state)
            | {
                "approximate": membership.why_approximate(state.endpoint.key),
                "worth_tokens": worth[state.endpoint.key].tokens,
                "blocks": blocks.get(state.endpoint.hostport, {}),
                "exclusive_blocks": worth[state.endpoint.key].exclusive_blocks,
            }
            for state in states
        ],
    }


def _engine(state: EngineState) -> dict[str, Any]:
    endpoint, sample = state.endpoint, state.sample
    return {
        "pod": pod(endpoint),
        "namespace": endpoint.namespace,
        "uid": endpoint.uid,
        "endpoint": endpoint.hostport,
        "role": endpoint.role,
        "ready": state.ready,
        "draining": endpoint.refusal == TERMINATING,
        "state": state.standing,
        "kv_tokens": sample.reported_tokens,
        "kv_usage": round(sample.cache_usage, 4),
        "running": sample.running,
        "waiting": sample.waiting,
        "counted": {name: round(value, 3) for name, value in state.recent.counted()._asdict().items()},
    }


def pod(endpoint: Endpoint) -> str:
    """The pod that it is a port of."""
    return endpoint.aliases[0] if endpoint.aliases else endpoint.name
