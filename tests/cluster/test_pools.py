"""Pools and objectives as the real API server reports them."""

import logging
from typing import Any

import pytest
from tests.cluster.client import GAIE, Client, Namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.following import POOL, following

from kvist_epp.endpoints.kubernetes.pod_discovery import PoolName
from kvist_epp.names import OWN_GROUP
from kvist_kube.informer import InformerTimes

OURS = "inferencepools.kvist.dev"
OBJECTIVES = "inferenceobjectives.llm-d.ai"


@pytest.fixture
async def pools(admin: Client) -> None:
    """Both kinds of pools are installed."""
    await admin.install(GAIE, OURS)


async def test_a_pool_selects_and_may_change_its_mind(
    plane: ControlPlane, space: Namespace, pools: None
) -> None:
    """Selector and ports of an InferencePool take effect at once; nothing in between is empty."""
    await space.pod("a", "10.0.0.1")
    await space.pod("b", "10.0.0.2", labels={"app": "other"})
    await space.pool("pool", {"app": "vllm"}, 8000)
    async with following(plane.kubeconfig("admin"), space, POOL) as seen:
        await seen.stands({"a": ""})

        await space.pool("pool", {"app": "vllm"}, 8000, 8001)
        await seen.stands({"a-rank-0": "", "a-rank-1": ""})

        await space.pool("pool", {"app": "other"}, 9000)
        await seen.stands({"b": ""})
        assert seen.hostports == ["10.0.0.2:9000"]

        await space.pool("pool", {"app": "nobody"}, 9000)
        await seen.stands({})
        assert [len(fleet) for fleet in seen.fleets] == [1, 2, 1, 0]


async def test_a_deleted_pool_keeps_its_pods(plane: ControlPlane, space: Namespace, pools: None) -> None:
    """A pool that is deleted is a problem with a name; its pods are followed on, and a new pool heals it."""
    await space.pod("a", "10.0.0.1")
    await space.pool("pool", {"app": "vllm"}, 8000)
    async with following(plane.kubeconfig("admin"), space, POOL) as seen:
        await seen.stands({"a": ""})

        path = space.of("inference.networking.k8s.io", "v1", "inferencepools")
        await space.client.ask("DELETE", f"{path}/pool")
        await seen.until(lambda: seen.discovery.problem != "")
        assert seen.discovery.problem == f"InferencePool {space.name}/pool: does not exist"

        await space.pod("b", "10.0.0.2")
        await seen.stands({"a": "", "b": ""})

        await space.pool("pool", {"app": "vllm"}, 8001)
        await seen.until(lambda: seen.hostports == ["10.0.0.1:8001", "10.0.0.2:8001"])
        assert seen.discovery.problem == ""


async def test_a_pool_that_does_not_exist_yet(plane: ControlPlane, space: Namespace, pools: None) -> None:
    """A picker may start before its pool: it says what is missing, and begins when it is there."""
    await space.pod("a", "10.0.0.1")
    async with following(plane.kubeconfig("admin"), space, POOL) as seen:
        await seen.until(lambda: "does not exist" in seen.discovery.problem)
        assert seen.fleets == []

        await space.pool("pool", {}, 8000)
        await seen.until(lambda: "matchLabels is empty" in seen.discovery.problem)

        await space.pool("pool", {"app": "vllm"}, 8000)
        await seen.stands({"a": ""})


async def test_our_own_pool(plane: ControlPlane, space: Namespace, pools: None) -> None:
    """Pods of our own pool carry its name; the port is 8000 until the pool's status has it."""
    path = space.of(OWN_GROUP, "v1alpha1", "inferencepools")
    body = {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool", "metadata": {"name": "mine"}}
    await space.client.ask("POST", path, body)
    await space.pod("a", "10.0.0.1", labels={"kvist.dev/pool": "mine"})
    await space.pod("b", "10.0.0.2", labels={"kvist.dev/pool": "yours"})
    async with following(plane.kubeconfig("admin"), space, PoolName(OWN_GROUP, "mine")) as seen:
        await seen.until(lambda: seen.hostports == ["10.0.0.1:8000"])

        patch: dict[str, Any] = {"status": {"targetPorts": [{"number": 9000}]}}
        headers = {"Content-Type": "application/merge-patch+json"}
        await space.client.ask("PATCH", f"{path}/mine/status", patch, headers=headers)
        await seen.until(lambda: seen.hostports == ["10.0.0.1:9000"])

        patch = {"status": {"targetPorts": [{"number": "many"}]}}
        await space.client.ask("PATCH", f"{path}/mine/status", patch, headers=headers)
        await seen.until(lambda: "number" in seen.discovery.problem)
        assert seen.hostports == ["10.0.0.1:9000"]


async def test_a_missing_kind_of_pool_is_named(plane: ControlPlane, space: Namespace) -> None:
    """Without the CRD the problem says so; once it is installed discovery goes on by itself."""
    await space.client.uninstall(OURS)
    async with following(plane.kubeconfig("admin"), space, PoolName(OWN_GROUP, "mine")) as seen:
        await seen.until(lambda: "check that its CRD is installed" in seen.discovery.problem)

        await space.client.install(OURS)
        await seen.until(lambda: "does not exist" in seen.discovery.problem)


async def objective(space: Namespace, name: str, pool: str, priority: int | None) -> None:
    """Create an InferenceObjective."""
    spec = {"poolRef": {"name": pool}} | ({} if priority is None else {"priority": priority})
    body = {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": name},
        "spec": spec,
    }
    await space.client.ask("POST", space.of("llm-d.ai", "v1alpha2", "inferenceobjectives"), body)


async def test_objectives_give_priorities(plane: ControlPlane, space: Namespace, pools: None) -> None:
    """Objectives of this pool are reported by name, with 0 if they have no priority; a deleted one is
    gone."""
    await space.client.install(OBJECTIVES)
    await objective(space, "urgent", "pool", 5)
    await objective(space, "batch", "pool", -1)
    await objective(space, "plain", "pool", None)
    await objective(space, "other", "elsewhere", 7)
    async with following(plane.kubeconfig("admin"), space, POOL) as seen:
        await seen.until(lambda: bool(seen.priorities))
        assert seen.priorities[-1] == {"urgent": 5, "batch": -1, "plain": 0}

        path = space.of("llm-d.ai", "v1alpha2", "inferenceobjectives")
        await space.client.ask("DELETE", f"{path}/urgent")
        await seen.until(lambda: seen.priorities[-1] == {"batch": -1, "plain": 0})


async def test_objectives_appear_with_their_api(
    plane: ControlPlane, space: Namespace, pools: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing objectives API is no problem and logged at INFO only; installed later, it is found."""
    caplog.set_level(logging.INFO)
    await space.client.uninstall(OBJECTIVES)
    await space.pool("pool", {"app": "vllm"}, 8000)
    async with following(plane.kubeconfig("admin"), space, POOL, InformerTimes(resync=1.0)) as seen:
        await seen.until(lambda: seen.watch(OBJECTIVES)["errors"].get("404", 0) >= 2)
        assert (seen.discovery.problem, seen.priorities) == ("", [])
        told = [r for r in caplog.records if "inferenceobjectives" in r.message]
        assert {r.levelname for r in told} == {"INFO"}
        assert len(told) == 2  # once for each generation of the API

        await space.client.install(OBJECTIVES)
        await objective(space, "urgent", "pool", 5)
        await seen.until(lambda: seen.priorities == [{"urgent": 5}])
