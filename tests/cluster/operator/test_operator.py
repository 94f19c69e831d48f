"""The operator as a process, under exactly the rights it ships, on a real API server."""

import asyncio
import copy
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.client import Client, Namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.foreign import LWS
from tests.cluster.operated import (
    QUICK,
    account,
    administrator,
    children,
    operating,
    pool,
    started,
    until_condition,
    with_crd,
)
from tests.crd.cases import cases

from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.cluster_api import Json
from kvist_operator.cluster.kinds import DEPLOYMENT, POOL, SECURITY_CONSTRAINTS, ObjectKind, Target
from kvist_sim.processes import Children

pytestmark = pytest.mark.timeout(300)
MERGE = {"Content-Type": "application/merge-patch+json"}
SERVICE = ObjectKind("", "v1", "Service", "services")


@dataclass
class Ground:
    """A namespace with an operator's account, and the administrator's way in."""

    space: Namespace
    server: ApiServer
    kubeconfig: Path
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name of the namespace."""
        return self.space.name

    async def put(self, name: str, **spec: Any) -> Json:
        """A pool, new or changed."""
        return await self.server.apply(pool(name, self.name, **spec))

    async def until(self, name: str, kind: str, **expected: str) -> str:
        """The message of a condition, once it is so."""
        found = await until_condition(self.server, name, self.name, kind, **expected)
        return str(found["message"])

    async def get(self, kind: ObjectKind, name: str) -> Json | None:
        """An object of the namespace."""
        return await self.server.get(Target(kind, self.name, name))

    async def gone(self, kind: ObjectKind, name: str) -> None:
        """Wait until there is no such object."""
        while await self.get(kind, name) is not None:
            await asyncio.sleep(0.05)

    async def there(self, kind: ObjectKind, name: str) -> Json:
        """Wait for an object."""
        while True:
            found = await self.get(kind, name)
            if found is not None:
                return found
            await asyncio.sleep(0.05)


@pytest.fixture
async def ground(plane: ControlPlane, admin: Client, space: Namespace) -> AsyncIterator[Ground]:
    """An operator of this namespace alone may do there what its Role says, and nothing elsewhere."""
    await with_crd(admin)
    kubeconfig = await account(plane, admin, space.name, [space.name])
    async with administrator(plane) as server:
        yield Ground(space, server, kubeconfig, (f"--namespaces={space.name}", *QUICK))


async def test_all_that_is_valid_is_made_and_a_restart_writes_nothing(ground: Ground, tmp_path: Path) -> None:
    """Every valid pool ends with its objects and a status; a new operator finds nothing to write."""
    for case in cases("valid"):
        spec = {"accelerator": {"product": "H100-80GB"}, **case.pool["spec"]}
        made = {**case.pool, "metadata": {"name": case.name, "namespace": ground.name}, "spec": spec}
        await ground.server.apply(made)
    async with operating(tmp_path, ground.kubeconfig, *ground.flags):
        for case in cases("valid"):
            accepted = "False" if case.name == "two-nodes" else "True"
            await ground.until(case.name, "Accepted", status=accepted)
    found = await children(ground.server, ground.name, POOL)
    assert ("Deployment", "minimal") in found
    assert ("Secret", "minimal-epp-tls") in found
    assert ("Deployment", "two-nodes") not in found

    async with operating(tmp_path, ground.kubeconfig, *ground.flags) as operator:
        while await operator.count("kvist_operator_reconciles_total") < len(cases("valid")):
            await asyncio.sleep(0.05)
        assert await operator.count('kvist_operator_api_requests_total{method="PATCH"') == 0
        assert await operator.count('kvist_operator_api_requests_total{method="DELETE"') == 0


async def test_drift_is_undone_and_what_others_add_stays(ground: Ground, tmp_path: Path) -> None:
    """The operator restores a field that was changed and an object that was deleted; a label that was added
    stays."""
    await ground.put("twig")
    async with operating(tmp_path, ground.kubeconfig, *ground.flags):
        await ground.until("twig", "Accepted", status="True")
        path = ground.space.of("apps", "v1", "deployments")
        change = {"metadata": {"labels": {"mine": "yes"}}, "spec": {"replicas": 5}}
        await ground.space.client.ask("PATCH", f"{path}/twig", change, headers=MERGE)
        await ground.space.client.ask("DELETE", f"{ground.space.path}/services/twig")

        await ground.there(SERVICE, "twig")
        while (found := await ground.there(DEPLOYMENT, "twig"))["spec"]["replicas"] != 0:
            await asyncio.sleep(0.05)
        assert found["metadata"]["labels"]["mine"] == "yes"


async def test_pods_on_openshift_name_no_users(ground: Ground, admin: Client, tmp_path: Path) -> None:
    """OpenShift is known by an API that the operator may not read; its pods then name no user or group."""
    crd = copy.deepcopy(LWS)
    kind = SECURITY_CONSTRAINTS
    crd["metadata"]["name"] = kind.resource
    crd["spec"] |= {
        "group": kind.group,
        "scope": "Cluster",
        "names": {"kind": kind.kind, "plural": kind.plural, "singular": kind.kind.lower()},
    }
    await admin.install_crds(crd)
    try:
        await ground.put("twig", gateway={"mode": "Envoy"})
        async with operating(tmp_path, ground.kubeconfig, *ground.flags):
            await ground.until("twig", "Accepted", status="True")
            for name in ("twig", "twig-epp", "twig-envoy"):
                made = await ground.there(DEPLOYMENT, name)
                context = made["spec"]["template"]["spec"]["securityContext"]
                assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    finally:
        await admin.uninstall(kind.resource)


async def test_another_default_image_rolls_nothing_until_asked(ground: Ground, tmp_path: Path) -> None:
    """After an upgrade the templates stay as they were, whatever is scaled; the hash applies the change."""
    await ground.put("twig")
    async with operating(tmp_path, ground.kubeconfig, *ground.flags):
        await ground.until("twig", "Accepted", status="True")
        before = await ground.there(DEPLOYMENT, "twig")
        pickers = await ground.there(DEPLOYMENT, "twig-epp")
    path = f"{ground.space.of('kvist.dev', 'v1alpha1', 'inferencepools')}/twig"
    images = ("--engine-image=vllm/vllm-openai:v0.32.0", "--picker-image=example.com/kvist-epp:2")
    async with operating(tmp_path, ground.kubeconfig, *ground.flags, *images):
        message = await ground.until("twig", "UpgradePending", reason="WaitingForApproval")
        scale = {"spec": {"replicas": 2}}
        await ground.space.client.ask("PATCH", f"{path}/scale", scale, headers=MERGE)
        while (found := await ground.there(DEPLOYMENT, "twig"))["spec"]["replicas"] != 2:
            await asyncio.sleep(0.05)
        assert found["spec"]["template"] == before["spec"]["template"]
        assert (await ground.there(DEPLOYMENT, "twig-epp"))["spec"] == pickers["spec"]
        assert found["status"].get("observedGeneration") is None or found["metadata"]["generation"] == 2

        status = (await ground.there(POOL, "twig"))["status"]
        assert (
            status["plan"]["hash"] == before["spec"]["template"]["metadata"]["annotations"]["kvist.dev/plan"]
        )
        digest = status["pendingPlan"]["hash"]
        assert digest in message
        approval = {"metadata": {"annotations": {"kvist.dev/apply-plan": digest}}}
        await ground.space.client.ask("PATCH", path, approval, headers=MERGE)
        while (found := await ground.there(DEPLOYMENT, "twig"))["spec"]["template"] == before["spec"][
            "template"
        ]:
            await asyncio.sleep(0.05)
        [image] = [each["image"] for each in found["spec"]["template"]["spec"]["containers"]]
        assert image == "vllm/vllm-openai:v0.32.0"
        while "pendingPlan" in (await ground.there(POOL, "twig"))["status"]:
            await asyncio.sleep(0.05)


async def test_another_replica_takes_over_from_a_killed_leader_and_writes_nothing(
    ground: Ground, tmp_path: Path
) -> None:
    """Within 20 s of the leader's death a waiting replica follows pools; it repeats no write of the first."""
    await ground.put("twig")
    flags = (*ground.flags, f"--lease={ground.name}/kvist-operator")
    async with Children(tmp_path / ".") as children:
        leader = await started(children, ground.kubeconfig, *flags)
        await ground.until("twig", "Accepted", status="True")
        other = await started(children, ground.kubeconfig, *flags)
        assert await other.count("kvist_operator_leader") == 0
        await asyncio.sleep(3)  # so that it has seen the Lease change
        begin = asyncio.get_running_loop().time()
        leader.child.process.kill()
        while await other.count("kvist_operator_leader") != 1:
            await asyncio.sleep(0.1)
        assert asyncio.get_running_loop().time() - begin < 20
        while await other.count("kvist_operator_reconciles_total") < 1:
            await asyncio.sleep(0.05)
        assert await other.count('kvist_operator_api_requests_total{method="PATCH"') == 0
        await ground.put("twig", replicas=2)
        while (await ground.there(DEPLOYMENT, "twig"))["spec"]["replicas"] != 2:
            await asyncio.sleep(0.05)
        assert (await ground.there(POOL, "twig"))["status"]["operator"] == f"{ground.name}/kvist-operator"


