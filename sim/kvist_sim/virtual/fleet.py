"""Engines of a run, and their changes over time."""

from dataclasses import dataclass

from kvist_sim.virtual.engine import Hardware
from kvist_sim.virtual.tiers import TierKind


@dataclass(frozen=True, slots=True)
class Change:
    """Engine that leaves or joins at a share of the run."""

    share: float
    """Share of the requests: 0 the first, 1 the last."""
    engine: int
    """Position in ``Fleet.engines``."""
    up: bool
    gently: bool = False
    """True if a leaving engine still answers the requests it has; otherwise they are lost."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of a run."""

    engines: tuple[Hardware, ...]
    changes: tuple[Change, ...] = ()
    absent: tuple[int, ...] = ()
    """Positions of engines that are absent at the start."""
    shared: bool = False
    """True for the ideal pool: all engines have one cache together."""
    tiers: tuple[TierKind, ...] = ()
    """Slower places of each engine, memory first; of medium ``SHARED`` there is one for all."""
