"""The engines of a demo, started with vLLM's own arguments."""

import functools
from collections.abc import Sequence

from kvist_sim import launch
from kvist_sim.http1 import answers
from kvist_sim.launch import HOST, START_SECONDS, EnginePorts
from kvist_sim.processes import Children

from .plan import BLOCK_SIZE, BLOCKS_PER_ENGINE, MODEL_NAME


def engine_command(ports: EnginePorts, model: str) -> list[str]:
    """The command line of one."""
    return launch.engine_command(
        ports, model, served=MODEL_NAME, block_size=BLOCK_SIZE, blocks=BLOCKS_PER_ENGINE
    )


async def start_engines(children: Children, engines: Sequence[EnginePorts], model: str) -> None:
    """Start them all and wait until all answer. Raises ChildFailedError."""
    started = [
        children.start(f"engine-{number}", engine_command(ports, model))
        for number, ports in enumerate(engines)
    ]
    for child, ports in zip(started, engines, strict=True):
        await children.ready(child, functools.partial(answers, HOST, ports.http, "/health"), START_SECONDS)
