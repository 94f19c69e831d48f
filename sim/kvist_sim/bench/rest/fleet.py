"""Be a thousand engines at once: ``python -m kvist_sim.bench.rest.fleet SPEC.json``.

Every engine has an address of its own in 127.0.0.0/8 and the same three ports. It serves ``/metrics`` as long
as vLLM's, in which the process's CPU time changes each second, and ``/v1/models``, or has neither page; its
sockets publish KV events and replay them.
"""

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final

import zmq

from kvist_epp.engines.vllm.event_encoder import encode
from kvist_epp.engines.vllm.kv_events import Batch, Event, Removed, Stored
from kvist_epp.prompt.model import Model
from kvist_sim import model as model_files
from kvist_sim.bench.harness.upstream import ANSWER, Upstream, answer
from kvist_sim.engine.metrics import Metrics
from kvist_sim.publisher import Publisher, PublisherConfig

NOT_FOUND: Final = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
MODEL_NAME: Final = "kvist-bench"
BLOCK_SIZE: Final = 16
EVENT_BLOCKS: Final = 64
"""Blocks of a prefill step of 1,024 tokens."""
KEEP: Final = 4
"""Chains of ``EVENT_BLOCKS`` blocks that each cache holds."""
CHAINS: Final = 6
"""Chains that each cache takes in turn."""
BUFFER_STEPS: Final = 100
"""Batches that can be replayed; vLLM has 10,000."""
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
    shows_pages = True
    """It has metrics and a list of models; else both are not found, as on a server that is not vLLM."""
    models = answer(
        b"application/json",
        json.dumps({"data": [{"id": MODEL_NAME, "max_model_len": 131_072}]}).encode(),
    )

    def page(self, head: bytes) -> bytes:
        """Return metrics, models, or the answer to everything else."""
        if not self.shows_pages and head.startswith((b"get /metrics", b"get /v1/models")):
            return NOT_FOUND
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


class Messages:
    """Messages of all engines, made beforehand: each cache takes the same chains again and again.

    A message stores one chain, and evicts the chain stored ``KEEP`` messages before, block by block."""

    def __init__(self, engines: int) -> None:
        vocabulary = Model.load(str(model_files.folder())).pieces
        usual = [number for number, piece in enumerate(vocabulary) if piece]
        rng = random.Random(0)
        bodies = [rng.choices(usual, k=EVENT_BLOCKS * BLOCK_SIZE) for _ in range(BODIES)]
        self._messages: list[list[bytes]] = []
        self._sent = [0] * engines
        for engine in range(engines):
            names = [[rng.getrandbits(64) for _ in range(EVENT_BLOCKS)] for _ in range(CHAINS)]
            first = usual[engine % len(usual)]
            chains = [[first, usual[n], *rng.choice(bodies)[2:]] for n in range(CHAINS)]
            self._messages.append([_message(names, chains[n], n) for n in range(CHAINS)])

    def next(self, engine: int) -> bytes:
        """Return the next message of an engine."""
        number = self._sent[engine]
        self._sent[engine] += 1
        return self._messages[engine][number % CHAINS]


def _message(names: Sequence[list[int]], tokens: list[int], number: int) -> bytes:
    evicted = names[(number - KEEP) % CHAINS]
    events: list[Event] = [Removed(hashes=[name]) for name in reversed(evicted)]
    events.append(Stored(hashes=names[number], parent=None, token_ids=tokens, block_size=BLOCK_SIZE))
    return encode(Batch(ts=float(number), rank=0, events=events))


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


async def publish(engines: Sequence[Publisher], rate: Path) -> None:
    """Publish as many blocks a second as the file says, spread over all engines."""
    messages: Messages | None = None
    clock = asyncio.get_running_loop().time
    order = itertools.cycle(range(len(engines)))
    now, owed, wanted, looked_at = clock(), 0.0, 0.0, -inf
    while True:
        if now - looked_at >= PAGE_SECONDS:
            looked_at, wanted = now, read_rate(rate)
            messages = messages or (Messages(len(engines)) if wanted else None)
            now = clock()
        if messages is not None:
            while owed >= 1:
                number = next(order)
                engines[number].publish_raw(messages.next(number))
                owed -= 1
        await asyncio.sleep(TICK_SECONDS)
        before, now = now, clock()
        owed += (now - before) * wanted / EVENT_BLOCKS


def read_rate(file: Path) -> float:
    """Return the number in the file; 0 without one."""
    return float(file.read_text()) if file.exists() else 0.0


async def serve(spec: dict[str, Any], ready: Callable[[], object]) -> None:
    """Open all sockets, call ``ready``, and publish until killed."""
    count, ports = spec["engines"], FleetPorts(*spec["ports"])
    loop = asyncio.get_running_loop()
    _Engine.shows_pages = spec["pages"]
    changing = asyncio.create_task(_change_page())
    await asyncio.sleep(0)
    await loop.create_server(_Engine, "0.0.0.0", ports.http)  # all loopback addresses
    sockets = publishers(count, ports)
    ready()
    await asyncio.gather(publish(sockets, Path(spec["rate"])), changing)


if __name__ == "__main__":
    import uvloop

    spec = json.loads(Path(sys.argv[1]).read_text())
    uvloop.run(serve(spec, Path(spec["ready"]).touch))
