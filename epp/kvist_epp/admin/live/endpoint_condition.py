"""The condition of one endpoint in a word, with the reason and its severity. Pure."""

from dataclasses import dataclass
from typing import Any, Final

from kvist_epp.director.endpoint_state import EndpointState
from kvist_epp.endpoints.engine_state import ScrapeState
from kvist_epp.load.endpoint_load import EndpointLoad

OK: Final = 0
STARTING: Final = 1
DEGRADED: Final = 2
FULL: Final = 3
DOWN: Final = 4
"""Severities; an endpoint that is worse comes first on the page."""


_APPROXIMATE: Final = {
    "the picker does not subscribe to its KV events": OK,
    "--model is not set": OK,
    "the tokenizer is not loaded yet": STARTING,
    "the first replay of its KV events has not finished": STARTING,
}
"""Severity of approximate mode where it is a choice, or passes by itself; any other reason is a fault."""


@dataclass(frozen=True, slots=True)
class EndpointCondition:
    """Word, reason and severity of what is the matter with an endpoint."""

    state: str
    """A word or two: ``ready``, ``full``, ``approximate``, ``no metrics``, ``unreachable`` …"""
    reason: str
    """Why, in a sentence; empty where the state says it all."""
    severity: int
    approximate: str
    """Why its cache is known from routing history only; empty while its KV events are used."""
    metrics_problem: str
    """Why nothing is known from its metrics; empty while they are read."""

    def document(self) -> dict[str, Any]:
        """Return the fields for the endpoint's row."""
        # not asdict, which copies deeply: it took a third of the time of a document
        return {
            "state": self.state,
            "reason": self.reason,
            "severity": self.severity,
            "approximate": self.approximate,
            "metrics_problem": self.metrics_problem,
        }


def condition(state: EndpointState, approximate: str, max_backlog: float) -> EndpointCondition:
    """Return the worst of what is the matter with an endpoint.

    ``approximate``: why its index is not used; ``max_backlog``: seconds of prefill from which it is full.
    """
    word, reason, severity = _worst(state, approximate, max_backlog)
    return EndpointCondition(word, reason, severity, approximate, state.scrape.metrics_problem)


def _worst(state: EndpointState, approximate: str, max_backlog: float) -> tuple[str, str, int]:
    scrape, endpoint = state.scrape, state.endpoint
    if scrape.state is ScrapeState.UNREACHABLE:
        return "unreachable", scrape.problem, DOWN
    if endpoint.refusal:
        leaving = endpoint.refusal == "terminating"
        return endpoint.refusal, f"its pod is {endpoint.refusal}", STARTING if leaving else DOWN
    if scrape.state is ScrapeState.NEW:
        return "new", scrape.problem, STARTING
    if state.refusal:
        return "helper", f"{state.refusal}: it is never picked", OK
    if full := _full_of(state.load, max_backlog):
        return "full", full, FULL
    if scrape.metrics_problem:
        return "no metrics", scrape.metrics_problem, DEGRADED
    if approximate:
        return "approximate", approximate, _APPROXIMATE.get(approximate, DEGRADED)
    return "ready", "", OK


def _full_of(load: EndpointLoad, max_backlog: float) -> str:
    """Return what the endpoint is full of; empty if it has capacity."""
    if load.backlog_tokens > max_backlog * load.rate:
        return f"its backlog is longer than {max_backlog:g} s of prefill"
    if load.kv_cache_full:
        return f"its KV cache is full with {load.kv_full_at} sequences"
    if load.counted_requests >= load.slot_limit:
        return f"its batch is full: {load.counted_requests} requests for {load.slots} slots"
    return ""
