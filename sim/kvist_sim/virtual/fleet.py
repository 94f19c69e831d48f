"""Engines of a run, and their changes over time."""

from dataclasses import dataclass, field

from kvist_sim.engine.tiers import TierKind
from kvist_sim.virtual.engine import VirtualEngine
from kvist_sim.virtual.hardware import Hardware
from kvist_sim.virtual.jobs import Call, Job
from kvist_sim.virtual.policy import Pod


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


@dataclass(slots=True, eq=False)
class Site:
    """A pod's engine, and what is on it."""

    pod: Pod
    engine: VirtualEngine
    position: int
    jobs: dict[Call, Job] = field(default_factory=dict)
    open: bool = True
    """Gets requests."""
    gone: bool = False
    busy: bool = False
    expected: int = 0
    """Requests whose prompts are being computed elsewhere, and that it will answer."""

    @property
    def idle(self) -> bool:
        """The pod has nothing to do, now or soon."""
        return self.engine.idle and not self.expected