async def test_scale_goes_through_the_pool(ground: Ground, tmp_path: Path) -> None:
    """A replica count written to /scale becomes that of the engines' Deployment; nothing else changes."""
    await ground.put("twig")
    path = f"{ground.space.of('kvist.dev', 'v1alpha1', 'inferencepools')}/twig"
    async with operating(tmp_path, ground.kubeconfig, *ground.flags):
        await ground.until("twig", "Available", reason="ScaledToZero")
        before = await ground.there(DEPLOYMENT, "twig")
        for wanted in (3, 1):
            body = {"spec": {"replicas": wanted}}
            await ground.space.client.ask("PATCH", f"{path}/scale", body, headers=MERGE)
            while (found := await ground.there(DEPLOYMENT, "twig"))["spec"]["replicas"] != wanted:
                await asyncio.sleep(0.05)
            assert found["spec"]["template"] == before["spec"]["template"]
        scale = await ground.space.client.ask("GET", f"{path}/scale")
        assert scale["status"]["selector"] == "kvist.dev/pool=twig"


async def test_objects_of_other_owners_are_left_alone(ground: Ground, tmp_path: Path) -> None:
    """A Service that has the name of one of ours is not touched, also when it has our labels; the condition
    names it, and once it is gone, ours is made."""
    await ground.put("other")
    body = {
        "metadata": {"name": "twig", "labels": {"app.kubernetes.io/managed-by": "kvist-operator"}},
        "spec": {"ports": [{"port": 1}]},
    }
    made = await ground.space.client.ask("POST", f"{ground.space.path}/services", body)
    await ground.put("twig")
    async with operating(tmp_path, ground.kubeconfig, *ground.flags):
        said = await ground.until("twig", "Ready", reason="NameConflict")
        assert "Service twig" in said
        found = await ground.there(SERVICE, "twig")
        assert found["metadata"]["uid"] == made["metadata"]["uid"]
        assert found["spec"]["ports"][0]["port"] == 1

        await ground.space.client.ask("DELETE", f"{ground.space.path}/services/twig")
        while (await ground.there(SERVICE, "twig"))["spec"]["ports"][0]["port"] == 1:
            await asyncio.sleep(0.05)


