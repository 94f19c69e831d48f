"""Runbooks about engines and load followed on a real cluster, as in ``test_runbooks`` (``make
bench-alerts``)."""

import asyncio
import re
import signal
from typing import Any, Final

import pytest
from monitoring.alerts.cache import HIT_RATIO
from monitoring.alerts.latency import QUEUED_FIRST_TOKEN, WAITING
from tests.cluster import observed
from tests.cluster.faults import processes, send
from tests.cluster.observed import Observed, long_requests, scaled

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
Json = dict[str, Any]
seen, rested = observed.seen, observed.rested
LIGHT: Final = (6, 100)
"""Clients and output tokens that leave most of both engines' batches free."""
LIGHT_AN_HOUR_AGO: Final = f"({QUEUED_FIRST_TOKEN} offset 1h) < 0.2 and ({WAITING} offset 1h) < 1"
HEAVY: Final = (48, 100)
"""Half as many again as both batches hold; four engines have room for all."""
RULES: Final = "You are the assistant of a library. Answer in one sentence, and name the shelf. " * 8
CRASHES: Final = 4


async def test_a_pool_at_zero_serves_again(seen: Observed) -> None:
    """A request to a pool without replicas waits and raises the alert; replicas end it and serve that very
    request."""
    await scaled(seen, 0)

    async def empty() -> bool:
        return not await seen.pods("engine")

    await seen.twig.room.until(empty, "no engine")
    asked = asyncio.create_task(seen.twig.ask("Is there an engine?"))
    await seen.fires("KvistNoReadyEndpoint")
    await scaled(seen, 2)
    await seen.ends("KvistNoReadyEndpoint")
    assert (await asked)["choices"]
    await seen.twig.until_ready()


async def test_preemptions_end_with_fewer_sequences(seen: Observed) -> None:
    """Batches that outgrow the KV cache are preempted; the number of sequences that the pool's advice names
    ends that under the same load."""

    async def advised() -> int:
        advice = " ".join((await seen.twig.get())["status"].get("advice", ()))
        found = re.search(r"Preemptions: .*? Set spec.engine.maxNumSeqs to (\d+)", advice)
        return int(found[1]) if found else 0

    async with long_requests(seen, 24, 300), seen.twig.load():
        await seen.fires("KvistPreemptions", seconds=90)
        number = await seen.twig.room.until(advised, "advice with a number")
        await seen.twig.patch(engine={"maxNumSeqs": number})
        await seen.twig.until_ready()
        await seen.ends("KvistPreemptions", seconds=90)
    await seen.twig.patch(engine={"maxNumSeqs": 16})
    await seen.twig.until_ready()


async def test_an_overloaded_pool_gets_replicas(seen: Observed) -> None:
    """Eight times the load of an hour ago waits in the pickers and raises the alert; twice the replicas end
    it."""
    async with long_requests(seen, *LIGHT):
        await seen.until(LIGHT_AN_HOUR_AGO, "an hour of light load", seconds=90)
    async with long_requests(seen, *HEAVY):
        await seen.fires("KvistTimeToFirstTokenRising")
        await scaled(seen, 4)
        await seen.ends("KvistTimeToFirstTokenRising")
        await seen.until(f"{WAITING} < 1", "no requests that wait")
    await scaled(seen, 2)
    await seen.twig.until_ready()


async def test_refused_requests_are_served_by_more_replicas(seen: Observed) -> None:
    """Requests whose time in the queue is over are refused, and the outcome says so; twice the replicas serve
    them. The queue's bound, too, is in the motion of the rules."""
    await seen.twig.patch(picker={"env": [{"name": "KVIST_EPP_QUEUE_SECONDS", "value": "0.5"}]})
    await seen.twig.until_ready()
    async with long_requests(seen, *HEAVY):
        await seen.fires("KvistRequestsRefused")
        await seen.until(
            'rate(kvist_epp_requests_total{outcome="rejected-ttl-expired"}[10m]) > 0', "requests too late"
        )
        await scaled(seen, 4)
        await seen.ends("KvistRequestsRefused")
    await scaled(seen, 2)
    await seen.twig.patch(picker={"env": None})
    await seen.twig.until_ready()


async def test_prompts_that_begin_with_an_id_are_corrected(seen: Observed) -> None:
    """A release of the client that puts an id before its instructions lowers the hit rate far below
    yesterday's; the id at the end restores it."""

    def good(name: str) -> str:
        return f"{RULES} Request {name}."

    def bad(name: str) -> str:
        return f"Request {name}. {RULES}"

    async with long_requests(seen, 8, 10, good):
        await seen.until(f"{HIT_RATIO} offset 1d > 0.5", "yesterday's hit rate", seconds=120)
    async with long_requests(seen, 8, 10, bad):
        await seen.fires("KvistHitRateFell", seconds=90)
    async with long_requests(seen, 8, 10, good):
        await seen.ends("KvistHitRateFell", seconds=90)


async def test_a_crash_loop_is_found_and_ended(seen: Observed) -> None:
    """An engine that is killed again and again loses its cache each time; its pod shows the restarts, and the
    alert ends when they do."""
    [pod, *_] = await seen.pods("engine")
    name, address = pod["metadata"]["name"], pod["status"]["podIP"]
    resets = f'max(kvist_epp_index_resets_total{{endpoint="{address}:8000"}})'
    stored = f'min(kvist_epp_index_events_total{{endpoint="{address}:8000",type="stored"}})'
    before = int((await seen.prometheus.query(resets))[0]["value"][1])
    async with seen.twig.load():
        for number in range(before, before + CRASHES):
            [known] = await seen.prometheus.query(stored)
            await seen.until(f"{stored} > {known['value'][1]}", "blocks to lose")
            send(signal.SIGKILL, processes(seen.twig.cluster, "kvist_sim.engine", address))
            await seen.until(f"{resets} > {number}", f"reset {number + 1}")
        await seen.fires("KvistIndexResets")
        [status] = (await seen.twig.room.get("Pod", name))["status"]["containerStatuses"]
        assert status["restartCount"] == CRASHES
        await seen.ends("KvistIndexResets")
    await seen.twig.until_ready()


async def test_an_engine_without_events_is_replaced(seen: Observed) -> None:
    """Engines whose pods say that they publish no KV events are picked by routing history; new pods have
    events again."""
    for pod in await seen.pods("engine"):
        body = {"metadata": {"annotations": {"kvist.dev/kv-events": "false"}}}
        await seen.twig.room.patch("Pod", pod["metadata"]["name"], body)
    await seen.fires("KvistIndexInaccurate")
    await seen.delete_pods("engine")
    async with seen.twig.load():
        await seen.ends("KvistIndexInaccurate", seconds=120)
    await seen.twig.until_ready()
