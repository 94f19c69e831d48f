"""The engines of a demo, started with vLLM's own arguments."""

from collections.abc import Sequence

from kvist_sim import launch
from kvist_sim.launch import EnginePorts
from kvist_sim.processes import Children

from .plan import BLOCK_SIZE, BLOCKS_PER_ENGINE, MODEL_NAME


def engine_command(ports: EnginePorts, model: str) -> list[str]:
    """The command line of one."""
    return launch.engine_command(
        ports, model, served=MODEL_NAME, block_size=BLOCK_SIZE, blocks=BLOCKS_PER_ENGINE
    )


async def start_engines(children: Children, engines: Sequence[EnginePorts], model: str) -> None:
    """Start them all and wait until all answer. Raises ChildFailedError."""
    await launch.start_engines(children, engines, lambda ports: engine_command(ports, model))
