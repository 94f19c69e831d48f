"""Replicas as processes: shared load, a death, a farewell, a partition, a copied index, mutual TLS."""

import asyncio
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.data_plane.pickers import Pool, pool
from tests.epp.http2.certificates import Mounted, Pki

from kvist_epp.replicas.remote_load import SILENCE_SECONDS
from kvist_sim.launch import HOST
from kvist_sim.ports import free_ports
from kvist_sim.relays import TcpRelay

pytestmark = pytest.mark.timeout(180)


async def linked(replicas: Pool, *numbers: int) -> None:
    """Wait until each of these pickers follows the others."""
    for number in numbers:
        await replicas.until_states(number, "self", *["followed"] * (len(numbers) - 1))


async def test_load_routed_by_one_counts_for_all_and_ends_for_all(tmp_path: Path) -> None:
    """The access log goes to a replica that did not route the request, and ends it in all ledgers."""
    async with pool(tmp_path) as replicas:
        await replicas.start(0, 1, 2)
        await linked(replicas, 0, 1, 2)
        answer = await replicas.ask(0, "hello " * 300)
        chosen = await replicas.ask(0, "hello " * 300, **{"x-session-id": "a client's own"})
        await replicas.all_have(2, 0, 1, 2)
        fleet = await replicas.page(1, "/debug/fleet")
        await replicas.logged(2, answer, chosen)
        await replicas.all_have(0, 0, 1, 2)

        assert sum(endpoint["backlog_tokens"] for endpoint in fleet["endpoints"]) > 0
        assert await metric(replicas, 2, 'kvist_epp_gossip_passed_entries_total{direction="sent"}') >= 2
        assert await metric(replicas, 0, 'kvist_epp_requests_ended_total{source="access-log"}') == 2


async def test_a_killed_replica_is_dropped_and_its_successor_followed(tmp_path: Path) -> None:
    """After SIGKILL its requests leave the ledgers after a bounded silence; a new process counts at once."""
    async with pool(tmp_path) as replicas:
        await replicas.start(0, 1, 2)
        await linked(replicas, 0, 1, 2)
        await replicas.ask(0, "hello " * 300)
        await replicas.all_have(1, 1, 2)
        await replicas.end(0, signal.SIGKILL)
        await replicas.all_have(0, 1, 2)
        states = [await replica_states(replicas, number) for number in (1, 2)]
        await replicas.start(0)
        await linked(replicas, 0, 1, 2)
        await replicas.ask(0, "hello " * 300)
        await replicas.all_have(1, 0, 1, 2)

        assert states == [["heard", "silent"], ["heard", "silent"]]


async def test_requests_of_a_replica_that_shuts_down_stay_in_the_backlog(tmp_path: Path) -> None:
    """After SIGTERM its requests continue, so they count until an access-log entry reaches any replica."""
    async with pool(tmp_path, more=lambda _: ("--drain-delay=0",)) as replicas:
        await replicas.start(0, 1, 2)
        await linked(replicas, 0, 1, 2)
        answer = await replicas.ask(0, "hello " * 300)
        status = await replicas.end(0, signal.SIGTERM)
        await asyncio.sleep(SILENCE_SECONDS + 1)
        kept = [await replicas.requests(number) for number in (1, 2)]
        states = await replica_states(replicas, 1)
        await replicas.logged(2, answer)
        await replicas.all_have(0, 1, 2)

        assert (status, kept, states) == (0, [1, 1], ["heard", "left"])


async def test_a_partition_loses_the_load_of_the_other_replica_until_it_heals(tmp_path: Path) -> None:
    """Packets are lost in both directions while connections stay: each replica continues with its own
    load."""
    ports = free_ports(2)
    async with AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(TcpRelay(port)) for port in ports]

        def other(number: int, _ports: Sequence[int]) -> str:
            return f"{HOST}:{relays[1 - number].port}"

        replicas = await stack.enter_async_context(pool(tmp_path, pickers=2, addresses=other, ports=ports))
        await replicas.start(0, 1)
        for number in (0, 1):
            await replicas.until_states(number, "followed")
        await replicas.ask(0, "hello " * 300)
        await replicas.ask(1, "hello " * 300)
        await replicas.all_have(2, 0, 1)
        for relay in relays:
            relay.part()
        await replicas.all_have(1, 0, 1)
        await replicas.ask(0, "hello " * 300)
        apart = [await replicas.requests(number) for number in (0, 1)]
        for relay in relays:
            relay.heal()
        await replicas.all_have(3, 0, 1)

        assert apart == [2, 1]


