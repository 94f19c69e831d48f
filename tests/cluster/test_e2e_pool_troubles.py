"""Failures of a pool in a whole cluster, and what its status says then."""

import json
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.pooled import Served, condition, installed, pool, until_ready
from tests.cluster.space import Space

pytestmark = pytest.mark.timeout(300)
Json = dict[str, Any]
KEY = "correct-horse-battery-staple"
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


async def test_roles_without_rdma_devices_quote_the_scheduler(cluster: Cluster, room: Space) -> None:
    """With RDMA devices that no node has, engines of both roles wait; the conditions name the device, the
    field, and the role that is missing."""
    await installed(cluster, room.client)
    roles: Json = {"mode": "Roles", "prefill": {"replicas": 1}}
    link: Json = {"rdma": {"resourceName": "rdma/hca", "ipcLock": "Disabled"}}
    more = {**PLAIN, "picker": {"replicas": 1}}
    await room.apply(pool("twig", **more, disaggregation=roles, interconnect=link))
    found = await said(room, "rdma/hca")

    assert found["reason"] == "Unschedulable"
    assert "Insufficient rdma/hca" in found["message"]
    assert "leave spec.interconnect.rdma out" in found["message"]
    paired = await said(room, "no engine for prefill is ready", "Disaggregated")
    assert (paired["status"], paired["reason"]) == ("False", "NoPrefill")


async def test_engines_wait_for_the_secret_with_their_api_key(cluster: Cluster, room: Space) -> None:
    """Without the Secret no engine starts, and the condition names it and the field. With it clients are
    answered with 401 without the key and with 200 with it, and the key is in no object of the pool but the
    Secret."""
    await installed(cluster, room.client)
    engine = {"apiKeySecretRef": {"name": "twig-key"}}
    await room.apply(pool("twig", engine=engine))
    found = await said(room, "twig-key")
    assert "spec.engine.apiKeySecretRef" in found["message"]

    meta = {"name": "twig-key"}
    await room.apply({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"api-key": KEY}})
    found = await until_ready(room, "twig", seconds=180)
    served = Served(cluster, room, room)
    body = {"model": "twig", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    async with cluster.http() as http:
        for given, status in (({}, 401), ({"Authorization": f"Bearer {KEY}"}, 200)):
            async with http.post(served.url, json=body, headers=given) as answer:
                assert answer.status == status
    pods = await room.pods()
    deployment = await room.get("Deployment", "twig")
    assert KEY not in json.dumps([found, deployment, *pods])