async def test_a_changed_pool_is_followed_and_unneeded_objects_are_deleted(
    ground: Ground, tmp_path: Path
) -> None:
    """With the pickers go their Deployment, rights and certificate; the engines stay as they are."""
    await ground.put("twig")
    async with operating(tmp_path, ground.kubeconfig, *ground.flags):
        await ground.until("twig", "Accepted", status="True")
        engines = await ground.there(DEPLOYMENT, "twig")
        await ground.put("twig", picker={"mode": "Off"}, engine={"kvCacheDtype": "Model"})
        # there is no garbage collector here, which ends a deletion in the foreground
        while any("deletionTimestamp" not in each["metadata"] for each in await _pickers(ground)):
            await asyncio.sleep(0.1)
        found = await ground.there(DEPLOYMENT, "twig")
        assert found["metadata"]["uid"] == engines["metadata"]["uid"]


async def _pickers(ground: Ground) -> list[Json]:
    found = await children(ground.server, ground.name)
    return [each for (_, name), each in found.items() if name.startswith("twig-epp")]


async def test_invalid_pools_end_in_a_condition(ground: Ground, tmp_path: Path) -> None:
    """Each invalid pool that the API server takes is refused by a condition with the message of its file;
    nothing is made for it, and nothing is tried again and again."""
    taken = [case for case in cases("invalid") if not case.api]
    for case in taken:
        made = {**case.pool, "metadata": {"name": case.name, "namespace": ground.name}}
        made["spec"] = {"accelerator": {"product": "H100-80GB"}, **case.pool["spec"]}
        await ground.server.apply(made)
    async with operating(tmp_path, ground.kubeconfig, *ground.flags) as operator:
        for case in taken:
            said = await ground.until(case.name, "Accepted", status="False")
            assert case.operator in said, case.name
        assert await children(ground.server, ground.name) == {}
        assert await operator.count('kvist_operator_reconciles_total{result="InternalError"') == 0
        before = await operator.count("kvist_operator_reconciles_total")
        await asyncio.sleep(3)
        assert await operator.count("kvist_operator_reconciles_total") <= before + len(taken)
    assert len(taken) >= 5


