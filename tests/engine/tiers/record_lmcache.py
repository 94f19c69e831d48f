"""Records the KV events of a real vLLM with a server of LMCache, for the golden file of the tests.

    .venv/bin/python -m tests.engine.tiers.record_lmcache [FILE]

Two runs of an engine with a GPU cache of 24 blocks, in the format of ``record_events``. ``engine-driven``:
the engine sends its blocks and reports them, since the server has no log of events (as the operator has it).
``server-driven``: the server reads them and reports them, and its death as well. A third combination, blocks
that the engine sends and a server with a log, reports nothing: its recording would be that of an engine
without LMCache. About two minutes on two idle cores.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from tests.engine import tiny
from tests.engine.tiers.lmcache import SERVER_DRIVEN, LmcacheServer, transfer_config, variables
from tests.engine.tiers.record_events import PROMPT, QUIET_SECONDS, Recorder, tiered_engine, write

GOLDEN = Path(__file__).parents[2] / "epp" / "kvevents" / "golden" / "lmcache-0.5.6.msgpack.gz"
MODES = {
    "engine-driven": ("engine_driven", ()),
    "server-driven": ("lmcache_driven", (*SERVER_DRIVEN, "--kv-event-log-size", "32768")),
}


async def record(model: Path, mode: str) -> dict[str, Any]:
    """Run one engine in this mode; return what is recorded of it."""
    sys.stdout.write(f"{mode}\n")
    transfer, flags = MODES[mode]
    loading = ("--load-format", "safetensors")
    async with aiohttp.ClientSession() as client, LmcacheServer(*flags) as server:
        config = transfer_config(server)
        async with tiered_engine(model, config, *loading, environment=variables(transfer)) as engine:
            recorder = Recorder(engine, client, seed=len(mode))
            await asyncio.sleep(QUIET_SECONDS)  # until the subscription has reached the engine
            await through_the_server(recorder, server)
            recorder.close()
            return {"mode": mode, "steps": recorder.steps}


async def through_the_server(recorder: Recorder, server: LmcacheServer) -> None:
    """Compute a prompt plainly and with a salt, and ask for both on the GPU and on the server; kill it."""
    numbers = random.Random(1)
    prompt = [numbers.randrange(3, 250) for _ in range(PROMPT)]
    for salt in (None, "tenant"):
        await recorder.ask("first", prompt, salt)
        await recorder.ask("device", prompt, salt)
        await recorder.others(2)
        await recorder.ask("server", prompt, salt)
        await recorder.others(2)
    await recorder.ask("other salt", prompt)
    await recorder.others(2)
    await server.stop(signal.SIGKILL)
    await recorder.ask("away", recorder.tokens(PROMPT))
    await recorder.others(2)


async def record_all() -> list[dict[str, Any]]:
    """Record both runs."""
    with tempfile.TemporaryDirectory() as work:
        model = tiny.add_weights(tiny.build("llama3", Path(work) / "model"))
        return [await record(model, mode) for mode in MODES]


if __name__ == "__main__":
    os.nice(10)
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN, asyncio.run(record_all()))
