"""Counters of prewarming, for the metrics page."""

from dataclasses import dataclass


@dataclass(slots=True)
class PrewarmStats:
    """Counters since the picker started."""

    begun: int = 0
    """Prefixes selected."""
    dropped: int = 0
    """Selected prefixes that were given up."""
    kept: int = 0
    """Requests for a prefix that an endpoint holds already, so that its engine does not evict it."""
    steps: int = 0
    """Requests that engines answered."""
    failed: int = 0
    """Requests without an answer, or with an error."""
    tokens: int = 0
    """Prompt tokens that the answered requests computed."""
    seconds: float = 0.0
    """Total duration of all requests."""
