"""Be a thousand engines at once: ``python -m kvist_sim.bench.rest.fleet SPEC.json``.

Every engine has an address of its own in 127.0.0.0/8 and the same three ports. It serves ``/metrics`` as long
as vLLM's, in which the process's CPU time changes each second, and ``/v1/models``; its sockets publish KV
events and replay them.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq

from kvist_epp.engines.vllm.kv_events import Batch, Event, Removed, Stored, encode
from kvist_epp.prompt.model import Model
from kvist_sim import model as model_files
from kvist_sim.bench.harness.upstream import ANSWER, Upstream, answer
from kvist_sim.engine.metrics import Metrics
from kvist_sim.publisher import Publisher, PublisherConfig

MODEL_NAME: Final = "kvist-bench"
BLOCK_SIZE: Final = 16
EVENT_BLOCKS: Final = 64
"""Blocks of a prefill step of 1,024 tokens."""
KEEP: Final = 4
"""Chains of ``EVENT_BLOCKS`` blocks that each cache holds: from then on each new one evicts the oldest."""
BUFFER_STEPS: Final = 1_000
"""Batches that can be replayed; vLLM has 10,000, which would be the memory of a thousand engines."""
BODIES: Final = 64
PAGE_SECONDS: Final = 1.0
TICK_SECONDS: Final = 0.005
PER_NETWORK: Final = 250


@dataclass(frozen=True, slots=True)
class FleetPorts:
    """Ports of every engine."""

    http: int
    events: int
    replay: int


def address(number: int) -> str:
    """Return the loopback address of an engine."""
    return f"127.1.{number // PER_NETWORK}.{1 + number % PER_NETWORK}"


def endpoints_file(count: int, ports: FleetPorts) -> dict[str, Any]:
    """Return the content of the picker's endpoints file."""
    return {
        "endpoints": [
            {
                "name": f"engine-{number}",
                "namespace": "local",
                "address": address(number),
                "port": ports.http,
                "kvEvents": f"tcp://{address(number)}:{ports.events}",
                "kvReplay": f"tcp://{address(number)}:{ports.replay}",
            }
            for number in range(count)
        ]
    }


class _Engine(Upstream):
    """One connection to any of the engines."""

    __slots__ = ()
    metrics = b""
    models = answer(
        b"application/json",
        json.dumps({"data": [{"id": MODEL_NAME, "max_model_len": 131_072}]}).encode(),
    )

    def page(self, head: bytes) -> bytes:
        """Return metrics, models, or the answer to everything else."""
        if head.startswith(b"get /metrics"):
            return self.metrics
        return self.models if head.startswith(b"get /v1/models") else ANSWER


async def _change_page() -> None:
    """Keep the page as that of an idle engine, whose process uses a little CPU."""
    metrics = Metrics(MODEL_NAME, 131_072, {"block_size": str(BLOCK_SIZE), "num_gpu_blocks": "16384"})
    metrics.rank(0)
    page = metrics.page()
    while True:
        spent = b"process_cpu_seconds_total %.2f\n" % time.process_time()
        _Engine.metrics = answer(b"text/plain; version=0.0.4", spent + page)
        await asyncio.sleep(PAGE_SECONDS)


class Caches:
    """Contents of all caches: each new chain evicts the oldest of the same engine, block by block."""

    def __init__(self, engines: int) -> None:
        vocabulary = Model.load(str(model_files.folder())).pieces
        usual = [number for number, piece in enumerate(vocabulary) if piece]
        self._rng = random.Random(0)
        self._bodies = [self._rng.choices(usual, k=EVENT_BLOCKS * BLOCK_SIZE) for _ in range(BODIES)]
        self._usual = usual
        self._held: list[list[list[int]]] = [[] for _ in range(engines)]
        self._made = 0

    def step(self, engine: int) -> bytes:
        """Return the next message of an engine: one chain more."""
        held, number = self._held[engine], self._made
        self._made += 1
        names = [self._rng.getrandbits(64) for _ in range(EVENT_BLOCKS)]
        tokens = list(self._bodies[number % BODIES])
        tokens[0], tokens[1] = self._token(number), self._token(number // len(self._usual))
        held.append(names)
        evicted = held.pop(0) if len(held) > KEEP else []
        events: list[Event] = [Removed(hashes=[name]) for name in reversed(evicted)]
        events.append(Stored(hashes=names, parent=None, token_ids=tokens, block_size=BLOCK_SIZE))
        return encode(Batch(ts=float(number), rank=0, events=events))

    def _token(self, number: int) -> int:
        return self._usual[number % len(self._usual)]


def publishers(count: int, ports: FleetPorts) -> list[Publisher]:
    """Bind the sockets of all engines."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, int(context.get(zmq.SOCKET_LIMIT)))
    return [
        Publisher(
            PublisherConfig(
                endpoint=f"tcp://{address(number)}:{ports.events}",
                replay_endpoint=f"tcp://{address(number)}:{ports.replay}",
                bind=True,
                buffer_steps=BUFFER_STEPS,
            ),
            context=context,
        )
        for number in range(count)
    ]


async def publish(engines: Sequence[Publisher], rate: float) -> None:
    """Publish ``rate`` blocks a second, spread over all engines; messages are made before they are due."""
    caches = Caches(len(engines))
    clock = asyncio.get_running_loop().time
    begin, sent = clock(), 0
    order = _in_turn(len(engines))
    while True:
        due = int((clock() - begin) * rate / EVENT_BLOCKS)
        for _ in range(due - sent):
            number = next(order)
            engines[number].publish_raw(caches.step(number))
        sent = due
        await asyncio.sleep(TICK_SECONDS)


def _in_turn(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


async def serve(spec: dict[str, Any], ready: Callable[[], object]) -> None:
    """Open all sockets, call ``ready``, and publish until killed."""
    count, ports = spec["engines"], FleetPorts(*spec["ports"])
    loop = asyncio.get_running_loop()
    changing = asyncio.create_task(_change_page())
    await asyncio.sleep(0)
    await loop.create_server(_Engine, "0.0.0.0", ports.http)  # all loopback addresses
    sockets = publishers(count, ports)
    ready()
    if spec["blocks_per_second"]:
        await publish(sockets, spec["blocks_per_second"])
    await changing


if __name__ == "__main__":
    import uvloop

    spec = json.loads(Path(sys.argv[1]).read_text())
    uvloop.run(serve(spec, Path(spec["ready"]).touch))
