"""Hundreds of pools with no replicas: how fast the operator creates them, and what they cost at rest.

``python -m tests.cluster.many_pools [--pools 500]`` starts a control plane, applies every object of as many
pools in a bare loop, lets the operator make the same objects for as many other pools, and then counts for a
minute: writes at the API server, CPU and memory of the operator. Ends with 1 when an aim is missed.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
from rich.text import Text
from tests.cluster.client import Client, client, namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operated import Operator, account, administrator, operating, pool, with_crd
from tests.crd.cases import planned

from kvist_operator.apply import stamped
from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.cluster_api import Json
from kvist_operator.cluster.kinds import POOL
from kvist_operator.manifests import Site, render
from kvist_operator.manifests.object_names import ObjectNames
from kvist_operator.reconcile import certificate_rotation
from kvist_operator.reconcile.certificate_secret import config_map, secret
from kvist_operator.spec import read_pool
from kvist_operator.spec.pool import MANAGED
from kvist_sim.bench.harness.machine import measured_on
from kvist_sim.bench.harness.proof import write

SPACES = 10
REST_SECONDS = 60.0
SETTLE_SECONDS = 5.0
WRITES = re.compile(
    r'apiserver_request_total\{.*,resource="(?P<resource>[^"]*)".*'
    r'verb="(?P<verb>POST|PUT|PATCH|APPLY|DELETE|DELETECOLLECTION)"'
)
MOST_CPU, MOST_MIB, LEAST_SPEED = 0.03, 200.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Measured figures of a run."""

    pools: int
    objects: int
    """Of all pools together, the pools themselves not counted."""
    bare_seconds: float
    """The loop alone, one apply after another."""
    operator_seconds: float
    """From the start of its process to the last pool's status."""
    speed: float
    """Of the operator by that of the loop."""
    operator_cpu_seconds: float
    """Of its own, until then."""
    writes_per_minute: float
    """At rest, of everybody at the API server."""
    written: dict[str, float]
    """Which these were."""
    cpu: float
    """At rest, of one core."""
    mib: float
    """Resident, at rest."""

    def misses(self) -> list[str]:
        """Aims that are not reached."""
        found = {
            f"speed {self.speed:.2f} is under {LEAST_SPEED}": self.speed < LEAST_SPEED,
            f"{self.writes_per_minute:g} writes a minute at rest": self.writes_per_minute > 0,
            f"{self.cpu:.1%} CPU at rest": self.cpu >= MOST_CPU,
            f"{self.mib:.0f} MiB": self.mib >= MOST_MIB,
        }
        return [text for text, missed in found.items() if missed]


def names(count: int) -> Iterator[tuple[str, str]]:
    """Namespace and name of each pool."""
    for number in range(count):
        yield f"s{number % SPACES}", f"pool-{number}"


async def measured(count: int, folder: Path, flags: Sequence[str]) -> Figures:
    """All of it, on a control plane of its own."""
    async with (
        ControlPlane(folder) as plane,
        client(plane) as admin,
        administrator(plane) as server,
    ):
        await with_crd(admin)
        for number in range(SPACES):
            await namespace(admin, f"s{number}")
            await namespace(admin, f"bare-s{number}")
        kubeconfig = await account(plane, admin, "default")
        bare, objects = await _bare(server, count)
        for space, name in names(count):
            await server.apply(pool(name, space))
        started = time.perf_counter()
        async with operating(folder, kubeconfig, *flags) as operator:
            await _reconciled(server, operator, count)
            seconds = time.perf_counter() - started
            spent = operator.child.cpu_seconds()
            written, cpu, mib = await _at_rest(admin, operator)
    return Figures(
        pools=count,
        objects=objects,
        bare_seconds=round(bare, 2),
        operator_seconds=round(seconds, 2),
        speed=round(bare / seconds, 3),
        operator_cpu_seconds=round(spent, 2),
        writes_per_minute=round(sum(written.values()), 2),
        written=written,
        cpu=round(cpu, 4),
        mib=round(mib, 1),
    )


async def _bare(server: ApiServer, count: int) -> tuple[float, int]:
    """Seconds of a loop that does nothing but apply the same objects, and how many they are."""
    every = [each for space, name in names(count) for each in _objects(name, f"bare-{space}")]
    started = time.perf_counter()
    for each in every:
        await server.apply(each)
    return time.perf_counter() - started, len(every)


def _objects(name: str, space: str) -> list[Json]:
    """Return the objects that the operator would create, without an owner and with another manager's
    label."""
    resource = pool(name, space)
    made = read_pool(resource)
    of = ObjectNames.of(made)
    bundle = certificate_rotation.issued(certificate_rotation.names_of(of), datetime.now(UTC))
    more = [secret(made, of, bundle.secret), config_map(made, of, bundle.authorities)]
    rendered = render(made, planned(resource), Site(apis=frozenset())).objects
    found = [stamped(each) for each in (*more, *rendered)]
    for each in found:
        each["metadata"]["labels"] = {**each["metadata"]["labels"], MANAGED: "nobody"}
    return found


async def _reconciled(server: ApiServer, operator: Operator, count: int) -> None:
    """Wait until every pool has a status with a plan, which is written last."""
    while True:
        found = await server.find(POOL)
        done = sum("plan" in (each.get("status") or {}) for each in found)
        if done == count:
            return
        operator.child.check()
        await asyncio.sleep(0.5)


async def _at_rest(admin: Client, operator: Operator) -> tuple[dict[str, float], float, float]:
    """Writes per minute by verb and resource, CPU as a share of a core, and MiB."""
    await asyncio.sleep(SETTLE_SECONDS)
    process = psutil.Process(operator.child.pid)
    before, cpu, started = await _writes(admin), operator.child.cpu_seconds(), time.perf_counter()
    await asyncio.sleep(REST_SECONDS)
    seconds = time.perf_counter() - started
    spent = operator.child.cpu_seconds() - cpu
    after = await _writes(admin)
    written = {key: (n - before[key]) * 60 / seconds for key, n in after.items() if n > before[key]}
    return written, spent / seconds, process.memory_info().rss / 2**20


async def _writes(admin: Client) -> Counter[str]:
    """Return the writing requests that the API server has counted, without those for leases."""
    async with admin.session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        told = WRITES.match(line)
        if told and told["resource"] != "leases":
            found[f"{told['verb']} {told['resource']}"] += round(float(line.rpartition(" ")[2]))
    return found


def main() -> int:
    """Print the figures, and write them into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pools", type=int, default=500)
    parser.add_argument("--write-docs", metavar="FILE", help="write the table into docs/benchmarks.md")
    parser.add_argument("flags", nargs="*", help="of the operator, after --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measured(given.pools, Path(folder), given.flags))
    sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
    if given.write_docs:
        rows = "\n".join(f"{name:<28} {value}" for name, value in asdict(found).items())
        write(Path(given.write_docs), "operator", measured_on(), Text(rows))
    for miss in found.misses():
        sys.stdout.write(f"missed: {miss}\n")
    return 1 if found.misses() else 0


if __name__ == "__main__":
    raise SystemExit(main())
