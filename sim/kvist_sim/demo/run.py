"""Run a demo: for each policy fresh engines, the same warm-up, the same traffic."""

import asyncio
import contextlib
import itertools
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist_sim import envoy, launch, load
from kvist_sim import model as model_files
from kvist_sim.launch import EnginePorts
from kvist_sim.processes import ChildFailedError, Children
from kvist_sim.workloads import Arrival, arrivals, warm_up

from .live_page import LivePage
from .plan import BLOCK_SIZE, BLOCKS_PER_ENGINE, MODEL_NAME, DemoPlan
from .report import KVIST, REFRESH_SECONDS, ROUND_ROBIN, DemoReport, Display, LoadDisplay

POLICIES: Final = (KVIST, ROUND_ROBIN)
PICKS_METRIC: Final = "kvist_epp_requests_total"
METRICS_SECONDS: Final = 3.0
"""Longest wait for the picker's counters, which it updates with a delay."""
PICKER_ARGUMENTS: Final = ("--log-requests=false", "--log-format=text")
"""Flags with which the tail of the picker's log shows errors only."""
PICKED_SHARE: Final = 0.95
"""Smallest acceptable share of picks among the requests sent; some may have been cancelled on the way."""


Finish = Callable[[DemoReport], Awaitable[None]]
"""Awaited with the report while the components of the last run still run."""


async def demo(plan: DemoPlan, display: Display, finish: Finish, page: LivePage | None = None) -> DemoReport:
    """Run both policies. Raises ChildFailedError when a component fails, EnvoyMissingError without Envoy.

    With a ``page``, a picker at its ports runs during both: while Envoy takes turns it only watches the
    engines. kvist's run is the second then, so that its picker can be looked at after the load.
    """
    outcomes: dict[str, list[load.Outcome]] = {}
    for policy in POLICIES if page is None else reversed(POLICIES):
        async with _gateway(plan, policy, display, page) as gateway:
            with display.load(policy, plan.run_seconds) as shown:
                outcomes[policy] = await _load(plan, gateway, shown)
            await gateway.check_picks(len(outcomes[policy]))
            if len(outcomes) == len(POLICIES):
                report = _report(plan, outcomes)
                await finish(report)
    return report


def _report(plan: DemoPlan, outcomes: Mapping[str, Sequence[load.Outcome]]) -> DemoReport:
    begin = plan.warm_up_seconds + plan.lead_in_seconds
    summaries = {
        policy: load.summarise(found, begin=begin, end=begin + plan.seconds)
        for policy, found in outcomes.items()
    }
    return DemoReport(plan, summaries[KVIST], summaries[ROUND_ROBIN], outcomes)


@dataclass(frozen=True, slots=True)
class _Gateway:
    """Envoy's port and the picker."""

    port: int
    """Port of Envoy."""
    children: Children
    picker: launch.Picker | None
    """The picker that Envoy asks; None if it takes turns."""

    async def check_picks(self, requests: int) -> None:
        """Check that the picker has picked: without its answers Envoy silently does round robin.

        Raises ChildFailedError.
        """
        if self.picker is None:
            return
        picked = await launch.metric(self.picker, PICKS_METRIC, 'outcome="picked"')
        if picked < PICKED_SHARE * requests:
            child = self.picker.child
            raise ChildFailedError(
                child.name, f"picked for {picked:.0f} of {requests} requests", child.tail()
            )


def engine_command(ports: EnginePorts, model: str) -> list[str]:
    """Return the command of one engine."""
    return launch.engine_command(
        ports, model, served=MODEL_NAME, block_size=BLOCK_SIZE, blocks=BLOCKS_PER_ENGINE
    )


async def start_engines(children: Children, engines: Sequence[EnginePorts], model: str) -> None:
    """Start all engines and wait until all answer. Raises ChildFailedError."""
    await launch.start_engines(children, engines, lambda ports: engine_command(ports, model))


@contextlib.asynccontextmanager
async def _gateway(
    plan: DemoPlan, policy: str, display: Display, page: LivePage | None
) -> AsyncIterator[_Gateway]:
    """Start all parts of a run in order; stop them at the end."""
    model = str(model_files.folder())
    engines = launch.engine_ports(plan.engines)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvist-demo-")))
        children = await stack.enter_async_context(Children(folder))
        with display.start(policy, f"{plan.engines} simulated engines"):
            await start_engines(children, engines, model)
        picker = None
        if policy == KVIST or page is not None:
            with display.start(policy, "the picker" if policy == KVIST else "a picker that only watches"):
                name = policy.replace(" ", "-")  # which the live page shows
                picker = await _start_picker(children, folder, name, engines, model, page)
        if page is not None:
            page.show(display.say)
        if policy != KVIST:
            picker = None
        with display.start(policy, "Envoy"):
            address = picker.address if picker else None
            gateway = envoy.Gateway(endpoints=[engine.hostport for engine in engines], picker=address)
            proxy = await stack.enter_async_context(envoy.Envoy(envoy.config(gateway)))
        yield _Gateway(proxy.port, children, picker)


async def _start_picker(
    children: Children,
    folder: Path,
    name: str,
    engines: list[launch.EnginePorts],
    model: str,
    page: LivePage | None,
) -> launch.Picker:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(launch.endpoints_file(engines)))
    ports = page.ports if page else None
    return await launch.start_picker(children, file, model, arguments=PICKER_ARGUMENTS, ports=ports)


async def _load(plan: DemoPlan, gateway: _Gateway, shown: LoadDisplay) -> list[load.Outcome]:
    target, state = load.Target(launch.HOST, gateway.port), load.Progress()
    watching = asyncio.create_task(_watch(plan, shown, state, gateway.children))
    running = asyncio.create_task(
        load.open_loop(
            target,
            traffic(plan),
            seconds=plan.run_seconds,
            drain_seconds=plan.drain_seconds,
            progress=state,
        )
    )
    try:
        await asyncio.wait((watching, running), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()  # raises: it only ends when a child has failed
        return await running
    finally:
        for task in (watching, running):
            task.cancel()
        await asyncio.gather(watching, running, return_exceptions=True)
        target.close()


def traffic(plan: DemoPlan) -> Iterator[Arrival]:
    """Return the warm-up, then the traffic; equal for every policy."""
    shape, begin = plan.shape, plan.warm_up_seconds
    first = warm_up(shape, rate=plan.warm_up_rate, seed=plan.seed, model=MODEL_NAME)
    rest = arrivals(shape, rate=plan.rate, seed=plan.seed, model=MODEL_NAME)
    return itertools.chain(first, (Arrival(a.at + begin, a.group, a.turn, a.body) for a in rest))


async def _watch(plan: DemoPlan, shown: LoadDisplay, state: load.Progress, children: Children) -> None:
    """Keep the display up to date. Raises ChildFailedError as soon as a component has died."""
    clock = asyncio.get_running_loop().time
    zero = clock()
    while True:
        elapsed = clock() - zero
        shown.update(min(elapsed, plan.run_seconds), state, _phase(plan, elapsed))
        children.check()
        await asyncio.sleep(REFRESH_SECONDS)


def _phase(plan: DemoPlan, elapsed: float) -> str:
    if elapsed < plan.warm_up_seconds + plan.lead_in_seconds:
        return "warm-up"
    return "measuring" if elapsed < plan.run_seconds else "draining"
