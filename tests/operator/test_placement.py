"""Placement of the pods of replicas, and what they need to reach each other over nodes."""

from typing import Any

import pytest
from tests.crd.cases import planned
from tests.operator.manifested import CASES, one, rendered, resource

from kvist_operator.errors import SpecError

Json = dict[str, Any]
GROUP = "leaderworkerset.sigs.k8s.io/group-key"
REVISION = "leaderworkerset.sigs.k8s.io/template-revision-hash"
EXCLUSIVE = "leaderworkerset.sigs.k8s.io/exclusive-topology"
RDMA = {"resourceName": "rdma/hca", "count": 8}


def groups(**interconnect: Any) -> Json:
    """Return the LeaderWorkerSet of a pool over two nodes."""
    return one(rendered("two-nodes", interconnect=interconnect), "LeaderWorkerSet", "twig")


def roles(made: Json) -> tuple[Json, Json]:
    """Return the pod templates of leader and workers."""
    group = made["spec"]["leaderWorkerTemplate"]
    return group["leaderTemplate"], group["workerTemplate"]


def selects(term: Json, labels: Json) -> bool:
    """Return whether a label selector of equalities selects a pod."""
    return bool(term["labelSelector"]["matchLabels"].items() <= labels.items())


def test_groups_are_spread_and_not_the_pods_of_a_group() -> None:
    """Replicas are spread by their leaders, counted apart by revision; a worker has no constraint of its own,
    so that nothing pulls it away from its leader."""
    leader, worker = roles(groups())
    constraints = leader["spec"]["topologySpreadConstraints"]

    assert [c["topologyKey"] for c in constraints] == [
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    ]
    for constraint in constraints:
        assert selects(constraint, leader["metadata"]["labels"])
        assert not selects(constraint, worker["metadata"]["labels"])
        assert constraint["matchLabelKeys"] == [REVISION]
    assert "topologySpreadConstraints" not in worker["spec"]


@pytest.mark.parametrize("placement", ["Preferred", "Required"])
def test_pods_of_a_group_are_near_each_other(placement: str) -> None:
    """Every pod of a group prefers, or requires, the value of the label that the others of its group have;
    the node affinity of the accelerator stays."""
    for template in roles(groups(placement=placement, topologyKey="example.com/rack")):
        affinity = template["spec"]["affinity"]
        assert "requiredDuringSchedulingIgnoredDuringExecution" in affinity["nodeAffinity"]
        near = affinity["podAffinity"]
        if placement == "Preferred":
            [weighted] = near["preferredDuringSchedulingIgnoredDuringExecution"]
            term = weighted["podAffinityTerm"]
        else:
            [term] = near["requiredDuringSchedulingIgnoredDuringExecution"]
        assert (term["topologyKey"], term["matchLabelKeys"]) == ("example.com/rack", [GROUP])
        assert all(selects(term, t["metadata"]["labels"]) for t in roles(groups()))


def test_an_exclusive_placement_is_left_to_the_leaderworkerset() -> None:
    """The annotation names the label of nodes, and no affinity to pods contradicts it."""
    made = groups(placement="Exclusive", topologyKey="cloud.google.com/gke-nodepool")

    assert made["metadata"]["annotations"] == {EXCLUSIVE: "cloud.google.com/gke-nodepool"}
    assert all("podAffinity" not in template["spec"]["affinity"] for template in roles(made))
    assert EXCLUSIVE not in str(groups())


def test_every_pod_of_a_group_has_the_devices() -> None:
    """RDMA devices are requested and limited alike, in leader and workers, beside the accelerators."""
    for template in roles(groups(rdma=RDMA)):
        [container] = template["spec"]["containers"]
        amounts = container["resources"]
        assert amounts["requests"]["rdma/hca"] == amounts["limits"]["rdma/hca"] == "8"
        assert amounts["limits"]["nvidia.com/gpu"] == "8"
    assert "rdma/hca" not in str(groups())


def test_ipc_lock_runs_as_root_and_can_be_left_out() -> None:
    """A capability has no effect for other users, so engines that lock memory run as root, in the group of
    their volumes; without it pods are restricted."""
    for locked in roles(groups(rdma=RDMA)):
        pod, [container] = locked["spec"], locked["spec"]["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        user = pod["securityContext"]
        assert (user["runAsUser"], user["runAsNonRoot"]) == (0, False)
        assert user["runAsGroup"] == user["fsGroup"] == 2000
    for plain in roles(groups(rdma=RDMA | {"ipcLock": "Disabled"})):
        assert plain["spec"]["securityContext"]["runAsNonRoot"] is True
        assert "IPC_LOCK" not in str(plain)


@pytest.mark.parametrize("case", CASES)
def test_generations_are_counted_apart(case: str) -> None:
    """During a rollout the spread of new pods does not count those of the generation before. The key is
    never one of the selector's labels, which the API server would refuse."""
    seen = 0
    for made in rendered(case).objects:
        if made["kind"] != "Deployment":
            continue
        for constraint in made["spec"]["template"]["spec"].get("topologySpreadConstraints", ()):
            assert constraint["matchLabelKeys"] == ["pod-template-hash"]
            assert "pod-template-hash" not in constraint["labelSelector"]["matchLabels"]
            seen += 1
    assert seen or case == "two-nodes"


def test_the_warning_of_tcp_has_the_bytes_between_stages() -> None:
    """Without RDMA the plan says what a step sends to the next stage: two tensors of the hidden size for each
    token. GLM-5 has 6,144 hidden elements of two bytes."""
    pool = resource("two-nodes")
    del pool["spec"]["interconnect"]
    plan = planned(pool)
    [line] = [each for each in plan.warnings if "interconnect" in each]
    tokens = plan.settings.batched_tokens
    size = 2 * 6144 * 2 * tokens

    assert plan.nodes == 2
    assert f"each step of {tokens} tokens sends {size / (1 << 20):.0f} MiB" in line
    assert f"{size * 8 / 25e9 * 1000:.0f} ms at 25 Gbit/s" in line
    assert planned(resource("two-nodes")).warnings == ()


@pytest.mark.parametrize(
    ("rdma", "field"),
    [
        ({"count": 1}, "spec.interconnect.rdma.resourceName"),
        ({"resourceName": "hca"}, "spec.interconnect.rdma.resourceName"),
        ({"resourceName": "nvidia.com/gpu"}, "spec.interconnect.rdma.resourceName"),
        ({"resourceName": "kubernetes.io/hca"}, "spec.interconnect.rdma.resourceName"),
        ({"resourceName": "rdma/hca", "count": 0}, "spec.interconnect.rdma.count"),
    ],
)
def test_wrong_devices_are_refused(rdma: Json, field: str) -> None:
    """A resource that no device plugin can announce, or that is the accelerator, is refused by its field."""
    with pytest.raises(SpecError) as refused:
        groups(rdma=rdma)

    assert refused.value.field == field