async def test_without_node_labels_the_spec_has_to_say(ground: Ground, tmp_path: Path) -> None:
    """An operator of some namespaces may not read nodes: the condition says which field to set, and the pool
    goes on when it is set."""
    await ground.put("twig", accelerator={})
    async with operating(tmp_path, ground.kubeconfig, *ground.flags):
        said = await ground.until("twig", "Accepted", status="False", reason="AcceleratorUnknown")
        assert "spec.accelerator.product" in said
        await ground.put("twig", accelerator={"product": "L4"})
        await ground.until("twig", "Accepted", status="True")


async def test_cluster_wide_it_reads_nodes_and_all_namespaces(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """With exactly the rules of the ClusterRole, pools of every namespace are reconciled, and the labels of
    two kinds of nodes supply what a pool does not specify: the one that holds its model."""
    await with_crd(admin)
    kubeconfig = await account(plane, admin, space.name)
    gpu = "nvidia.com/gpu"
    kinds = {
        "t4-node": {f"{gpu}.product": "Tesla-T4", f"{gpu}.memory": "15360", f"{gpu}.count": "1"},
        "new-node": {
            f"{gpu}.product": "NVIDIA-Brand-New",
            f"{gpu}.memory": "97871",
            f"{gpu}.compute.major": "9",
            f"{gpu}.compute.minor": "0",
            f"{gpu}.count": "4",
        },
    }
    for name, labels in kinds.items():
        await admin.ask("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
    small: dict[str, Any] = {
        "model": {"source": "hf://Qwen/Qwen3-0.6B"},
        "workload": {"promptTokens": 1000, "outputTokens": 200},
    }
    try:
        async with administrator(plane) as server:
            await server.apply(pool("large", space.name, accelerator={}))
            await server.apply(pool("small", space.name, accelerator={}, **small))
            async with operating(tmp_path, kubeconfig, *QUICK):
                for name in ("large", "small"):
                    await until_condition(server, name, space.name, "Accepted", status="True")
            found = {n: await server.get(Target(POOL, space.name, n)) for n in ("large", "small")}
            plans = {name: each["status"]["plan"] for name, each in found.items() if each}
            assert plans["large"]["accelerator"]["product"] == "NVIDIA-Brand-New"
            assert plans["large"]["accelerator"]["capability"] == 90
            assert 94 < plans["large"]["memory"]["perGpuGib"] < 95
            assert "--kv-cache-dtype" in plans["large"]["args"]
            assert plans["small"]["accelerator"]["product"] == "Tesla-T4"
            for name in plans:
                await admin.ask("DELETE", Target(POOL, space.name, name).path)
    finally:
        for name in kinds:
            await admin.ask("DELETE", f"/api/v1/nodes/{name}")


async def test_a_quota_is_a_condition_that_names_the_object(ground: Ground, tmp_path: Path) -> None:
    """If the API server refuses one object, the condition quotes it with a remedy, the others are created,
    and the pool recovers once the quota allows."""
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"count/deployments.apps": "1"}}}
    await ground.space.client.ask("POST", f"{ground.space.path}/resourcequotas", quota)
    status = {"status": {"hard": {"count/deployments.apps": "1"}, "used": {"count/deployments.apps": "0"}}}
    path = f"{ground.space.path}/resourcequotas/few"
    await ground.space.client.ask("PATCH", f"{path}/status", status, headers=MERGE)
    await ground.put("twig")
    async with operating(tmp_path, ground.kubeconfig, *ground.flags):
        said = await ground.until("twig", "Progressing", reason="QuotaExceeded")
        assert re.search(r"deployments/twig.*exceeded quota: few.*raise the ResourceQuota", said)
        await ground.space.client.ask("DELETE", path)
        await ground.until("twig", "Available", reason="ScaledToZero")
        await ground.until("twig", "Progressing", reason="Settled")