async def test_a_replica_that_starts_copies_the_index_of_another(tmp_path: Path) -> None:
    """The new replica is ready with the same blocks, and the engines replay only what came since."""
    async with pool(tmp_path, pickers=2) as replicas:
        await replicas.start(0)
        texts = [f"story {number} " + f"word{number} " * 200 for number in range(12)]
        for text in texts:
            answer = await replicas.ask(0, text)
            await replicas.serve(answer, text)
            await replicas.logged(0, answer)
        await replicas.start(1)
        snapshot = (await replicas.replication(1))["snapshot"]
        publishers = [(await replicas.page(number, "/debug/index"))["publishers"] for number in (0, 1)]
        matched = [await explained(replicas, number, texts) for number in (0, 1)]
        await replicas.serve(await replicas.ask(1, "something new " * 100), "something new " * 100)
        await both_hold(replicas, more_than=sum(held(publishers[0])))

        assert (snapshot["taken"], snapshot["failed"], snapshot["publishers"]) == (1, 0, 2)
        assert snapshot["blocks"] == sum(held(publishers[0])) > 200
        assert held(publishers[0]) == held(publishers[1])
        assert matched[0] == matched[1]
        assert min(matched[0]) > 0
        for counters in publishers[1].values():
            assert (counters["stored"], counters["resets"], counters["warm"]) == (0, 0, True)


async def test_replicas_speak_mutual_tls_and_refuse_another_authority(tmp_path: Path) -> None:
    """Both sides have certificates of one authority; a replica with another one is neither followed nor
    follows."""
    good, bad = Pki("good"), Pki("bad")
    for number, pki in enumerate((good, good, bad)):
        Mounted(tmp_path / f"certificates-{number}").write(*pki.pair("localhost"), ca=pki.pem)

    def by_name(_number: int, ports: Sequence[int]) -> str:
        return ",".join(f"localhost:{port}" for port in ports)

    def certified(number: int) -> Sequence[str]:
        return (f"--replica-cert-path={tmp_path}/certificates-{number}",)

    async with pool(tmp_path, addresses=by_name, more=certified) as replicas:
        await replicas.start(0, 1, 2)
        await replicas.until_states(0, "self", "followed", "broken")
        await replicas.until_states(2, "self", "broken", "broken")
        await replicas.ask(0, "hello " * 300)
        await replicas.ask(2, "hello " * 300)
        await replicas.all_have(1, 1)
        counts = [await replicas.requests(number) for number in (0, 1, 2)]
        problems = [one["problem"] for one in (await replicas.replication(2))["addresses"] if one["problem"]]

        assert counts == [1, 1, 1]
        assert list((await replicas.replication(1))["followers"]) == [
            (await replicas.replication(0))["replica"]
        ]
        assert all("unavailable" in problem for problem in problems)


async def metric(replicas: Pool, number: int, series: str) -> float:
    """Return one series of a picker's metrics."""
    url = f"http://{HOST}:{replicas.ports[number].metrics}/metrics"
    async with replicas.client.get(url) as response:
        lines = (await response.text()).splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))


async def replica_states(replicas: Pool, number: int) -> list[str]:
    """Return the states of the other replicas, as a picker sees them."""
    return sorted(one["state"] for one in (await replicas.replication(number))["replicas"])


async def explained(replicas: Pool, number: int, texts: Sequence[str]) -> list[int]:
    """Return the most tokens matched of each text, by ``/debug/pick``."""
    url = f"http://{HOST}:{replicas.ports[number].metrics}/debug/pick"
    best = []
    for text in texts:
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        async with replicas.client.post(url, json=body) as response:
            document = await response.json()
        best.append(max(endpoint["matched_tokens"] for endpoint in document["endpoints"]))
    return best


def held(publishers: Any) -> list[int]:
    """Return the number of blocks of each publisher."""
    return [publishers[name]["held_blocks"].get("GPU", 0) for name in sorted(publishers)]


async def both_hold(replicas: Pool, *, more_than: int) -> None:
    """Wait until both pickers' indexes have grown alike."""
    while True:
        found = [held((await replicas.page(number, "/debug/index"))["publishers"]) for number in (0, 1)]
        if found[0] == found[1] and sum(found[0]) > more_than:
            return
        await asyncio.sleep(0.05)
