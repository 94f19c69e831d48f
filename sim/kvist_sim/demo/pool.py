"""The engines of a demo, started with vLLM's own arguments."""

import functools
import json
import sys
from collections.abc import Sequence

from kvist_sim.http1 import answers
from kvist_sim.launch import HOST, START_SECONDS, EnginePorts
from kvist_sim.processes import Children

from .plan import BLOCK_SIZE, BLOCKS_PER_ENGINE, MODEL_NAME


def engine_command(ports: EnginePorts, model: str) -> list[str]:
    """The command line of one."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.events}",  # vLLM connects to an address without a star
        "replay_endpoint": f"tcp://*:{ports.replay}",
    }
    return [
        *(sys.executable, "-m", "kvist_sim.engine", "--model", model, "--served-model-name", MODEL_NAME),
        *("--host", HOST, "--port", str(ports.http), "--block-size", str(BLOCK_SIZE)),
        *("--num-gpu-blocks-override", str(BLOCKS_PER_ENGINE), "--enable-prompt-tokens-details"),
        *("--kv-events-config", json.dumps(events)),
    ]


async def start_engines(children: Children, engines: Sequence[EnginePorts], model: str) -> None:
    """Start them all and wait until all answer. Raises ChildFailedError."""
    started = [
        children.start(f"engine-{number}", engine_command(ports, model))
        for number, ports in enumerate(engines)
    ]
    for child, ports in zip(started, engines, strict=True):
        await children.ready(child, functools.partial(answers, HOST, ports.http, "/health"), START_SECONDS)
