"""Capabilities of the cluster, and which of its changes must not affect a running pool."""

from typing import Any

import pytest
from tests.operator import pools
from tests.operator.memory import Memory

from kvist_operator.cluster import capabilities
from kvist_operator.cluster.capabilities import (
    Capabilities,
    with_planned_first,
    with_required_labels,
)
from kvist_operator.cluster.kinds import CHILDREN, CLAIM, SECURITY_CONSTRAINTS, Target
from kvist_operator.errors import Forbidden, Unavailable
from kvist_operator.manifests.object_names import Referrer
from kvist_operator.node_labels import node_kinds
from kvist_operator.plan import make_plan
from kvist_operator.spec import read_pool
from kvist_operator.status.views import plan_status

L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.count": "4"}
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.count": "8"}


def planned(product: str, source: str, verdict: str = "fits", **more: Any) -> dict[str, Any]:
    """Return a status with a plan."""
    choices = [{"field": "accelerator", "value": product, "source": source, "reason": ""}]
    choices += [{"field": key, "value": str(value), "source": source} for key, value in more.items()]
    plan = {"verdict": verdict, "accelerator": {"product": product, "perNode": 1}, "choices": choices}
    return {"plan": plan}


def names(found: list[Any]) -> list[tuple[str, int]]:
    """Return accelerators and their number per node."""
    return [(facts.accelerator.name, facts.per_node) for facts in found]


def test_what_was_planned_by_node_labels_stays_first() -> None:
    """The planned accelerator stays first, whatever nodes there are, or none."""
    status = planned("NVIDIA-L4", "node labels", perNode=4)
    assert names(with_planned_first(node_kinds([H100, H100, L4]), status)) == [
        ("L4", 4),
        ("H100-80GB", 8),
    ]
    assert names(with_planned_first(node_kinds([H100]), status)) == [("L4", 4), ("H100-80GB", 8)]
    assert names(with_planned_first([], status)) == [("L4", 4)]


def test_a_plan_by_the_spec_or_a_refused_one_keeps_no_accelerator() -> None:
    """A plan by the spec, or one that was refused, keeps no accelerator."""
    assert with_planned_first([], planned("NVIDIA-L4", "spec.accelerator.product")) == []
    assert names(with_planned_first(node_kinds([H100]), planned("NVIDIA-L4", "node labels", "refused"))) == [
        ("H100-80GB", 8)
    ]
    assert with_planned_first([], {}) == []


