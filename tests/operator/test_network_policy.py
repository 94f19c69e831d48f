"""Which connections the NetworkPolicies of a pool allow."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.crd.cases import planned
from tests.operator.connections import Client, reaches
from tests.operator.manifested import CASES, SITE, rendered, resource

from kvist_operator.errors import SpecError
from kvist_operator.manifests import Api, Rendered, Site
from kvist_operator.manifests.object_names import Referrer
from kvist_operator.spec import read_pool
from kvist_operator.status.views import controllers

HTTP, EVENTS, REPLAY, GOSSIP, NCCL = 8000, 5557, 5657, 9004, 29500
APP = "app.kubernetes.io"
Json = dict[str, Any]


def own(component: str) -> dict[str, str]:
    """Return the labels of the pool's own pods."""
    return {f"{APP}/instance": "twig", f"{APP}/component": component}


STRANGER = Client("forest", {"app": "shell"})
PICKER = Client("forest", own("picker"))
ENVOY = Client("forest", own("envoy"))
PEER = Client("forest", own("engine"))
OTHER_PICKER = Client("forest", own("picker") | {f"{APP}/instance": "branch"})
FOREIGN_PICKER = Client("elsewhere", own("picker"))
PROMETHEUS = Client("monitoring", {f"{APP}/managed-by": "prometheus-operator", f"{APP}/name": "prometheus"})
ALERTS = Client("monitoring", {f"{APP}/managed-by": "prometheus-operator", f"{APP}/name": "alertmanager"})
OWNER = "gateway.envoyproxy.io/owning-gateway"
PROXY = Client("envoy-gateway-system", {f"{OWNER}-name": "edge", f"{OWNER}-namespace": "infra"})
PROXY_OF_ANOTHER = Client("envoy-gateway-system", {f"{OWNER}-name": "edge", f"{OWNER}-namespace": "else"})
MERGED = Client("envoy-gateway-system", {f"{OWNER}class": "eg"})
ISTIO = Client("infra", {"gateway.networking.k8s.io/gateway-name": "edge"})
COUNTERFEIT = Client("forest", {"gateway.networking.k8s.io/gateway-name": "edge"})
BALANCER = Client(address="130.211.1.2")
EVERYBODY = {
    "stranger": STRANGER,
    "picker": PICKER,
    "envoy": ENVOY,
    "other picker": OTHER_PICKER,
    "foreign picker": FOREIGN_PICKER,
    "prometheus": PROMETHEUS,
    "alertmanager": ALERTS,
    "proxy": PROXY,
    "proxy of another": PROXY_OF_ANOTHER,
    "merged": MERGED,
    "istio": ISTIO,
    "counterfeit": COUNTERFEIT,
    "balancer": BALANCER,
}
ROUTE = {"mode": "Route", "parentRefs": [{"name": "edge", "namespace": "infra"}]}
EG_ROUTE = ROUTE | {"flavor": "EnvoyGateway"}
EG = "gateway.envoyproxy.io/gatewayclass-controller"
SCRAPERS = {"picker", "prometheus"}
NOTED = ("ClientsUnknown", "MetricsClosed")


def admitted(found: Rendered, port: int = HTTP, labels: Mapping[str, str] | None = None) -> set[str]:
    """Return the clients that may connect to a port of an engine."""
    return {name for name, each in EVERYBODY.items() if reaches(found, each, labels or own("engine"), port)}


def reasons(found: Rendered) -> list[str]:
    """Return the reasons of the notes on clients."""
    return [note.reason for note in found.notes if note.reason in NOTED]


@pytest.mark.parametrize(
    ("gateway", "answered", "expected"),
    [
        ({"mode": "Envoy"}, set(), SCRAPERS | {"envoy"}),
        (EG_ROUTE, set(), SCRAPERS | {"proxy", "merged"}),
        (ROUTE, {EG}, SCRAPERS | {"proxy", "merged"}),
        (ROUTE, {"istio.io/gateway-controller"}, SCRAPERS | {"istio"}),
        (ROUTE, {"kgateway.dev/kgateway", EG}, SCRAPERS | {"istio", "proxy", "merged"}),
    ],
)
def test_clients_do_not_reach_engines_and_the_gateway_does(
    gateway: Json, answered: set[str], expected: set[str]
) -> None:
    """The pods of a known gateway, the pool's picker and Prometheus connect to the engines' HTTP port, and no
    other pod does, not even one with the right labels in another namespace."""
    found = rendered("minimal", replace(SITE, gateways=frozenset(answered)), gateway=gateway)

    assert admitted(found) == expected
    assert reasons(found) == []


def named(*referring: Referrer) -> Rendered:
    """Return a pool without a route, to which these have one."""
    return rendered("minimal", replace(SITE, referring=referring), gateway={"mode": "Route"})


