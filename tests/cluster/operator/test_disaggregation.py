"""A disaggregated pool on a real API server with real controllers of Deployments; the test is the kubelet."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.client import Client, Namespace
from tests.cluster.collecting import collecting
from tests.cluster.control_plane import ControlPlane
from tests.cluster.foreign import LWS
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
from kvist_operator.cluster.kinds import DEPLOYMENT, LEADER_WORKER_SET, POOL, Target

pytestmark = pytest.mark.timeout(400)
MERGE = {"Content-Type": "application/merge-patch+json"}
CONTROLLERS = ("deployment-controller", "replicaset-controller")
OLD, NEW = "vllm/vllm-openai:v0.32.0", "vllm/vllm-openai:v0.33.0"


@dataclass
class Kubelet:
    """Makes every pod ready as soon as it exists, and keeps their order."""

    space: Namespace
    started: list[tuple[str, str]] = field(default_factory=list)
    """Role and image of each engine, in the order in which they became ready."""

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            for pod in (await self.space.client.ask("GET", f"{self.space.path}/pods"))["items"]:
                if not (pod.get("status") or {}).get("podIP"):
                    await self._start(pod)
            await asyncio.sleep(0.1)

    async def _start(self, pod: Json) -> None:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        address = "10.0.0.1"
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": at}],
        }
        name = pod["metadata"]["name"]
        with suppress(Exception):  # the pod may have gone
            await self.space.client.ask(
                "PATCH", f"{self.space.path}/pods/{name}/status", {"status": status}, headers=MERGE
            )
            if role := pod["metadata"]["labels"].get("kvist.dev/role"):
                self.started.append((role, pod["spec"]["containers"][0]["image"]))


@dataclass
class Ground:
    """A namespace in which pods become ready, and an operator works."""

    space: Namespace
    server: ApiServer
    kubelet: Kubelet

    async def put(self, image: str, decode: int | None = None, **prefill: Any) -> None:
        """Apply the pool ``twig`` with these engines for prefill and decode."""
        roles: Json = {"mode": "Roles", "prefill": prefill}
        await self.server.apply(
            pool(
                "twig",
                self.space.name,
                engine={"image": image},
                picker={"replicas": 1},
                disaggregation=roles,
                **({} if decode is None else {"replicas": decode}),
            )
        )

    async def until(self, kind: str, **expected: str) -> str:
        """Wait until a condition of the newest generation is so; return its message."""
        return str((await until_condition(self.server, "twig", self.space.name, kind, **expected))["message"])

    async def deployment(self, name: str, fulfilled: Callable[[Json], bool]) -> Json:
        """Wait until a Deployment is so."""
        while True:
            found = await self.server.get(Target(DEPLOYMENT, self.space.name, name))
            if found is not None and fulfilled(found):
                return found
            await asyncio.sleep(0.1)

    async def status(self) -> Json:
        """Return the status of the pool."""
        found = await self.server.get(Target(POOL, self.space.name, "twig"))
        assert found is not None
        return dict(found["status"])

    async def engines(self, role: str) -> list[Json]:
        """Return the engines of a role that are ready and stay; those without roles for an empty one."""
        selector = "kvist.dev/pool=twig," + (f"kvist.dev/role={role}" if role else "!kvist.dev/role")
        found = await self.space.client.ask(
            "GET", f"{self.space.path}/pods", params={"labelSelector": selector}
        )
        return [
            each
            for each in found["items"]
            if (each.get("status") or {}).get("podIP") and "deletionTimestamp" not in each["metadata"]
        ]

    async def ready_replicas(self) -> dict[str, int]:
        """Return how many engines of each role are ready, as the status says."""
        roles: Json = (await self.status()).get("roles") or {}
        return {role: each["readyReplicas"] for role, each in roles.items()}


@asynccontextmanager
async def ground(
    plane: ControlPlane, admin: Client, space: Namespace, folder: Path, *crds: Json
) -> AsyncIterator[Ground]:
    """A namespace with an operator of its own, which may do there what its Role says."""
    await with_crd(admin)
    await admin.install_crds(*crds)
    config = await account(plane, admin, space.name, [space.name])
    kubelet = Kubelet(space)
    async with (
        collecting(plane, folder, *CONTROLLERS),
        administrator(plane) as server,
        operating(folder, config, f"--namespaces={space.name}", *QUICK),
        asyncio.TaskGroup() as tasks,  # a kubelet that fails ends the test, which would wait for ever
    ):
        task = tasks.create_task(kubelet.run())
        try:
            yield Ground(space, server, kubelet)
        finally:
            task.cancel()
            for crd in crds:  # other tests do without
                await admin.uninstall(crd["metadata"]["name"])


async def test_a_disaggregated_pool_lives_its_life(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """A pool with roles is applied, rolled in step, scaled by role, by an autoscaler and to nothing, and
    deleted; the condition Disaggregated says in words whether engines have partners."""
    async with ground(plane, admin, space, tmp_path) as at:
        await at.put(OLD, 2, replicas=1)
        message = await at.until("Disaggregated", reason="Paired")
        assert message == "with a partner: 1 of 1 engines for prefill, 2 of 2 for decode"
        await at.until("Progressing", reason="Settled")
        await at.until("Ready", status="True")

        at.kubelet.started.clear()
        await at.put(NEW, 2, replicas=1)
        await at.until("Progressing", reason="Settled")
        assert at.kubelet.started == [("decode", NEW), ("prefill", NEW), ("decode", NEW)]
        await at.until("Disaggregated", reason="Paired")

        scale = f"{space.of('kvist.dev', 'v1alpha1', 'inferencepools')}/twig/scale"
        await space.client.ask("PATCH", scale, {"spec": {"replicas": 3}}, headers=MERGE)
        await at.deployment("twig-decode", lambda found: found["spec"]["replicas"] == 3)
        found = await space.client.ask("GET", scale)
        assert found["status"]["selector"] == "kvist.dev/pool=twig,kvist.dev/role=decode"

        await at.put(NEW, 3, scaling="External")
        await at.until("Accepted", status="True")
        by_hpa = f"{space.of('apps', 'v1', 'deployments')}/twig-prefill/scale"
        await space.client.ask("PATCH", by_hpa, {"spec": {"replicas": 2}}, headers=MERGE)
        await at.deployment("twig-prefill", lambda found: found["status"].get("readyReplicas") == 2)
        while await at.ready_replicas() != {"prefill": 2, "decode": 3}:  # bounded by the test's time limit
            await asyncio.sleep(0.2)

        await at.put(NEW, 3, replicas=0)
        message = await at.until("Disaggregated", reason="NoPrefill")
        assert "engines that decode compute prompts by themselves" in message

        await at.server.connection.request("DELETE", Target(POOL, space.name, "twig").path)
        while await children(at.server, space.name, POOL):
            await asyncio.sleep(0.1)


async def test_what_does_not_fit_is_said(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """A version without the connector, more ranks for prefill and accelerators that exchange no blocks are
    refused with the field and the remedy; engines whose labels differ have no partner, and the condition has
    both values."""
    async with ground(plane, admin, space, tmp_path) as at:
        wider: Json = {
            "prefill": {"engine": {"tensorParallelSize": 2}},
            "decode": {"engine": {"tensorParallelSize": 1}},
        }
        for engine, roles, words in (
            ({"version": "0.20.0"}, {}, ("spec.disaggregation", "vLLM 0.20 is older than")),
            ({"image": OLD}, wider, ("decode.engine.tensorParallelSize", "1 is less than prefill's 2")),
            (
                {"image": OLD},
                {"prefill": {"accelerator": {"product": "L40S"}}},
                ("spec.engine.attentionBackend", "exchange no blocks: set one that both have"),
            ),
        ):
            split: Json = {"mode": "Roles", **roles}
            await at.server.apply(
                pool("twig", space.name, engine=engine, picker={"replicas": 1}, disaggregation=split)
            )
            message = await at.until("Accepted", status="False")
            assert all(each in message for each in words), message

        await at.put(OLD, 1, replicas=1)
        await at.until("Disaggregated", reason="Paired")
        [pod] = await at.engines("decode")
        labels = {"metadata": {"labels": {"kvist.dev/kv-compatibility": "by-hand"}}}
        await space.client.ask("PATCH", f"{space.path}/pods/{pod['metadata']['name']}", labels, headers=MERGE)
        message = await at.until("Disaggregated", reason="NoPairs")
        [other] = await at.engines("prefill")
        own = other["metadata"]["labels"]["kvist.dev/kv-compatibility"]
        assert f"those for prefill have {own}, those for decode by-hand" in message


async def test_a_pool_that_gets_roles_says_that_it_stops_serving(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """With SurgeFirst a pool keeps its old engines until those with roles are ready; back again with
    ReplaceFirst the old engines go first."""
    async with ground(plane, admin, space, tmp_path) as at:
        plain: Json = {"engine": {"image": OLD}, "picker": {"replicas": 1}, "replicas": 1}
        await at.server.apply(pool("twig", space.name, **plain))
        await at.until("Ready", status="True")
        serving = []

        async def watched() -> None:
            while True:
                serving.append(sum([len(await at.engines(role)) for role in ("", "prefill", "decode")]))
                await asyncio.sleep(0.1)

        task = asyncio.create_task(watched())
        roles: Json = {"mode": "Roles", "prefill": {"replicas": 1}}
        surge = {**plain, "rollout": {"strategy": "SurgeFirst"}}
        await at.server.apply(pool("twig", space.name, **surge, disaggregation=roles))
        await at.until("Disaggregated", reason="Paired")
        await at.until("Ready", status="True")
        task.cancel()
        assert min(serving) >= 1
        assert await at.server.get(Target(DEPLOYMENT, space.name, "twig")) is None


async def test_roles_over_several_nodes_are_groups(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """A pool whose replicas span nodes has a LeaderWorkerSet for each role; decode is scaled through the
    pool, prefill by its own scale subresource; a new image goes to one group of decode first while prefill
    is held; and nothing is left after deletion."""
    wide = {"tensorParallelSize": 1, "dataParallelSize": 16, "pipelineParallelSize": 1}
    async with ground(plane, admin, space, tmp_path, LWS) as at:

        async def put(image: str, decode: int, **prefill: Any) -> None:
            await at.server.apply(
                pool(
                    "twig",
                    space.name,
                    model={"source": "hf://deepseek-ai/DeepSeek-R1"},
                    accelerator={"product": "H200-141GB"},
                    engine={"image": image},
                    picker={"replicas": 1},
                    replicas=decode,
                    disaggregation={
                        "mode": "Roles",
                        "prefill": {**prefill, "engine": wide},
                        "decode": {"engine": wide},
                    },
                )
            )

        async def group(role: str, fulfilled: Callable[[Json], bool]) -> Json:
            while True:
                found = await at.server.get(Target(LEADER_WORKER_SET, space.name, f"twig-{role}"))
                if found is not None and fulfilled(found["spec"]):
                    return found
                await asyncio.sleep(0.1)

        async def report(role: str, updated: int) -> None:
            found = await group(role, lambda _: True)
            count = found["spec"]["replicas"]
            status = {"replicas": count, "readyReplicas": count, "updatedReplicas": updated}
            path = f"{space.of('leaderworkerset.x-k8s.io', 'v1', 'leaderworkersets')}/twig-{role}/status"
            await space.client.ask("PATCH", path, {"status": status}, headers=MERGE)

        await put(OLD, 2, replicas=2)
        await at.until("Accepted", status="True")
        for role, connector in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            made = await group(role, lambda spec: spec["replicas"] == 2)
            template = made["spec"]["leaderWorkerTemplate"]
            assert template["size"] > 1
            assert connector in str(template["leaderTemplate"])
            assert template["leaderTemplate"]["metadata"]["labels"]["kvist.dev/role"] == role
            await report(role, 2)

        scale = f"{space.of('kvist.dev', 'v1alpha1', 'inferencepools')}/twig/scale"
        await space.client.ask("PATCH", scale, {"spec": {"replicas": 3}}, headers=MERGE)
        await group("decode", lambda spec: spec["replicas"] == 3)
        await put(OLD, 3, scaling="External")
        await at.until("Accepted", status="True")
        by_hpa = f"{space.of('leaderworkerset.x-k8s.io', 'v1', 'leaderworkersets')}/twig-prefill/scale"
        await space.client.ask("PATCH", by_hpa, {"spec": {"replicas": 1}}, headers=MERGE)
        for role, count in (("prefill", 1), ("decode", 3)):
            await group(role, lambda spec, count=count: spec["replicas"] == count)  # type: ignore[misc]
            await report(role, count)

        await put(NEW, 3, scaling="External")
        await group("decode", lambda spec: NEW in str(spec) and _partition(spec) == 2)
        await group("prefill", lambda spec: NEW in str(spec) and _partition(spec) == 1)

        await at.server.connection.request("DELETE", Target(POOL, space.name, "twig").path)
        while await children(at.server, space.name, POOL) or await at.server.find(
            LEADER_WORKER_SET, space.name
        ):
            await asyncio.sleep(0.1)


def _partition(spec: Json) -> int:
    return int(spec["rolloutStrategy"]["rollingUpdateConfiguration"].get("partition", 0))
