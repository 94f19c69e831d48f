"""The manifests that attach a pool to its Gateway, and the policies that a gateway needs."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.manifested import SITE, one, rendered

from kvist_operator.manifests import Api
from kvist_operator.manifests.object_names import ENVOY_GATEWAY, GKE, HIGRESS, ISTIO, NGINX


@pytest.mark.parametrize("there", [True, False], ids=["installed", "not installed"])
def test_pools_of_the_extension_have_a_policy_for_tls_where_its_api_is(*, there: bool) -> None:
    """Istio asks pickers in plaintext without a BackendTLSPolicy; where there is no such API, the pool is
    attached without it, and nothing is missing."""
    site = SITE if there else replace(SITE, apis=SITE.apis - {Api.BACKEND_TLS_POLICY})
    found = rendered("route", site)
    kinds = {made["kind"] for made in found.objects}

    assert {"InferencePool", "HTTPRoute"} < kinds
    assert ("BackendTLSPolicy" in kinds) == there
    assert [note for note in found.notes if note.reason == "ApiMissing"] == []
    if there:
        spec = one(found, "BackendTLSPolicy", "twig-epp")["spec"]
        ports = one(found, "Service", "twig-epp")["spec"]["ports"]
        assert spec["targetRefs"][0]["sectionName"] in {port["name"] for port in ports}
        assert spec["validation"]["hostname"] == "twig-epp.forest.svc"


def test_istio_without_the_api_for_tls_is_advice() -> None:
    """A pool whose route Istio, or Higress, has is advised of the missing API, and no other pool."""
    without = SITE.apis - {Api.BACKEND_TLS_POLICY}

    def reasons(case: str, **site: Any) -> set[str]:
        return {note.reason for note in rendered(case, replace(SITE, **site)).notes if not note.condition}

    for controller in (ISTIO, HIGRESS):
        assert "TlsPolicyMissing" in reasons("route", apis=without, gateways=frozenset({controller}))
    assert "TlsPolicyMissing" not in reasons("route", gateways=frozenset({ISTIO}))
    assert "TlsPolicyMissing" not in reasons(
        "route", apis=without, gateways=frozenset({"kgateway.dev/kgateway"})
    )
    assert "TlsPolicyMissing" not in reasons("minimal", apis=without, gateways=frozenset({ISTIO}))


@pytest.mark.parametrize(
    ("picker", "target"),
    [({}, ("inference.networking.k8s.io", "InferencePool")), ({"mode": "Off"}, ("", "Service"))],
    ids=["with a picker", "without"],
)
def test_gke_gets_a_route_without_timeouts_and_its_policies(
    picker: dict[str, Any], target: tuple[str, str]
) -> None:
    """GKE refuses routes with timeouts, asks ``/`` for health and ends answers after 30 s: its route has no
    timeouts, and its policies name the backend, the engines' probe and times that suit long answers."""
    found = rendered("route", replace(SITE, gateways=frozenset({GKE})), picker=picker)
    [rule] = one(found, "HTTPRoute", "twig")["spec"]["rules"]
    health = one(found, "HealthCheckPolicy", "twig")["spec"]
    limits = one(found, "GCPBackendPolicy", "twig")["spec"]
    pod = one(found, "Deployment", "twig")["spec"]["template"]["spec"]
    probe = pod["containers"][0]["readinessProbe"]

    assert "timeouts" not in rule
    named = {key: rule["backendRefs"][0][key] for key in ("group", "kind", "name")}
    assert (named["group"], named["kind"]) == target
    assert health["targetRef"] == limits["targetRef"] == named
    assert health["default"]["config"]["httpHealthCheck"]["requestPath"] == probe["httpGet"]["path"]
    assert health["default"]["timeoutSec"] <= health["default"]["checkIntervalSec"] == probe["periodSeconds"]
    assert limits["default"]["timeoutSec"] >= 3600
    drain = limits["default"]["connectionDraining"]["drainingTimeoutSec"]
    assert drain == pod["terminationGracePeriodSeconds"]