def test_gateways_with_a_route_of_the_user_s_reach_the_engines() -> None:
    """The Gateways that the status of the pool's InferencePool names connect to the engines, each by the
    labels of its controller."""
    istio = Referrer("infra", "edge", controller="istio.io/gateway-controller")
    envoy = Referrer("else", "edge", controller=EG)

    assert admitted(named(istio)) == SCRAPERS | {"istio"}
    assert admitted(named(envoy)) == SCRAPERS | {"merged", "proxy of another"}
    both = named(envoy, istio)
    assert admitted(both) == SCRAPERS | {"merged", "proxy of another", "istio"}
    assert reasons(both) == []


@pytest.mark.parametrize(
    ("strange", "why"),
    [
        (None, "no gateway reports a route to the pool"),
        (Referrer("infra", "b"), "gateways by an unknown controller"),
        (Referrer("infra", "b", controller="acme.io/gw"), "gateways by acme.io/gw"),
        (Referrer("infra", "b", "ListenerSet", EG), "a parent of kind ListenerSet"),
        (Referrer("infra", "../b", controller=EG), "a parent of kind Gateway"),
        (Referrer("infra", "b" * 64, controller=EG), "longer than a label"),
    ],
)
def test_one_gateway_that_is_not_known_opens_the_port(strange: Referrer | None, why: str) -> None:
    """Known Gateways beside it change nothing: it would be cut off."""
    known = Referrer("else", "edge", controller=EG)
    found = named(known, strange) if strange else named()

    assert admitted(found) == set(EVERYBODY)
    [note] = [note for note in found.notes if note.reason in NOTED]
    assert why in note.message


@pytest.mark.parametrize(
    ("gateway", "answered", "why"),
    [
        ({"mode": "None"}, set(), "spec.gateway.mode is None"),
        (ROUTE, set(), "no gateway has answered the route"),
        (ROUTE, {"networking.gke.io/gateway"}, "gateways by networking.gke.io/gateway are not known"),
        (ROUTE, {EG, "acme.example/edge"}, "gateways by acme.example/edge are not known"),
        (
            ROUTE | {"parentRefs": [{"name": "mesh", "kind": "Service", "group": ""}]},
            {EG},
            "a parent of kind Service",
        ),
        (ROUTE | {"parentRefs": [{"name": "e" * 64}]}, {EG}, "longer than a label"),
    ],
)
def test_where_the_gateway_is_not_known_the_port_is_open_and_a_note_says_so(
    gateway: Json, answered: set[str], why: str
) -> None:
    """A gateway whose pods cannot be known is not cut off: the port stays open, and a note names the field
    that closes it. Ports with KV events are closed all the same."""
    found = rendered("minimal", replace(SITE, gateways=frozenset(answered)), gateway=gateway)

    assert admitted(found) == set(EVERYBODY)
    assert admitted(found, EVENTS) == admitted(found, REPLAY) == {"picker"}
    [note] = [note for note in found.notes if note.reason in NOTED]
    assert why in note.message
    assert "spec.networkPolicy.from" in note.message


def test_clients_that_the_pool_names_replace_those_that_are_known() -> None:
    """``from`` closes the port of a pool without a gateway, and narrows that of a pool with one."""
    space = {"matchLabels": {"kubernetes.io/metadata.name": "envoy-gateway-system"}}
    whole = {"namespaceSelector": space}
    narrow = whole | {
        "podSelector": {"matchExpressions": [{"key": f"{OWNER}class", "operator": "DoesNotExist"}]}
    }
    block = {"ipBlock": {"cidr": "130.211.0.0/22", "except": ["130.211.3.0/24"]}}
    here = {"podSelector": {"matchLabels": {"app": "shell"}}}

    def of(*peers: Json, **gateway: Any) -> set[str]:
        found = rendered("minimal", networkPolicy={"from": list(peers)}, gateway=gateway)
        assert reasons(found) == []
        return admitted(found)

    assert of(whole) == {"picker", "proxy", "proxy of another", "merged"}
    assert of(narrow) == {"picker", "proxy", "proxy of another"}
    assert of(block) == {"picker", "balancer"}
    assert of(here, whole, **EG_ROUTE) == {"picker", "stranger", "proxy", "proxy of another", "merged"}
    assert of(here, mode="Envoy") == {"picker", "envoy", "stranger"}
    excepted = rendered("minimal", networkPolicy={"from": [block]})
    assert not reaches(excepted, Client(address="130.211.3.9"), own("engine"), HTTP)


