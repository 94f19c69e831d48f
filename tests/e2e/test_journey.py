"""From ``helm install`` to ``helm uninstall``, with everything real but the engines' hardware."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest
from tests.cluster.certified import PICKS
from tests.cluster.client import Client
from tests.cluster.cluster import Cluster
from tests.cluster.pooled import Served
from tests.cluster.space import Space
from tests.cluster.steady import Steady
from tests.e2e import pools
from tests.e2e.commands import Commands
from tests.e2e.edge import Edge
from tests.e2e.steps import say, step

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
Json = dict[str, Any]
LARGE_BYTES: Final = 1 << 19
"""Of a body: sixteen times what Envoy Gateway holds where nothing is said."""
DRAIN_SECONDS: Final = 600
"""Of the example's EnvoyProxy."""
MORE: Final = 20
"""Answers under load before and after whatever happens."""


async def test_no_request_fails_from_the_first_answer_to_the_uninstall(
    cluster: Cluster, commands: Commands, admin: Client, system: Space, edge: Edge
) -> None:
    """No request fails: the examples serve by the generated Envoy and by Envoy Gateway, repeated prefixes are
    cached, a large body passes, through an upgrade, two rollouts and the operator's uninstall."""
    async with cluster.space(admin) as room, AsyncExitStack() as stack:
        stack.push_async_callback(pools.end, commands, system)
        with step("helm install of kvist"):
            await pools.release(commands, system)
        with step("kubectl apply of 01-minimal, until it is ready"):
            qwen = await pools.minimal(commands, system, room)
        with step("the first answer by the generated Envoy"):
            await room.until(lambda: pools.answers(qwen), "an answer by Envoy")
        first = await stack.enter_async_context(qwen.load())
        with step("kubectl apply of 04-httproute, until it is attached"):
            routed = await pools.routed(commands, system, room, spec__replicas=3)
        with step("the first answer by Envoy Gateway"):
            await room.until(lambda: pools.answers(routed), "an answer by Envoy Gateway")
        second = await stack.enter_async_context(routed.load())
        assert await edge.drain_seconds(room) == {DRAIN_SECONDS}
        await lives((qwen, routed), (first, second), commands, system)
        with step("helm uninstall of kvist"):
            await pools.end(commands, system)
        await answered((first, second))
    say("answers by the generated Envoy, by Envoy Gateway", f"{len(first.answers)}, {len(second.answers)}")
    assert first.failures == []
    assert second.failures == []


async def lives(
    both: tuple[Served, ...], loads: tuple[Steady, ...], commands: Commands, system: Space
) -> None:
    """Take pools under load through prompts, a large body, an upgrade and rollouts."""
    await answered(loads)
    for pool in both:
        with step(f"prompts with the same beginnings to {pool.name}"):
            found = await pools.cached(pool)
        say("  of their tokens were in the cache of the pod that was picked", f"{found:.0%}")
        assert found > 0.85
    await learned(both[1])
    assert [await pools.status(pool, LARGE_BYTES) for pool in both] == [200, 200]
    with step("helm upgrade of kvist"):
        await pools.release(commands, system, "--set-json", 'log.level="debug"')
    await answered(loads)
    with step("both pools roll over to other arguments"):
        await asyncio.gather(*(pools.rolled(pool) for pool in both))
    await answered(loads)


async def answered(loads: tuple[Steady, ...]) -> None:
    """Wait until each load has got ``MORE`` further answers."""
    await asyncio.gather(*(load.until(MORE) for load in loads))


async def learned(pool: Served) -> None:
    """Envoy Gateway has asked the pickers and reported how requests ended."""
    picks = await pools.counted(pool, PICKS)
    ends = await pools.counted(pool, pools.ENDS)
    say("  picks for Envoy Gateway, ends that its access log reported", f"{picks}, {ends}")
    assert picks > MORE
    assert ends > MORE
