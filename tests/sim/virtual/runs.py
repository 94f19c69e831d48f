"""Small runs for the tests of this folder."""

from collections.abc import Callable, Iterator
from random import Random

from kvist_sim.virtual.fleet import Change, Fleet
from kvist_sim.virtual.hardware import Hardware
from kvist_sim.virtual.jobs import NOTHING
from kvist_sim.virtual.policy import Spec
from kvist_sim.virtual.traffic import Burst, Session, Shape, answer
from kvist_sim.virtual.workloads.dialogues import chats
from kvist_sim.virtual.world import Outcome, Setting, World

CHAT = Shape(name="chat", summary="", bursts=chats(2, (2, 4), 3.0), requests=3.0, standing=9.0)


def fixed(tokens: int, output: int, *, shared: int = 0) -> Shape:
    """Requests of one size; their first ``shared`` tokens are the same."""

    def bursts(dice: Random) -> Iterator[Burst]:
        prefix = NOTHING.on(shared, dice)

        def session(random: Random) -> Session:
            yield answer(prefix.on(tokens - shared, random), output, random)

        while True:
            yield [session]

    return Shape(name="fixed", summary="", bursts=bursts, requests=1.0)


def run(
    spec: Spec,
    shape: Shape = CHAT,
    *,
    engines: int = 3,
    rate: float = 6.0,
    requests: int = 150,
    seed: int = 1,
    hardware: Hardware | None = None,
    changes: tuple[Change, ...] = (),
    setting: Setting | None = None,
    look: Callable[[World], None] = lambda _world: None,
) -> Outcome:
    """One run; ``look`` gets the world before it begins."""
    fleet = Fleet((hardware or Hardware(),) * engines, changes)
    world = World(shape, fleet, spec, rate=rate, requests=requests, seed=seed, setting=setting or Setting())
    look(world)
    return world.run()
