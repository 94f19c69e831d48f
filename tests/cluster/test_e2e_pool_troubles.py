"""Failures of a pool in a whole cluster, and what its status says then."""

from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.pooled import condition, installed, pool
from tests.cluster.space import Space

pytestmark = pytest.mark.timeout(300)
Json = dict[str, Any]
PLAIN: Json = {"picker": {"mode": "Off"}, "gateway": {"mode": "None"}}


async def said(room: Space, word: str, kind: str = "Progressing") -> Json:
    """The condition of the pool ``twig`` whose message has this word."""

    async def told() -> Json | None:
        found = condition(await room.get("InferencePool", "twig"), kind)
        return found if word in found.get("message", "") else None

    found = await room.until(told, f"{word!r} in {kind}")
    assert found is not None
    return found


async def test_an_engine_that_refuses_its_arguments_is_quoted(cluster: Cluster, room: Space) -> None:
    """A crash loop becomes a condition with vLLM's termination message."""
    await installed(cluster, room.client)
    await room.apply(pool("twig", **PLAIN, engine={"version": "0.99.0", "extraArgs": ["--no-such-flag"]}))
    found = await said(room, "--no-such-flag")

    assert "unrecognized arguments" in found["message"]


async def test_a_pool_without_capacity_quotes_the_scheduler(cluster: Cluster, room: Space) -> None:
    """With more replicas than accelerators one pod waits, and the condition says for what."""
    await installed(cluster, room.client)
    await room.apply(pool("twig", **PLAIN, replicas=9))
    found = await said(room, "nvidia.com/gpu")

    assert found["reason"] == "Unschedulable"
