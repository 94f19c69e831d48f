"""Cost of picker replicas to each other.

Run as ``python -m kvist_sim.bench.replicas [--blocks N] [--rate N] [--seconds S]``.

Part one: a picker learns a large index from the engines' rings; another one starts beside it and takes its
snapshot, while the first is asked at a steady rate. Part two: three pickers are asked together, and one of
them gets the access log of all requests; once as independent pickers, once as replicas.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from kvist_epp.engines.vllm.kv_events import Batch, Removed, Stored
from kvist_epp.prompt.model import Model
from kvist_sim import launch
from kvist_sim import model as model_files
from kvist_sim.bench.harness.direct import Direct, SteadyClient
from kvist_sim.bench.harness.machine import measured_on
from kvist_sim.bench.harness.proof import write
from kvist_sim.http1 import get
from kvist_sim.ports import free_ports
from kvist_sim.processes import Children
from kvist_sim.publisher import Publisher, PublisherConfig

ENGINES: Final = 16
REPLICAS: Final = 3
BLOCK_SIZE: Final = 16
BATCH_BLOCKS: Final = 64
CHAIN_BLOCKS: Final = 640
"""A prompt of 10,000 tokens."""
PICKS_PER_SECOND: Final = 100.0
"""Rate of requests to the replica that sends its snapshot."""
WARM: Final = "--warmup-timeout=300"
Say = Callable[[str], None]
"""Gets each line of the result."""


@dataclass(frozen=True, slots=True)
class ReplicasPlan:
    """Sizes and rates of the measurement."""

    blocks: int
    """Distinct blocks in the index."""
    rate: float
    """Requests a second, over all replicas."""
    seconds: float


@dataclass(slots=True)
class ReplicasBench:
    """Engines that are running, and pickers at fixed ports."""

    children: Children
    file: Path
    peer_ports: Sequence[int]

    async def start(self, number: int, *, peers: bool) -> tuple[launch.Picker, float]:
        """Start a picker; return it and the seconds until it was ready."""
        named = ",".join(f"{launch.HOST}:{port}" for port in self.peer_ports)
        together = [f"--replicas={named}", f"--replica-port={self.peer_ports[number]}"] if peers else []
        began = time.perf_counter()
        picker = await launch.start_picker(
            self.children,
            self.file,
            str(model_files.folder()),
            name=f"picker-{number}-{'replica' if peers else 'alone'}",
            arguments=["--log-requests=false", WARM, *together],
        )
        return picker, time.perf_counter() - began

    async def stop(self, *pickers: launch.Picker) -> None:
        """Stop the given pickers."""
        for picker in pickers:
            picker.child.process.kill()
            await asyncio.to_thread(picker.child.process.wait)


@asynccontextmanager
async def bench(folder: Path, blocks: int) -> AsyncIterator[ReplicasBench]:
    """Start sixteen engines that answer at once, and their KV events: ``blocks`` blocks in their rings."""
    engines = launch.engine_ports(ENGINES)
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder))
        upstream = [sys.executable, "-m", "kvist_sim.bench.harness.upstream", *(str(e.http) for e in engines)]
        children.start("upstream", upstream)
        spec, ready = folder / "events.json", folder / "events.ready"
        sockets = [(e.events, e.replay) for e in engines]
        spec.write_text(json.dumps({"sockets": sockets, "blocks": blocks, "ready": str(ready)}))
        events = children.start("events", [sys.executable, "-m", __spec__.name, "--events", str(spec)])

        async def published() -> bool:
            return ready.exists()

        await children.ready(events, published, 300)
        file = folder / "endpoints.json"
        file.write_text(json.dumps(launch.endpoints_file(engines)))
        yield ReplicasBench(children, file, free_ports(REPLICAS))


async def snapshot(plan: ReplicasPlan, say: Say) -> None:
    """Measure the snapshot: part one."""
    with tempfile.TemporaryDirectory() as folder:
        async with bench(Path(folder), plan.blocks) as running:
            first, replayed = await running.start(0, peers=True)
            say(f"by replay: ready after {replayed:.1f} s, {await _blocks(first):,} blocks")
            quiet = await _picks(first, 10.0)
            asking = asyncio.create_task(_picks(first, 25.0))
            second, ready = await running.start(1, peers=True)
            busy = await asking
            took = (await _page(second, "/debug/peers"))["snapshot"]
            _, nothing = await running.start(2, peers=False)
            say(
                f"by snapshot: ready after {ready:.1f} s with {await _blocks(second):,} blocks; "
                f"{took['blocks']:,} of {took['publishers']} publishers came in {took['seconds']:.1f} s; "
                f"{second.child.cpu_seconds():.1f} s of CPU in all"
            )
            say(f"by replay again, no snapshot requested: ready after {nothing:.1f} s")
            say(f"picks of the snapshot's sender, ms: idle {_quantiles(quiet)}; sending {_quantiles(busy)}")


async def gossip(plan: ReplicasPlan, say: Say) -> None:
    """Measure the exchange of load: part two."""
    with tempfile.TemporaryDirectory() as folder:
        async with bench(Path(folder), 10_000) as running:
            for peers in (False, True):
                pickers = [(await running.start(number, peers=peers))[0] for number in range(REPLICAS)]
                await asyncio.sleep(3)
                kind = "replicas" if peers else "strangers"
                for ends in ("to each its own", "all to one")[: 2 if peers else 1]:
                    say(f"{kind}, ends reported {ends}: {await _cost(pickers, plan, ends == 'all to one')}")
                say(f"  idle {await _idle(pickers):.2%} of a core each")
                for picker in pickers if peers else ():
                    counts = [await launch.metric(picker, f"kvist_epp_gossip_{name}") for name in _COUNTERS]
                    say("  " + ", ".join(f"{n} {v:g}" for n, v in zip(_COUNTERS, counts, strict=True)))
                await running.stop(*pickers)


async def _cost(pickers: Sequence[launch.Picker], plan: ReplicasPlan, to_one: bool) -> str:
    groups = [pickers] if to_one else [[picker] for picker in pickers]
    rate = plan.rate / len(groups)
    await asyncio.gather(*(_asked(group, rate, 3.0) for group in groups))
    before = sum(picker.child.cpu_seconds() for picker in pickers)
    clients = await asyncio.gather(*(_asked(group, rate, plan.seconds) for group in groups))
    spent = sum(picker.child.cpu_seconds() for picker in pickers) - before
    sent = sum(client.sent for client in clients)
    latencies = _quantiles([seconds for client in clients for seconds in client.latencies])
    return f"{spent / sent * 1e6:.0f} us of CPU a request, {sent} requests; picks, ms: {latencies}"


_COUNTERS: Final = ("messages_total", "bytes_total", "passed_entries_total", "lag_seconds")


async def _asked(pickers: Sequence[launch.Picker], rate: float, seconds: float) -> SteadyClient:
    async with AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(await Direct.open(launch.HOST, picker.grpc_port))
            for picker in pickers
        ]
        client = SteadyClient(connections, rate)
        await client.run(seconds)
        await asyncio.sleep(0.5)
    return client


async def _picks(picker: launch.Picker, seconds: float) -> Sequence[float]:
    return (await _asked([picker], PICKS_PER_SECOND, seconds)).latencies


async def _idle(pickers: Sequence[launch.Picker]) -> float:
    await asyncio.sleep(2)
    before = sum(picker.child.cpu_seconds() for picker in pickers)
    await asyncio.sleep(5)
    return (sum(picker.child.cpu_seconds() for picker in pickers) - before) / 5 / len(pickers)


async def _page(picker: launch.Picker, path: str) -> Any:
    return json.loads((await get(launch.HOST, picker.metrics_port, path))[1])


async def _blocks(picker: launch.Picker) -> int:
    return int(await launch.metric(picker, "kvist_epp_index_blocks"))


def _quantiles(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return ", ".join(
        f"p{share:g} {ordered[min(int(len(ordered) * share / 100), len(ordered) - 1)] * 1000:.2f}"
        for share in (50, 99, 99.9, 100)
    )


# -- the engines' events, as a process of their own


async def events(spec: dict[str, Any], ready: Callable[[], object]) -> None:
    """Put everything into the rings, say so, answer replays and publish a little more until killed."""
    publishers = [
        Publisher(PublisherConfig(endpoint=f"tcp://*:{events}", replay_endpoint=f"tcp://*:{replay}"))
        for events, replay in spec["sockets"]
    ]
    vocabulary = Model.load(str(model_files.folder())).pieces
    usual = [number for number, piece in enumerate(vocabulary) if piece]
    for number, publisher in enumerate(publishers):
        for batch in batches(random.Random(number), usual, spec["blocks"] // len(publishers)):
            publisher.publish(batch)
    ready()
    rng, number = random.Random("live"), 0
    while True:  # an engine without events after requests would not be trusted
        for publisher in publishers:
            tokens = rng.choices(usual, k=BLOCK_SIZE * 2)
            number += 2
            names = [number, number + 1]
            stored = Stored(hashes=names, parent=None, token_ids=tokens, block_size=BLOCK_SIZE)
            publisher.publish(Batch(ts=time.time(), rank=0, events=[stored, Removed(hashes=names)]))
        await asyncio.sleep(0.2)


def batches(rng: random.Random, ids: Sequence[int], blocks: int) -> Iterator[Batch]:
    """One engine's cache: prompts of random tokens, as prefill announces them."""
    parent: int | None = None
    for start in range(0, blocks, BATCH_BLOCKS):
        names = [rng.getrandbits(64) for _ in range(min(BATCH_BLOCKS, blocks - start))]
        parent = None if start % CHAIN_BLOCKS == 0 else parent
        tokens = rng.choices(ids, k=len(names) * BLOCK_SIZE)
        event = Stored(hashes=names, parent=parent, token_ids=tokens, block_size=BLOCK_SIZE)
        yield Batch(ts=float(start), rank=0, events=[event])
        parent = names[-1]


def main() -> None:
    """Run both parts."""
    import uvloop

    parser = argparse.ArgumentParser(prog="kvist_sim.bench.replicas", description=__doc__)
    parser.add_argument("--blocks", type=int, default=500_000)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", choices=("snapshot", "gossip"))
    parser.add_argument("--write-docs", metavar="FILE", help="write the lines into docs/benchmarks.md")
    parser.add_argument("--events", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.events:
        spec = json.loads(Path(given.events).read_text())
        asyncio.run(events(spec, ready=Path(spec["ready"]).touch))
        return
    plan = ReplicasPlan(given.blocks, given.rate, given.seconds)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    with contextlib.suppress(KeyboardInterrupt):
        for name, part in (("snapshot", snapshot), ("gossip", gossip)):
            if given.only in {None, name}:
                uvloop.run(part(plan, say))
        if given.write_docs:
            write(Path(given.write_docs), "replicas", measured_on(), Text("\n".join(lines)))


if __name__ == "__main__":
    main()
