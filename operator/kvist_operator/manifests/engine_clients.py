"""Pods that may connect to the engines' HTTP port, as peers of a NetworkPolicy. Pure.

The pool's own picker and Envoy are known. The pods of a gateway that others run are known by their labels if
the gateway's controller is one of ``CONTROLLERS``, which it writes into the status of the pool's HTTPRoute.
Of a pool without a route they are those that the status of its InferencePool names (``Site.referring``).
Where the clients cannot be known the port stays open, and a note says so: a wrong guess would cut off all
requests.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvist_operator.spec.pool import Pool

from .object_names import ENVOY_GATEWAY, ISTIO, NGINX, Api, Json, Note, Referrer, Site

UNKNOWN: Final = "ClientsUnknown"
UNSCRAPED: Final = "MetricsClosed"
REMEDY: Final = "name all that may in spec.networkPolicy.from, or set spec.networkPolicy.mode: Open"
LABEL_LENGTH: Final = 63
PROMETHEUS: Final[Json] = {
    "namespaceSelector": {},
    "podSelector": {
        "matchLabels": {"app.kubernetes.io/managed-by": "prometheus-operator"},
        "matchExpressions": [
            {"key": "app.kubernetes.io/name", "operator": "In", "values": ["prometheus", "prometheus-agent"]}
        ],
    },
}
"""Servers and agents that the Prometheus operator runs, which is what PodMonitors are for."""


@dataclass(frozen=True, slots=True)
class EngineClients:
    """Clients of the engines' HTTP port besides the pool's own picker and Envoy."""

    everybody: bool = False
    """The port is open to the cluster."""
    peers: tuple[Json, ...] = ()
    notes: tuple[Note, ...] = ()


def engine_clients(pool: Pool, site: Site) -> EngineClients:
    """Return the clients of a pool's engines: those of ``spec.networkPolicy.from``, else those that are
    known."""
    if pool.network.mode != "Auto":
        return EngineClients(everybody=True)
    if pool.network.clients:
        return EngineClients(peers=tuple(dict(each) for each in pool.network.clients))
    why = _unknown(pool, site)
    if why:
        message = f"every pod of the cluster may connect to the engines, because {why}: {REMEDY}"
        return EngineClients(everybody=True, notes=(Note("", UNKNOWN, message),))
    peers = tuple(_gateway_peers(pool, site))
    if pool.pod_monitor != "Disabled" and Api.POD_MONITOR in site.apis:
        return EngineClients(peers=(*peers, PROMETHEUS))
    message = (
        "only the picker and the gateway may connect to the engines, so no others read metrics: name the "
        "collectors and the gateway in spec.networkPolicy.from, which replaces those that are known, or set "
        "spec.networkPolicy.mode: Open"
    )
    return EngineClients(peers=peers, notes=(Note("", UNSCRAPED, message),))


def _unknown(pool: Pool, site: Site) -> str:
    """Return why the gateway's pods are not known; empty if they are."""
    if pool.gateway.mode == "None":
        return "spec.gateway.mode is None, which does not say who their clients are"
    if pool.gateway.mode == "Envoy":
        return ""
    if not pool.gateway.has_route:
        found = (why for each in site.referring if (why := _unknown_referrer(each)))
        return next(found, "" if site.referring else "no gateway reports a route to the pool")
    other = next(
        (each.get("kind") for each in pool.gateway.parents if each.get("kind", "Gateway") != "Gateway"), ""
    )
    if other:
        return f"the pods of a parent of kind {other} are not known"
    if any(len(each["name"]) > LABEL_LENGTH for each in pool.gateway.parents):
        return "the Gateway's name is longer than a label, so its pods are not known"
    strange = sorted(_controllers(pool, site) - CONTROLLERS.keys())
    if strange:
        return f"the pods of gateways by {', '.join(strange)} are not known"
    return "" if _controllers(pool, site) else "no gateway has answered the route, so its pods are not known"


def _unknown_referrer(found: Referrer) -> str:
    """Return why the pods of a Gateway with a route of the user's are not known; empty if they are."""
    if not found.is_gateway:
        return f"the pods of a parent of kind {found.kind} are not known"
    if len(found.name) > LABEL_LENGTH:
        return "the Gateway's name is longer than a label, so its pods are not known"
    if found.controller not in CONTROLLERS:
        return f"the pods of gateways by {found.controller or 'an unknown controller'} are not known"
    return ""


def _controllers(pool: Pool, site: Site) -> frozenset[str]:
    """Return the controllers of the pool's gateways. The flavor EnvoyGateway names its own."""
    if pool.gateway.flavor == "EnvoyGateway":
        return site.gateways | {ENVOY_GATEWAY}
    return site.gateways


def _gateway_peers(pool: Pool, site: Site) -> Iterator[Json]:
    if pool.gateway.mode != "Route":
        return
    found: list[Json] = []
    for controller in sorted(_controllers(pool, site)):
        for parent in pool.gateway.parents:
            found += CONTROLLERS[controller](parent["name"], parent.get("namespace", pool.namespace))
    for each in site.referring:
        found += CONTROLLERS[each.controller](each.name, each.namespace)
    yield from (peer for i, peer in enumerate(found) if peer not in found[:i])


def _named_pods(name: str, namespace: str) -> list[Json]:
    """Return the pods of a Gateway by the label of GEP-1762, which are in the Gateway's namespace."""
    return [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "podSelector": {"matchLabels": {"gateway.networking.k8s.io/gateway-name": name}},
        }
    ]


def _owned_pods(name: str, namespace: str) -> list[Json]:
    """Return the proxies of Envoy Gateway, which may run in any namespace: those of one Gateway, and those
    that several Gateways of a class share (``mergeGateways``)."""
    owner = "gateway.envoyproxy.io/owning-gateway"
    own = {f"{owner}-name": name, f"{owner}-namespace": namespace}
    shared = [{"key": f"{owner}class", "operator": "Exists"}]
    return [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": own}},
        {"namespaceSelector": {}, "podSelector": {"matchExpressions": shared}},
    ]


CONTROLLERS: Final[Mapping[str, Callable[[str, str], list[Json]]]] = {
    ENVOY_GATEWAY: _owned_pods,
    ISTIO: _named_pods,
    "kgateway.dev/kgateway": _named_pods,
    "agentgateway.dev/agentgateway": _named_pods,
    NGINX: _named_pods,
}
"""``controllerName`` of gateways that run as pods → their peers, by a Gateway's name and namespace."""
