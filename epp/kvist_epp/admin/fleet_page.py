"""``GET /fleet``: what each endpoint's cache saves and the state of its engine, for the operator.

The page is stable: ``version`` changes when the meaning of a field changes or a field is removed; fields may
be added. Saved tokens and prompts are those of this replica's own traffic and add up over replicas; blocks
and figures of engines are the same everywhere.
"""

import asyncio
from collections.abc import Generator, Mapping
from time import perf_counter
from typing import Any, Final, NamedTuple

from kvist_epp.admin.slices import run_in_slices
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.endpoints.engine_state import EngineState
from kvist_epp.endpoints.kubernetes.pod_endpoints import TERMINATING
from kvist_epp.prefix_stats.cache_value import EndpointCacheValue
from kvist_epp.prefix_stats.window import WINDOW_SECONDS, Window
from kvist_epp.telemetry.metrics import PickerMetrics

VERSION: Final = 1
GATEWAY_SECONDS: Final = 1800.0
GATEWAY_SLOTS: Final = 60
CPU_SHARE: Final = 0.02
"""Share of a core that the page may use, however often it is requested."""


class GatewayCounts(NamedTuple):
    """Counts of what gateways have asked, at one moment."""

    at: float
    picked: int
    """Requests for which an endpoint was picked, since the start."""
    tls_refusals: int
    """TLS handshakes of the gRPC port that failed, since the start."""


class RecentGatewayCounts:
    """Increases of ``GatewayCounts`` over the last half hour, from one call of ``document`` to another.

    The window is longer than that of the engines' counters: a request that an engine has ended in the last
    ten minutes was picked earlier, and must not look like one that nothing was picked for.
    """

    def __init__(self, now: float) -> None:
        self._window = Window(list[GatewayCounts], GATEWAY_SECONDS, GATEWAY_SLOTS)
        """In each slot, the first counts of it."""
        self._window.current(now).append(GatewayCounts(now, 0, 0))

    def document(self, metrics: PickerMetrics, now: float) -> dict[str, float]:
        """Return the increases and the seconds that they cover: none after half an hour without a request."""
        port = metrics.ports.get("grpc")
        refusals = 0 if port is None else sum(port.handshake_failures.counts.values())
        counts = GatewayCounts(now, metrics.requests["picked"], refusals)
        slot = self._window.current(now)
        if not slot:
            slot.append(counts)
        first = self._window.live(now)[0][0]
        return {
            "seconds": round(now - first.at, 1),
            "picked": counts.picked - first.picked,
            "tls_refusals": counts.tls_refusals - first.tls_refusals,
        }


class FleetPage:
    """Computes the page at most once at a time, and answers requests that come too soon from the last
    result."""

    def __init__(self, registry: EndpointRegistry) -> None:
        self._registry = registry
        self._started_at = registry.clock()
        self._gateway = RecentGatewayCounts(self._started_at)
        self._running: asyncio.Task[dict[str, Any]] | None = None
        self._last: dict[str, Any] = {}
        self._computed_at = 0.0
        self._next_at = 0.0

    async def document(self) -> dict[str, Any]:
        """Return the page. A caller that is cancelled does not stop the computation for the others."""
        if self._running is None and (not self._last or perf_counter() >= self._next_at):
            self._running = asyncio.create_task(self._compute(), name="fleet page")
        if self._running is not None:
            await asyncio.shield(self._running)
        return {**self._last, "age_seconds": round(perf_counter() - self._computed_at, 3)}

    async def close(self) -> None:
        """Stop a computation in progress."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))

    async def _compute(self) -> dict[str, Any]:
        try:
            director = self._registry.director
            now, began = self._registry.clock(), perf_counter()
            publishers = {key: state.member.publishers for key, state in self._registry.states.items()}
            steps = director.cache_value.compute(director.index, publishers, now)
            values, seconds = await run_in_slices(steps)
            steps_of_page = _document(self._registry, values, now - self._started_at, now)
            page, more_seconds = await run_in_slices(steps_of_page)
            self._last = {**page, "gateway": self._gateway.document(director.metrics, now)}
            self._computed_at = began
            self._next_at = began + (seconds + more_seconds) / CPU_SHARE
            return self._last
        finally:
            self._running = None


def _document(
    registry: EndpointRegistry, values: Mapping[str, EndpointCacheValue], observed: float, now: float
) -> Generator[None, None, dict[str, Any]]:
    """Make the page, an endpoint a step; ``observed``: seconds since this replica started."""
    director, endpoints = registry.director, list[dict[str, Any]]()
    for key, state in tuple(registry.states.items()):
        if key in values and registry.states.get(key) is state:
            endpoints.append(
                _engine(state.scrape)
                | {
                    "approximate": registry.why_approximate(key),
                    "worth_tokens": values[key].tokens,
                    "blocks": director.lookup.blocks(state.member),
                    "exclusive_blocks": values[key].exclusive_blocks,
                }
            )
        yield
    return {
        "version": VERSION,
        "replica": director.replica,
        "window_seconds": WINDOW_SECONDS,
        "observed_seconds": round(min(observed, WINDOW_SECONDS), 1),
        "prompts": director.divergence.document(now),
        "endpoints": endpoints,
    }


def _engine(state: EngineState) -> dict[str, Any]:
    endpoint, sample = state.endpoint, state.sample
    return {
        # an endpoint may be one of several ports of a pod
        "pod": endpoint.aliases[0] if endpoint.aliases else endpoint.name,
        "namespace": endpoint.namespace,
        "uid": endpoint.uid,
        "endpoint": endpoint.hostport,
        "role": endpoint.role,
        "ready": state.ready,
        "draining": endpoint.refusal == TERMINATING,
        "state": state.status,
        "kv_tokens": sample.reported_tokens,
        "kv_usage": round(sample.cache_usage, 4),
        "running": sample.running,
        "waiting": sample.waiting,
        "counted": {name: round(value, 3) for name, value in state.recent.deltas()._asdict().items()},
    }