def test_gke_keeps_connections_for_an_hour_at_most() -> None:
    """GKE takes no longer time than an hour for connections to pods that leave, whatever the pool's."""
    site = replace(SITE, gateways=frozenset({GKE}))
    found = rendered("route", site, rollout={"drainSeconds": 3600})
    limits = one(found, "GCPBackendPolicy", "twig")["spec"]["default"]
    pod = one(found, "Deployment", "twig")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 3600
    assert limits["connectionDraining"]["drainingTimeoutSec"] == 3600


def test_nginx_takes_large_prompts_and_waits_for_answers() -> None:
    """nginx refuses bodies over 1 MiB and ends answers that pause for a minute: the policies of its Gateway
    Fabric allow what the pool's own Envoy allows, for this route alone."""
    found = rendered("route", replace(SITE, gateways=frozenset({NGINX})))
    client = one(found, "ClientSettingsPolicy", "twig")["spec"]
    proxy = one(found, "ProxySettingsPolicy", "twig")["spec"]
    route = {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": "twig"}

    assert client["targetRef"] == route
    assert proxy["targetRefs"] == [route]
    assert client["body"]["maxSize"] == "32m"
    assert proxy["timeout"]["read"] == "24h"


def test_envoy_ai_gateway_sends_any_number_of_requests_at_once() -> None:
    """Envoy's default is 1,024 requests at once for each route. The flavor of Envoy Gateway keeps its own
    policy of that name."""
    site = replace(SITE, gateways=frozenset({ENVOY_GATEWAY}))
    spec = one(rendered("route", site), "BackendTrafficPolicy", "twig")["spec"]
    assert spec["targetRefs"] == [{"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": "twig"}]
    assert spec["circuitBreaker"]["maxParallelRequests"] >= 100_000
    own = rendered("envoy-gateway", site)
    assert one(own, "BackendTrafficPolicy", "twig")["spec"]["routingType"] == "Endpoint"
    assert own.objects == rendered("envoy-gateway").objects


@pytest.mark.parametrize(
    ("controller", "policies"),
    [(NGINX, set()), (ENVOY_GATEWAY, set()), (GKE, {"HealthCheckPolicy", "GCPBackendPolicy"})],
)
def test_pools_without_a_route_have_no_policies_for_one(controller: str, policies: set[str]) -> None:
    """Policies of the InferencePool itself stay; no API of routes is needed."""
    apis = SITE.apis - {Api.HTTP_ROUTE}
    found = rendered("named-by-routes", replace(SITE, gateways=frozenset({controller}), apis=apis))

    kinds = {made["kind"] for made in found.objects}
    assert {"InferencePool", "BackendTLSPolicy"} <= kinds
    assert {kind for kind in kinds if kind.endswith("Policy")} - policies == {
        "BackendTLSPolicy",
        "NetworkPolicy",
    }
    assert policies <= kinds
    assert "HTTPRoute" not in kinds
    assert not [note for note in found.notes if note.condition == "GatewayAttached"]


def test_other_gateways_get_timeouts_and_no_policies_of_their_own() -> None:
    """A cluster of GKE may have another gateway, whose route would end after its own default; policies of
    which a cluster has no API are left out."""
    policies = {
        "HealthCheckPolicy",
        "GCPBackendPolicy",
        "ClientSettingsPolicy",
        "ProxySettingsPolicy",
        "BackendTrafficPolicy",
    }
    for site in (SITE, replace(SITE, gateways=frozenset({ISTIO}))):
        found = rendered("route", site)
        assert one(found, "HTTPRoute", "twig")["spec"]["rules"][0]["timeouts"] == {"request": "0s"}
        assert not policies & {made["kind"] for made in found.objects}
    bare = replace(SITE, gateways=frozenset({GKE}), apis=SITE.apis - {Api.GCP_BACKEND_POLICY})
    kinds = {made["kind"] for made in rendered("route", bare).objects}
    assert "HealthCheckPolicy" in kinds
    assert "GCPBackendPolicy" not in kinds
