"""Engines of both roles for the benchmark, in one process, and their picker's view of them."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist_sim import launch
from kvist_sim.processes import ChildFailedError, Children

EAGER: Final = (sys.executable, "-m", "kvist_sim.eager_picker")
SPLITS: Final = ("kvist_epp_disaggregation_decisions_total", 'decision="split"')
FALLBACKS: Final = "kvist_epp_disaggregation_fallbacks_total"
WARM_PAIRS: Final = ("kvist_epp_disaggregation_pairs", 'state="warm"')
PAIR_SECONDS: Final = 90.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines; the first ones compute prompts, the others answer."""

    prefill: Sequence[launch.EnginePorts]
    decode: Sequence[launch.EnginePorts]

    @property
    def engines(self) -> list[launch.EnginePorts]:
        """All of them."""
        return [*self.prefill, *self.decode]

    @property
    def hostports(self) -> list[str]:
        """Addresses of all engines."""
        return [engine.hostport for engine in self.engines]

    @property
    def endpoints(self) -> dict[str, Any]:
        """Content of the picker's endpoints file, with roles."""
        found = launch.endpoints_file(self.engines)
        for number, row in enumerate(found["endpoints"]):
            row["labels"] = {"kvist.dev/role": "prefill" if number < len(self.prefill) else "decode"}
        return found


def start_pool(children: Children, prefill: int, decode: int, leg_seconds: float) -> Pool:
    """Start engines whose leg 1 takes so many seconds. Raises ChildFailedError."""
    engines = launch.engine_ports(prefill + decode)
    command = [sys.executable, "-m", "kvist_sim.bench.disaggregation.leg_engines", f"{leg_seconds:g}"]
    children.start("engines", [*command, *(str(engine.http) for engine in engines)])
    return Pool(engines[:prefill], engines[prefill:])


async def until_paired(picker: launch.Picker, pool: Pool) -> None:
    """Wait until all pairs of engines have met. Raises ChildFailedError."""
    deadline = asyncio.get_running_loop().time() + PAIR_SECONDS
    pairs = len(pool.prefill) * len(pool.decode)
    while (warm := int(await launch.metric(picker, *WARM_PAIRS))) < pairs:
        picker.child.check()
        if asyncio.get_running_loop().time() > deadline:
            what = f"{warm} of {pairs} pairs of engines are connected after {PAIR_SECONDS:.0f} s"
            raise ChildFailedError(picker.child.name, what, picker.child.tail())
        await asyncio.sleep(0.2)