def test_an_open_policy_and_no_policy() -> None:
    """Open lets every pod reach the HTTP port and keeps KV events private; Off renders no policy."""
    opened = rendered("minimal", networkPolicy={"mode": "Open"}, gateway={"mode": "Envoy"})
    none = rendered("minimal", networkPolicy={"mode": "Off"}, gateway={"mode": "Envoy"})

    assert admitted(opened) == set(EVERYBODY)
    assert admitted(opened, EVENTS) == {"picker"}
    assert reasons(opened) == reasons(none) == []
    assert "NetworkPolicy" not in {each["kind"] for each in none.objects}
    assert admitted(none, EVENTS) == set(EVERYBODY)


def test_metrics_without_podmonitors_are_closed_and_a_note_says_so() -> None:
    """Without PodMonitors it is not known what collects metrics, so a note names the field to write it."""
    envoy = {"mode": "Envoy"}
    without = replace(SITE, apis=SITE.apis - {Api.POD_MONITOR})
    for found in (
        rendered("minimal", without, gateway=envoy),
        rendered("minimal", gateway=envoy, monitoring={"podMonitor": "Disabled"}),
    ):
        assert admitted(found) == {"picker", "envoy"}
        assert reasons(found) == ["MetricsClosed"]


@pytest.mark.parametrize("case", CASES)
def test_every_connection_that_the_product_makes_is_allowed(case: str) -> None:
    """Pickers read metrics and KV events of engines, and exchange what they know; gateways ask pickers;
    clients reach the pool's Envoy; pods of one replica reach each other on every port. No other pod reads KV
    events, gossip, or the traffic of a replica."""
    found, plan = rendered(case), planned(resource(case))
    pool = read_pool(resource(case))
    if pool.picker.mode != "Off":
        assert admitted(found, GOSSIP, own("picker")) == {"picker"}
        for port in (9002, 9003, 9090):
            assert reaches(found, PROXY, own("picker"), port)
        wanted = (HTTP, EVENTS, REPLAY) if plan.kv_events else (HTTP,)
        assert all(reaches(found, PICKER, own("engine"), port) for port in wanted)
    if plan.kv_events:
        assert admitted(found, EVENTS) == admitted(found, REPLAY) == {"picker"}
    if pool.gateway.mode == "Envoy":
        assert all(reaches(found, STRANGER, own("envoy"), port) for port in (8080, 8081))
        assert not reaches(found, STRANGER, own("envoy"), 9901)
    assert reaches(found, PEER, own("engine"), NCCL) is (plan.nodes > 1 or bool(plan.role))
    assert admitted(found, NCCL) == set()


@pytest.mark.parametrize(
    ("policy", "field", "remedy"),
    [
        ({"mode": "Open", "from": [{"podSelector": {}}]}, "from", "leave one out"),
        ({"from": [{}]}, "from[0]", "write podSelector, namespaceSelector or both"),
        ({"from": [{"podSelector": {}, "ipBlock": {"cidr": "10.0.0.0/8"}}]}, "from[0]", "or ipBlock"),
        ({"from": [{"ipBlock": {"cidr": "10.0.0.1/8"}}]}, "from[0].ipBlock.cidr", "like 10.0.0.0/8"),
        (
            {"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}}]},
            "from[0].ipBlock.except[0]",
            "a smaller range within it",
        ),
        (
            {"from": [{"podSelector": {"app": "x"}}]},
            "from[0].podSelector.app",
            "use matchExpressions or matchLabels",
        ),
        (
            {"from": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}]},
            "from[0].podSelector.matchExpressions[0].values",
            "give the label's values",
        ),
        (
            {"from": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "in"}]}}]},
            "from[0].podSelector.matchExpressions[0].operator",
            "did you mean In?",
        ),
        (
            {"from": [{"podSelector": {"matchLabels": {"a": True}}}]},
            "from[0].podSelector.matchLabels.a",
            "put it in quotes",
        ),
    ],
)
def test_wrong_clients_are_refused_with_their_field_and_the_remedy(
    policy: Json, field: str, remedy: str
) -> None:
    """A peer that the API server would refuse, or that means something else, is refused by its path."""
    with pytest.raises(SpecError) as refused:
        rendered("minimal", networkPolicy=policy)

    assert refused.value.field == f"spec.networkPolicy.{field}"
    assert remedy in str(refused.value)


def test_controllers_are_those_of_the_route_s_status() -> None:
    """The controllers of gateways are read from the status of the HTTPRoute; there may be none yet."""
    parents = [{"controllerName": EG, "parentRef": {"name": "edge"}}, {"parentRef": {"name": "b"}}]

    assert controllers({"status": {"parents": parents}}) == {EG}
    assert controllers({"spec": {}}) == controllers(None) == frozenset()
    assert Site().gateways == frozenset()
