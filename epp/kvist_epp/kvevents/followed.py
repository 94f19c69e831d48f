"""Whom to follow, and how patiently."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FollowedPublisher:
    """One publisher to follow: one data-parallel rank of an endpoint."""

    endpoint: str
    """"namespace/name"."""
    source: str
    """The publisher's name in the index, with its rank."""
    rank: int
    events: str
    """ZMQ address of the PUB socket; not used in bind mode."""
    replay: str | None
    """ZMQ address of the ROUTER socket; None: lost messages cannot be asked for."""
    topics: tuple[str, ...] = ()
    """Names the endpoint may use in its topic, in bind mode: "ip:port", "name", "namespace/name"."""


@dataclass(frozen=True, slots=True)
class SubscriberLimits:
    """Times in seconds."""

    slice_seconds: float = 0.001
    """Work between two turns of the event loop: bounds what a pick may wait for."""
    replay_timeout: float = 2.0
    """Silence after which a replay is asked for again; doubled each time."""
    replay_attempts: int = 3
    replays: int = 8
    """At once, over all publishers: each may bring 10,000 batches."""
    settle: float = 1.0
    """After a replay, one more look: messages sent before our subscription arrived, and after the replay."""
    check: float = 30.0
    """An idle publisher is looked at this often: its last message may be lost, its restart silent."""
    receive_hwm: int = 200_000
    """Messages queued by ZMQ for each publisher; beyond it the engine's own queue fills."""
    orphans: float = 5.0
    """How often events with unknown parents are looked through for those that waited too long."""
