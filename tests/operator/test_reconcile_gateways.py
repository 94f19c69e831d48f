"""One reconciliation of a pool at a Gateway on a cluster in memory: what gateways report, their policies."""

import pytest
from tests.operator.ground import Ground

from kvist_operator.cluster.cluster_api import Json
from kvist_operator.cluster.kinds import (
    Target,
    kind_named,
)
from kvist_operator.errors import ClusterError, Refused
from kvist_operator.reconcile import applier


async def test_the_engines_port_closes_when_the_gateway_has_answered(ground: Ground) -> None:
    """Until a gateway has answered the route its pods are not known: the port is open, and advice says so.
    The controller in the route's status closes it for all others."""
    policy = Target(kind_named("networking.k8s.io", "NetworkPolicy"), "forest", "twig")
    route = Target(kind_named("gateway.networking.k8s.io", "HTTPRoute"), "forest", "twig")

    async def first_rule() -> Json:
        found = await ground.cluster.get(policy)
        assert found is not None
        rule: Json = found["spec"]["ingress"][0]
        return rule

    ground.cluster.absent = set()
    ground.put(gateway={"mode": "Route", "parentRefs": [{"name": "edge"}]})
    await ground.look()
    assert "from" not in await first_rule()
    assert "no gateway has answered the route" in " ".join((await ground.status())["advice"])

    made = await ground.cluster.get(route)
    assert made is not None
    answer = {"controllerName": "istio.io/gateway-controller", "parentRef": {"name": "edge"}}
    ground.cluster.put({**made, "status": {"parents": [answer]}})
    await ground.look()
    assert "apply NetworkPolicy twig" in ground.cluster.writes
    assert "from" in await first_rule()
    assert "no gateway has answered" not in " ".join((await ground.status()).get("advice", []))


async def test_a_pool_without_a_route_follows_what_gateways_report(ground: Ground) -> None:
    """The Gateways in the status of the InferencePool are those that may connect, whatever their order; GKE's
    policies stay once they are there, since users add to them."""
    policy = Target(kind_named("networking.k8s.io", "NetworkPolicy"), "forest", "twig")
    named = Target(kind_named("inference.networking.k8s.io", "InferencePool"), "forest", "twig")

    async def reported(*names: str) -> Json:
        made = await ground.cluster.get(named)
        assert made is not None
        # Istio writes the group of its own API
        answers = [{"parentRef": {"group": "networking.istio.io", "name": name}} for name in names]
        ground.cluster.put({**made, "status": {"parents": answers}})
        await ground.look()
        return await ground.said("GatewayAttached")

    async def first_rule() -> str:
        found = await ground.cluster.get(policy)
        assert found is not None
        return str(found["spec"]["ingress"])

    group = {"apiVersion": "gateway.networking.k8s.io/v1"}
    classes = {"istio": "istio.io/gateway-controller", "gke": "networking.gke.io/gateway"}
    for name, controller in classes.items():
        spec = {"controllerName": controller}
        ground.cluster.put({**group, "kind": "GatewayClass", "metadata": {"name": name}, "spec": spec})
    for name, of in (("a", "istio"), ("b", "istio"), ("l7", "gke")):
        meta = {"name": name, "namespace": "forest"}
        ground.cluster.put({**group, "kind": "Gateway", "metadata": meta, "spec": {"gatewayClassName": of}})
    ground.cluster.absent = set()
    ground.put(gateway={"mode": "Route"})
    await ground.look()
    assert (await reported())["reason"] == "NoRoute"
    assert "gateway-name" not in await first_rule()
    assert not any("HTTPRoute" in write for write in ground.cluster.writes)

    assert (await reported("b", "a"))["message"] == "a, b"
    assert "apply NetworkPolicy twig" in ground.cluster.writes
    assert "'gateway.networking.k8s.io/gateway-name': 'b'" in await first_rule()
    await reported("a", "b", "a")
    assert "apply NetworkPolicy twig" not in ground.cluster.writes

    await reported("l7")
    assert "gateway-name" not in await first_rule()
    ground.restart()
    await reported()
    for kind in ("HealthCheckPolicy", "GCPBackendPolicy"):
        assert await ground.cluster.get(Target(kind_named("networking.gke.io", kind), "forest", "twig"))
        assert f"delete {kind} twig" not in ground.cluster.writes


