"""The engines of a run, and how they come and go."""

from dataclasses import dataclass

from kvist_sim.virtual.engine import Hardware


@dataclass(frozen=True, slots=True)
class Change:
    """The fleet is another one from a share of the run on."""

    share: float
    """0 the beginning, 1 the last request."""
    engine: int
    """Position in ``Fleet.engines``."""
    up: bool
    gently: bool = False
    """Down: no further requests, but those it has are answered. Otherwise they are lost."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of a run."""

    engines: tuple[Hardware, ...]
    changes: tuple[Change, ...] = ()
    absent: tuple[int, ...] = ()
    """Positions of engines that are not there at the beginning."""
    shared: bool = False
    """All have one cache together: the ideal pool."""
