"""Pools with LMCache on a real API server with the real controllers of Deployments and DaemonSets."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.client import Client, Namespace
from tests.cluster.collecting import collecting
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operated import (
    QUICK,
    account,
    administrator,
    children,
    operating,
    pool,
    until_condition,
    with_crd,
)

from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.cluster_api import Json
from kvist_operator.cluster.kinds import POOL, Target

pytestmark = pytest.mark.timeout(300)
NODE = "lmcache-node"
LABELS = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "kubernetes.io/hostname": NODE}
ENGINES = "app.kubernetes.io/component=engine"
SERVERS = "app.kubernetes.io/component=lmcache"


async def test_a_server_of_lmcache_lives_with_its_pool(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """A pool with LMCache gets one server on each node of its accelerator, engines that use the one of their
    node and say so to the picker, and a status with its size; with an address it has no server; and
    nothing is left after deletion."""
    await with_crd(admin)
    config = await account(plane, admin, space.name, [space.name])
    await admin.ask("POST", "/api/v1/nodes", {"metadata": {"name": NODE, "labels": LABELS}})
    # nodes begin with a taint that their kubelet takes away
    merge = {"Content-Type": "application/merge-patch+json"}
    await admin.ask("PATCH", f"/api/v1/nodes/{NODE}", {"spec": {"taints": None}}, headers=merge)
    controllers = ("deployment-controller", "replicaset-controller", "daemonset-controller")
    try:
        async with (
            collecting(plane, tmp_path, *controllers),
            administrator(plane) as server,
            operating(tmp_path, config, f"--namespaces={space.name}", *QUICK),
        ):
            await _lives(server, space)
    finally:
        await admin.ask("DELETE", f"/api/v1/nodes/{NODE}")


async def _lives(server: ApiServer, space: Namespace) -> None:
    async def put(**lmcache: Any) -> Json:
        made = pool("twig", space.name, replicas=1, picker={"replicas": 1}, offload={"lmcache": lmcache})
        return await server.apply(made)

    async def pods(selector: str, fulfilled: Callable[[list[Json]], bool]) -> list[Json]:
        while True:
            found = await space.client.ask("GET", f"{space.path}/pods", params={"labelSelector": selector})
            there = [each for each in found["items"] if "deletionTimestamp" not in each["metadata"]]
            if fulfilled(there):
                return there
            await asyncio.sleep(0.1)

    await put(memory="64Gi")
    await until_condition(server, "twig", space.name, "Accepted", status="True")
    [cache] = await pods(SERVERS, lambda there: len(there) == 1)
    [engine] = await pods(ENGINES, lambda there: len(there) == 1)
    [container] = cache["spec"]["containers"]
    assert "--l1-size-gb=64" in container["args"]
    assert "--supported-transfer-mode=engine_driven" in container["args"]
    assert "--kv-event-log-size=0" in container["args"], "with a log of its own the server reports nothing"
    assert container["resources"]["limits"]["memory"] == "68Gi"

    name = cache["metadata"]["labels"]["kvist.dev/kv-storage-namespace"]
    marks = {**engine["metadata"]["annotations"], **engine["metadata"]["labels"]}
    assert marks["kvist.dev/kv-tiers"] == "lmcache"
    assert marks["kvist.dev/kv-storage-namespace"] == name
    assert marks["kvist.dev/kv-storage-scope"] == "node"
    config, events = _flags(engine)
    assert config["kv_connector"] == "LMCacheMPConnector"
    assert config["kv_load_failure_policy"] == "recompute"
    assert events["enable_kv_cache_events"] is True
    host = config["kv_connector_extra_config"]["lmcache.mp.host"]
    [service] = [
        each for (kind, _), each in (await children(server, space.name)).items() if _is_cache(kind, each)
    ]
    assert service["metadata"]["name"] in host
    assert service["spec"]["internalTrafficPolicy"] == "Local"
    assert service["spec"]["selector"].items() <= cache["metadata"]["labels"].items()

    status = ((await server.get(Target(POOL, space.name, "twig"))) or {})["status"]
    assert [tier["medium"] for tier in status["plan"]["tiers"]] == ["gpu", "lmcache"]
    assert int(marks["kvist.dev/kv-storage-tokens"]) == status["plan"]["tiers"][1]["tokens"]

    await put(address="tcp://cache.example:5555")
    await until_condition(server, "twig", space.name, "Accepted", status="True")
    await pods(SERVERS, lambda there: not there)
    [engine] = await pods(
        ENGINES, lambda there: len(there) == 1 and "cache.example" in json.dumps(_flags(there[0])[0])
    )
    assert "kvist.dev/kv-storage-scope" not in engine["metadata"]["annotations"]

    await put(memory="64Gi", image="lmcache/standalone:other")
    await pods(SERVERS, lambda there: [e["spec"]["containers"][0]["image"] for e in there] == [_OTHER])
    await server.connection.request("DELETE", Target(POOL, space.name, "twig").path)
    await pods(SERVERS, lambda there: not there)
    while await children(server, space.name, POOL):
        await asyncio.sleep(0.1)


_OTHER = "lmcache/standalone:other"


def _is_cache(kind: str, made: Json) -> bool:
    return kind == "Service" and made["metadata"]["labels"].get("app.kubernetes.io/component") == "lmcache"


def _flags(pod: Json) -> tuple[Json, Json]:
    """Return the configurations of the connector and of the KV events of an engine."""
    [engine] = [each for each in pod["spec"]["containers"] if each["name"] == "engine"]
    args = engine["args"]
    return json.loads(_value(args, "--kv-transfer-config")), json.loads(_value(args, "--kv-events-config"))


def _value(args: list[str], flag: str) -> str:
    for at, each in enumerate(args):
        if each == flag:
            return args[at + 1]
        if each.startswith(f"{flag}="):
            return each.partition("=")[2]
    raise AssertionError(f"{flag} is not among {args}")
