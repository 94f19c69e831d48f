"""CPU that a picker of a thousand endpoints needs, and that each of several replicas needs.

Load is a part of the goal, which leaves the cores some headroom: CPU is read at rest, with requests, with
events, and with both, of every replica. A request, or a block, costs less the more come in a second, so that
what the goal needs is computed from high rates: 800 requests/s over all replicas, and the events of the goal
for one replica without requests.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist_sim import launch
from kvist_sim import model as model_files
from kvist_sim.bench.harness.direct import Direct, SteadyClient
from kvist_sim.bench.rest.fleet import EVENT_BLOCKS
from kvist_sim.bench.rest.idle import QUIET_SECONDS, fleet
from kvist_sim.load import percentile
from kvist_sim.ports import free_ports
from kvist_sim.processes import Children

ENDPOINTS: Final = 1_000
REQUESTS: Final = 2_000.0
"""Requests a second, over all replicas: the goal."""
BLOCKS: Final = 200_000.0
"""Blocks a second that engines store, and as many that they evict: the goal."""
REQUESTS_PART: Final = 0.4
"""Share of the goal's requests that is offered."""
BLOCKS_PART: Final = 0.1
"""Share of the goal's blocks that is offered."""
EVENTS: Final = "kvist_epp_index_events_total"
SETTLE_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Scale:
    """CPU of one replica, the mean of all; shares of a core."""

    replicas: int
    rest: float
    events: float
    """With events only."""
    requests: float
    """With requests only."""
    both: float
    blocks: float
    """Blocks per second that each replica took in, in the window with events only."""
    most_blocks: float
    """Blocks that one took in for each second of CPU when the goal was offered; 0: not measured."""
    answered: float
    """Requests per second that all replicas answered, in the window with both."""
    refused: int
    p99: float
    """Seconds to a pick, in the window with both."""

    @property
    def per_block(self) -> float:
        """CPU seconds per block."""
        return (self.events - self.rest) / self.blocks

    @property
    def per_request(self) -> float:
        """CPU seconds of all replicas together per request, without events."""
        return (self.requests - self.rest) * self.replicas / (REQUESTS_PART * REQUESTS)

    @property
    def goal_requests(self) -> float:
        """Share of a core that requests need in each replica at the goal."""
        return self.per_request * REQUESTS / self.replicas


async def measure(count: int, *, seconds: float, folder: Path) -> Scale:
    """Run a pool with so many replicas. Raises ChildFailedError."""
    async with contextlib.AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder, grace_seconds=10))
        file = await stack.enter_async_context(fleet(children, folder, ENDPOINTS))
        rate = folder / f"fleet-{ENDPOINTS}.rate"
        pickers = await _pickers(children, file, count)
        await asyncio.sleep(QUIET_SECONDS)
        rest = await _cpu(pickers, asyncio.sleep(seconds), seconds)
        _, requests = await _asked(pickers, seconds)
        rate.write_text(f"{BLOCKS_PART * BLOCKS}")
        await asyncio.sleep(SETTLE_SECONDS)
        clock = asyncio.get_running_loop().time
        before, began = await _stored(pickers), clock()
        events = await _cpu(pickers, asyncio.sleep(seconds), seconds)
        blocks = (await _stored(pickers) - before) * EVENT_BLOCKS / (clock() - began) / count
        clients, both = await _asked(pickers, seconds)
        rate.write_text(f"{BLOCKS if count == 1 else 0.0}")
        most = await _most(pickers[0], seconds) if count == 1 else 0.0
        children.check()
    latencies = list(itertools.chain.from_iterable(client.latencies for client in clients))
    sent = sum(client.sent for client in clients)
    return Scale(
        replicas=count,
        rest=rest,
        events=events,
        requests=requests,
        both=both,
        blocks=blocks,
        most_blocks=most,
        answered=len(latencies) / seconds,
        refused=sent - len(latencies),
        p99=percentile(latencies, 0.99),
    )


async def _pickers(children: Children, file: Path, count: int) -> list[launch.Picker]:
    """Start replicas that exchange their load; one alone has none to exchange it with."""
    ports = free_ports(count)
    named = ",".join(f"{launch.HOST}:{port}" for port in ports)
    return [
        await launch.start_picker(
            children,
            file,
            str(model_files.folder()),
            name=f"picker-{number}",
            arguments=[
                "--log-requests=false",
                *([f"--replicas={named}", f"--replica-port={port}"] if count > 1 else []),
            ],
        )
        for number, port in enumerate(ports)
    ]


async def _cpu(pickers: Sequence[launch.Picker], work: Awaitable[object], seconds: float) -> float:
    """Return the CPU that each picker uses during the work, in the mean, as a share of a core."""
    before = sum(picker.child.cpu_seconds() for picker in pickers)
    await work
    return (sum(picker.child.cpu_seconds() for picker in pickers) - before) / seconds / len(pickers)


async def _asked(pickers: Sequence[launch.Picker], seconds: float) -> tuple[list[SteadyClient], float]:
    """Ask every picker its part of the requests; return the clients, and the CPU of each picker."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for picker in pickers:
            connection = await Direct.open(launch.HOST, picker.grpc_port)
            await stack.enter_async_context(connection)
            clients.append(SteadyClient([connection], REQUESTS_PART * REQUESTS / len(pickers)))
        share = await _cpu(pickers, asyncio.gather(*(client.run(seconds) for client in clients)), seconds)
    return clients, share


async def _most(picker: launch.Picker, seconds: float) -> float:
    """Return the blocks that the picker takes in for a second of CPU, while the goal's are offered."""
    await asyncio.sleep(SETTLE_SECONDS)
    before, spent = await _stored([picker]), picker.child.cpu_seconds()
    await asyncio.sleep(seconds)
    spent = picker.child.cpu_seconds() - spent
    return (await _stored([picker]) - before) * EVENT_BLOCKS / spent


async def _stored(pickers: Sequence[launch.Picker]) -> float:
    return sum([await launch.metric(picker, EVENTS, 'type="stored"') for picker in pickers])
