"""Engines that publish, and a client that asks: the other side of the index's ZMQ benchmark.

``python -m kvist_sim.bench.index.publisher publish SPEC`` prints its ports, waits for subscribers, and sends.
``python -m kvist_sim.bench.index.publisher ask SECONDS`` writes the time (8 bytes, monotonic nanoseconds) to
its stdout every few milliseconds, at random.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import zmq

from kvist_epp.engines.vllm.event_encoder import encode
from kvist_epp.engines.vllm.kv_events import Batch, Event, Removed, Stored
from kvist_sim.bench.index.data import BLOCK_SIZE, EVENT_BLOCKS

TOKENS: Final = 30_000
"""Size of the vocabulary."""
POOL: Final = 64
"""Different bodies of events; their first tokens are counted, so that no two chains are equal."""
ASK_SECONDS: Final = 0.004


def payloads(seed: int, count: int, keep: int) -> Iterator[bytes]:
    """Yield the messages of one engine: each stores a new chain, and from the ``keep``-th on evicts the
    oldest.

    As with vLLM, eviction is one event for each block, the last of a chain first. ``keep`` 0: none.
    """
    source = random.Random(seed)
    bodies = [source.choices(range(TOKENS), k=EVENT_BLOCKS * BLOCK_SIZE) for _ in range(POOL)]
    held: list[list[int]] = []
    for number in range(count):
        names = [source.getrandbits(64) for _ in range(EVENT_BLOCKS)]
        tokens = list(bodies[number % POOL])
        tokens[:3] = [seed, number // TOKENS, number % TOKENS]
        events: list[Event] = []
        if keep:
            held.append(names)
            evicted = held.pop(0) if len(held) > keep else []
            events += [Removed(hashes=[name]) for name in reversed(evicted)]
        events.append(Stored(hashes=names, parent=None, token_ids=tokens, block_size=BLOCK_SIZE))
        yield encode(Batch(ts=float(number), rank=0, events=events))


def publish(engines: int, messages: int, keep: int, rate: float) -> None:
    """Send so many messages for each engine, at ``rate`` blocks per second in all (0: at once)."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.XPUB) for _ in range(engines)]
    for socket in sockets:
        socket.setsockopt(zmq.SNDHWM, 0)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
    batches = [list(payloads(number, messages, keep)) for number in range(engines)]
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    for socket in sockets:
        socket.recv()
    begin = time.monotonic()
    for number in range(messages):
        if rate:
            time.sleep(max(0.0, begin + number * engines * EVENT_BLOCKS / rate - time.monotonic()))
        for socket, mine in zip(sockets, batches, strict=True):
            socket.send_multipart([b"", number.to_bytes(8, "big"), mine[number]])
    sys.stdin.read()
    context.destroy(linger=0)


def ask(seconds: float) -> None:
    """Ask at random times, independent of the answers."""
    source, end = random.Random(0), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(source.expovariate(1 / ASK_SECONDS))
        sys.stdout.buffer.write(time.monotonic_ns().to_bytes(8, "big"))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    if sys.argv[1] == "publish":
        spec: dict[str, Any] = json.loads(sys.argv[2])
        publish(**spec)
    else:
        ask(float(sys.argv[2]))