async def test_a_right_that_is_taken_away_is_a_condition_that_says_which(
    ground: Ground, tmp_path: Path
) -> None:
    """Without the right to write budgets everything else is made, and the condition names the rule."""
    rbac = ground.space.of("rbac.authorization.k8s.io", "v1", "roles")
    role = await ground.space.client.ask("GET", f"{rbac}/kvist-operator")
    rules = [dict(rule) for rule in role["rules"]]
    poorer = [
        {**r, "verbs": ["get", "list", "watch"]} if "poddisruptionbudgets" in r["resources"] else r
        for r in rules
    ]
    async with operating(tmp_path, ground.kubeconfig, *ground.flags):
        await ground.space.client.ask("PATCH", f"{rbac}/kvist-operator", {"rules": poorer}, headers=MERGE)
        await ground.put("twig")
        said = await ground.until("twig", "Progressing", reason="Forbidden")
        assert 'resources: ["poddisruptionbudgets"], verbs: ["patch"]' in said
        await ground.there(DEPLOYMENT, "twig")

        await ground.space.client.ask("PATCH", f"{rbac}/kvist-operator", {"rules": rules}, headers=MERGE)
        await ground.until("twig", "Progressing", reason="Settled")


async def test_it_says_which_rights_are_missing_before_it_starts(ground: Ground, tmp_path: Path) -> None:
    """Without a binding, the operator exits with code 1 and names the first missing rights."""
    rbac = ground.space.of("rbac.authorization.k8s.io", "v1", "rolebindings")
    await ground.space.client.ask("DELETE", f"{rbac}/kvist-operator")
    async with Children(tmp_path) as running:
        operator = await started(running, ground.kubeconfig, *ground.flags, ready=False)
        while operator.child.running():
            await asyncio.sleep(0.05)
        tail = operator.child.tail()
    assert "may not create configmaps in " + ground.name in tail
    assert "docs/guides/operator.md" in tail


async def test_without_the_crd_it_says_how_to_get_it(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """Exit code 1 and the command."""
    await admin.uninstall("inferencepools.kvist.dev")
    async with Children(tmp_path) as running:
        operator = await started(running, plane.kubeconfig("admin"), ready=False)
        while operator.child.running():
            await asyncio.sleep(0.05)
        tail = operator.child.tail()
    assert "kubectl apply --server-side -f crds/inferencepools.yaml" in tail


async def test_sigterm_ends_it_with_0(ground: Ground, tmp_path: Path) -> None:
    """In seconds, with pools and watches open."""
    await ground.put("twig")
    async with Children(tmp_path) as running:
        operator = await started(running, ground.kubeconfig, *ground.flags)
        await ground.until("twig", "Accepted", status="True")
        assert await running.end(operator.child, signal.SIGTERM, 10) == 0