def test_labels_that_pods_already_require_are_kept() -> None:
    """Required labels are read from either kind of workload; other affinity rules are ignored."""
    rules = [
        {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-L4"]},
        {"key": "zone", "operator": "In", "values": ["a"]},
    ]
    required = {"nodeSelectorTerms": [{"matchExpressions": rules}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    pod = {"spec": {"affinity": affinity}}
    for spec in ({"template": pod}, {"leaderWorkerTemplate": {"workerTemplate": pod}}):
        assert with_required_labels([H100], {"spec": spec}) == (H100, {"nvidia.com/gpu.product": "NVIDIA-L4"})
    assert with_required_labels([H100], None) == (H100,)


def test_a_planned_kind_is_known_without_its_nodes() -> None:
    """A card that only labels described, and a MIG slice, are planned the same after their last node went."""
    gpu = {"nvidia.com/gpu.product": "NVIDIA-Brand-New", "nvidia.com/gpu.memory": "97871"}
    capability = {"nvidia.com/gpu.compute.major": "13", "nvidia.com/gpu.compute.minor": "0"}
    slices = {"nvidia.com/mig-1g.10gb.count": "2", "nvidia.com/mig-1g.10gb.memory": "9728"}
    divided = {"nvidia.com/gpu.product": "NVIDIA-A100-80GB-PCIe", "nvidia.com/gpu.replicas": "0", **slices}
    wanted, facts = pools.pool("hf://Qwen/Qwen3-0.6B"), pools.known("Qwen/Qwen3-0.6B")
    for labels in ({**gpu, **capability}, divided):
        before = make_plan(wanted, facts, nodes=node_kinds([labels]))
        kinds = with_planned_first(node_kinds([H100]), {"plan": plan_status(before)})
        after = make_plan(wanted, facts, nodes=kinds)
        assert kinds[0].planned
        assert (after.hash, after.memory.kv_tokens) == (before.hash, before.memory.kv_tokens)
        assert after.hardware.accelerator.resource == before.hardware.accelerator.resource


async def test_a_discovery_finds_apis_and_nodes_each_kind_once() -> None:
    """Two discoveries of an unchanged cluster are equal."""
    cluster = Memory()
    cluster.absent = {kind for kind in CHILDREN if kind.kind == "HTTPRoute"}
    for name, labels in (("a", L4), ("b", L4), ("c", {"x": "y"})):
        cluster.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
    made = Capabilities(cluster, nodes_allowed=True)
    first = await made.discover()
    assert first.labels == (L4,)
    assert names(list(first.accelerators)) == [("L4", 4)]
    assert not any("httproutes" in api for api in first.apis)
    assert await made.discover() == first
    assert (await Capabilities(cluster, nodes_allowed=False).discover()).labels == ()


async def test_openshift_is_known_by_its_constraints_for_pods() -> None:
    """The API is looked for and not followed: operators may not list it."""
    cluster = Memory()
    assert not (await Capabilities(cluster, nodes_allowed=True).discover()).assigns_users
    cluster.openshift = True
    found = await Capabilities(cluster, nodes_allowed=True).discover()
    assert found.assigns_users
    assert SECURITY_CONSTRAINTS not in found.kinds


async def test_numbers_that_labels_lack_are_read_from_the_nodes() -> None:
    """A cloud's label has the product alone: the kubelet reports the number, on some nodes later than on
    others."""
    cluster = Memory()
    gke = {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    amd = {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}
    nodes = {"a": (gke, {"nvidia.com/gpu": "2"}), "b": (amd, {"amd.com/gpu": "4"}), "c": (L4, {})}
    for name, (labels, amounts) in nodes.items():
        meta = {"name": name, "labels": labels}
        status = {"allocatable": {"cpu": "8", **amounts}}
        cluster.put({"apiVersion": "v1", "kind": "Node", "metadata": meta, "status": status})
    made = Capabilities(cluster, nodes_allowed=True)
    first = await made.discover()
    assert names(list(first.accelerators)) == [("L4", 2), ("L4", 4), ("MI300X-192GB", 4)]

    starting = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "d", "labels": gke}}
    cluster.put({**starting, "status": {"allocatable": {"nvidia.com/gpu": "0"}}})
    assert ("L4", 8) in names(list((await made.discover()).accelerators))
    cluster.put({**starting, "status": {"allocatable": {"nvidia.com/gpu": "1"}}})
    assert ("L4", 1) in names(list((await made.discover()).accelerators))
    cluster.objects.clear()
    assert (await made.discover()).accelerators == ()


@pytest.mark.parametrize(
    "model",
    [{"source": "pvc://models/a"}, {"source": "hf://a/b", "cache": {"claim": "models"}}],
    ids=["model", "cache"],
)
async def test_claims_are_read_once_they_exist(model: dict[str, Any]) -> None:
    """Access modes are kept; an absent claim is looked up again later."""
    cluster = Memory()
    meta = {"name": "twig", "namespace": "forest"}
    body = {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool", "metadata": meta}
    pool = read_pool({**body, "spec": {"model": model}})
    made = Capabilities(cluster, nodes_allowed=True)
    claim = {"apiVersion": "v1", "kind": CLAIM.kind, "metadata": {"name": "models", "namespace": "forest"}}
    cluster.put({**claim, "spec": {"accessModes": ["ReadOnlyMany"]}})

    assert await made.claims(pool) == {"models": frozenset({"ReadOnlyMany"})}
    cluster.objects.clear()
    assert await made.claims(pool) == {"models": frozenset({"ReadOnlyMany"})}
    assert await Capabilities(cluster, nodes_allowed=True).claims(pool) == {}


def gateway(name: str, of_class: str, namespace: str = "forest") -> dict[str, Any]:
    """Return a Gateway of a class."""
    meta = {"name": name, "namespace": namespace}
    spec = {"gatewayClassName": of_class}
    return {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": meta, "spec": spec}


def gateway_class(name: str, controller: str) -> dict[str, Any]:
    """Return a class of gateways."""
    body = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "GatewayClass"}
    return {**body, "metadata": {"name": name}, "spec": {"controllerName": controller}}


def attached(*parents: dict[str, str]) -> Any:
    """Return a pool whose route has these parents."""
    meta = {"name": "twig", "namespace": "forest"}
    spec = {
        "model": {"source": "hf://Qwen/Qwen3-0.6B"},
        "gateway": {"mode": "Route", "parentRefs": [*parents]},
    }
    return read_pool(
        {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool", "metadata": meta, "spec": spec}
    )


async def test_controllers_are_those_of_the_classes_of_the_pool_s_gateways() -> None:
    """Gateways are looked up in the pool's namespace or in the one that is named, each once in a while; other
    kinds of parents and absent objects give none."""
    cluster = Memory()
    cluster.put(gateway("edge", "gke-l7-rilb"))
    cluster.put(gateway("edge", "mesh", "doors"))
    cluster.put(gateway("lost", "gone"))
    cluster.put(gateway_class("gke-l7-rilb", "networking.gke.io/gateway"))
    cluster.put(gateway_class("mesh", "istio.io/gateway-controller"))
    made = Capabilities(cluster, nodes_allowed=True)
    pool = attached(
        {"name": "edge"},
        {"name": "edge", "namespace": "doors"},
        {"name": "lost"},
        {"name": "absent"},
        {"name": "edge", "kind": "Service"},
    )
    both = {"networking.gke.io/gateway", "istio.io/gateway-controller"}
    assert await made.controllers(pool) == both
    cluster.objects.clear()
    assert await made.controllers(pool) == both
    assert await Capabilities(cluster, nodes_allowed=True).controllers(pool) == frozenset()


async def test_gateways_with_routes_of_the_user_s_have_the_controllers_of_their_classes() -> None:
    """A Gateway that is absent, as Istio calls parents of other kinds, has none, whatever the report says;
    one that may not be read has that of the report."""
    cluster = Memory()
    cluster.put(gateway("edge", "mesh", "doors"))
    cluster.put(gateway_class("mesh", "istio.io/gateway-controller"))
    reported = (
        Referrer("doors", "edge", controller="x"),
        Referrer("doors", "absent", controller="x"),
        Referrer("doors", "set", "ListenerSet", "x"),
        Referrer("doors", "a/b", controller="x"),
    )
    made = Capabilities(cluster, nodes_allowed=True)
    found = [each.controller for each in await made.resolved(reported)]
    assert found == ["istio.io/gateway-controller", "", "x", "x"]

    async def refuse(target: Target) -> dict[str, Any] | None:
        raise Forbidden(f"may not read {target}", 403)

    cluster.get = refuse  # type: ignore[method-assign]
    assert await Capabilities(cluster, nodes_allowed=True).resolved(reported) == reported


async def test_a_gateway_that_may_not_be_read_keeps_the_last_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Operators with older rules, or for some namespaces, know none; an error changes nothing that was
    known."""
    monkeypatch.setattr(capabilities, "GATEWAY_SECONDS", 0.0)
    cluster = Memory()
    cluster.put(gateway("edge", "gke-l7-rilb"))
    cluster.put(gateway_class("gke-l7-rilb", "networking.gke.io/gateway"))
    made = Capabilities(cluster, nodes_allowed=False)
    pool = attached({"name": "edge"})
    read = cluster.get
    for kind, error in (("GatewayClass", Forbidden("may not", 403)), ("Gateway", Unavailable("busy", 503))):

        async def refuse(target: Target, kind: str = kind, error: Exception = error) -> dict[str, Any] | None:
            if target.kind.kind == kind:
                raise error
            return await read(target)

        cluster.get = refuse  # type: ignore[method-assign]
        assert await Capabilities(cluster, nodes_allowed=False).controllers(pool) == frozenset()
        cluster.get = read  # type: ignore[method-assign]
        assert await made.controllers(pool) == {"networking.gke.io/gateway"}
        cluster.get = refuse  # type: ignore[method-assign]
        assert await made.controllers(pool) == {"networking.gke.io/gateway"}


async def test_pools_without_a_route_read_no_gateway() -> None:
    """Pools with an Envoy of their own, or without a gateway, send no request for it."""
    cluster = Memory()

    async def refuse(target: Target) -> dict[str, Any] | None:
        raise AssertionError(target)

    cluster.get = refuse  # type: ignore[method-assign]
    own = pools.pool("hf://Qwen/Qwen3-0.6B")
    assert await Capabilities(cluster, nodes_allowed=True).controllers(own) == frozenset()