@pytest.mark.parametrize("read", [True, False], ids=["gateways may be read", "they may not"])
async def test_a_route_of_gke_has_no_timeouts(ground: Ground, *, read: bool) -> None:
    """GKE refuses routes with timeouts. A Gateway that may be read is known by its class before the route is
    written; else GKE's answer to the route names it, and the route is written again. The policies of GKE come
    and go with the controller."""
    ground.cluster.absent = set()
    group = {"apiVersion": "gateway.networking.k8s.io/v1"}
    edge = {"metadata": {"name": "edge", "namespace": "forest"}, "spec": {"gatewayClassName": "gke-l7-rilb"}}
    ground.cluster.put({**group, "kind": "Gateway", **edge})
    if read:
        spec = {"controllerName": "networking.gke.io/gateway"}
        ground.cluster.put(
            {**group, "kind": "GatewayClass", "metadata": {"name": "gke-l7-rilb"}, "spec": spec}
        )
    route = Target(kind_named("gateway.networking.k8s.io", "HTTPRoute"), "forest", "twig")

    async def timeouts() -> bool:
        found = await ground.cluster.get(route)
        assert found is not None
        return "timeouts" in found["spec"]["rules"][0]

    ground.put(gateway={"mode": "Route", "parentRefs": [{"name": "edge"}]})
    await ground.look()
    assert await timeouts() is not read
    assert ("apply HealthCheckPolicy twig" in ground.cluster.writes) is read

    made = await ground.cluster.get(route)
    assert made is not None
    refused = {"type": "Accepted", "status": "False", "reason": "Invalid", "message": "GWCER104"}
    answer = {
        "controllerName": "networking.gke.io/gateway",
        "parentRef": {"name": "edge"},
        "conditions": [refused],
    }
    ground.cluster.put({**made, "status": {"parents": [answer]}})
    await ground.look()
    assert not await timeouts()
    policies = ("HealthCheckPolicy", "GCPBackendPolicy")
    for kind in policies:
        assert await ground.cluster.get(Target(kind_named("networking.gke.io", kind), "forest", "twig"))

    ground.put(gateway={"mode": "Envoy"})
    await ground.look()
    for kind in policies:
        assert not await ground.cluster.get(Target(kind_named("networking.gke.io", kind), "forest", "twig"))


async def test_a_refused_policy_of_a_gateway_is_advice_and_the_pool_is_attached(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that only raises a gateway's limits holds nothing up: advice quotes the refusal. It is tried
    again after a while, and the advice ends once it is there."""
    ground.cluster.absent = set()
    group = {"apiVersion": "gateway.networking.k8s.io/v1"}
    edge = {"metadata": {"name": "edge", "namespace": "forest"}, "spec": {"gatewayClassName": "nginx"}}
    spec = {"controllerName": "gateway.nginx.org/nginx-gateway-controller"}
    ground.cluster.put({**group, "kind": "Gateway", **edge})
    ground.cluster.put({**group, "kind": "GatewayClass", "metadata": {"name": "nginx"}, "spec": spec})
    ground.put(gateway={"mode": "Route", "parentRefs": [{"name": "edge"}]})
    error = Refused("apply ProxySettingsPolicy twig: .spec.timeout: field not declared in schema", 500)
    tried = []

    def refuse(_verb: str, target: Target) -> ClusterError | None:
        tried.append(target.kind.kind)
        return error if target.kind.kind == "ProxySettingsPolicy" else None

    def attempts() -> int:
        return tried.count("ProxySettingsPolicy")

    ground.cluster.refuse = refuse
    await ground.look()
    advice = " ".join((await ground.status())["advice"])
    assert "ProxySettingsPolicy twig could not be written" in advice
    assert "field not declared in schema" in advice
    assert "apply ClientSettingsPolicy twig" in ground.cluster.writes
    assert "apply HTTPRoute twig" in ground.cluster.writes
    assert (await ground.said("Progressing"))["reason"] != "ObjectRefused"

    await ground.look()
    assert attempts() == 1
    assert ground.cluster.writes == []
    monkeypatch.setattr(applier, "REFUSED_SECONDS", 0.0)
    ground.restart()
    await ground.look()
    await ground.look()
    assert attempts() == 3
    ground.cluster.refuse = lambda _verb, _target: None
    await ground.look()
    assert "apply ProxySettingsPolicy twig" in ground.cluster.writes
    assert "could not be written" not in " ".join((await ground.status()).get("advice", []))


async def test_a_policy_of_the_user_s_own_is_left_as_it_is(ground: Ground) -> None:
    """A policy for TLS to the pickers that a user made under the operator's name is no conflict: it stays,
    and advice says so until it is deleted."""
    ground.cluster.absent = set()
    meta = {"name": "twig-epp", "namespace": "forest"}
    own = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "BackendTLSPolicy", "metadata": meta}
    ground.cluster.put({**own, "spec": {"mine": True}})
    ground.put(gateway={"mode": "Route", "parentRefs": [{"name": "edge"}]})
    await ground.look()
    target = Target(kind_named("gateway.networking.k8s.io", "BackendTLSPolicy"), "forest", "twig-epp")
    kept = await ground.cluster.get(target)
    assert kept is not None
    assert kept["spec"] == {"mine": True}
    assert (await ground.said("Ready"))["reason"] != "NameConflict"
    assert "BackendTLSPolicy twig-epp does not belong to the pool" in " ".join(
        (await ground.status())["advice"]
    )

    del ground.cluster.objects[target]
    await ground.look()
    assert "apply BackendTLSPolicy twig-epp" in ground.cluster.writes
    assert "does not belong" not in " ".join((await ground.status()).get("advice", []))
