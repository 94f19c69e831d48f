"""NetworkPolicies and PodMonitors of a pool. Pure.

Engines publish what they cache (prompts' tokens) to every subscriber, and pickers exchange the same among
themselves: only pickers may connect to those ports. The engines' HTTP port is for the picker, the gateway and
Prometheus, as far as their pods are known (``engine_clients``). The other ports that serve requests, answer
probes or expose metrics are open to the cluster. Egress is not restricted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvist_epp.names import KV_EVENTS_PORT, KV_REPLAY_PORT
from kvist_operator.plan import Plan
from kvist_operator.spec.offload import LMCACHE_PORT
from kvist_operator.spec.pool import Pool

from . import object_names as child
from .engine_clients import EngineClients
from .engine_roles import roles
from .object_names import ENGINE, ENVOY, LMCACHE, PICKER, Api, Json, Note, ObjectNames, Site

ROLE_OF_A_SERIES: Final[Json] = {
    "sourceLabels": ["__meta_kubernetes_pod_label_kvist_dev_role"],
    "targetLabel": "role",
    "action": "replace",
}
"""Relabelling by which autoscalers tell the engines of one role from those of the other."""


def monitoring(pool: Pool, site: Site) -> list[Json]:
    """Return the PodMonitors; none if they are disabled or their API is missing."""
    if pool.pod_monitor == "Disabled" or Api.POD_MONITOR not in site.apis:
        return []
    names = ObjectNames.of(pool)
    role = [ROLE_OF_A_SERIES] if pool.disaggregation else []
    found = [_monitor(names, names.engine, ENGINE, names.served, "http", "/metrics", *role)]
    if pool.picker.mode != "Off":
        found.append(_monitor(names, names.picker, PICKER, names.selector(PICKER), "metrics", "/metrics"))
    if pool.gateway.mode == "Envoy":
        selector = names.selector(ENVOY)
        found.append(_monitor(names, names.envoy, ENVOY, selector, "status", "/stats/prometheus"))
    return found


def unmonitored(pool: Pool, site: Site) -> list[Note]:
    """Return a note if PodMonitors were requested and their API is missing."""
    if pool.pod_monitor != "Enabled" or Api.POD_MONITOR in site.apis:
        return []
    return [
        Note(
            "Monitored",
            "ApiMissing",
            f"{Api.POD_MONITOR} is not installed: install it, or set spec.monitoring.podMonitor: Auto",
        )
    ]


def _monitor(
    names: ObjectNames, name: str, component: str, selector: dict[str, str], port: str, path: str, *more: Json
) -> Json:
    """Return a PodMonitor that gives every series the label ``pool``, for queries and autoscalers.

    Prometheus' operator adds a label ``endpoint`` with the name of the port, which would rename the picker's
    own to ``exported_endpoint``; it is dropped.
    """
    label = {"targetLabel": "pool", "replacement": names.pool, "action": "replace"}
    relabelings = [label, {"action": "labeldrop", "regex": "endpoint"}, *more]
    endpoint = {"port": port, "path": path, "interval": "15s", "relabelings": relabelings}
    spec = {"selector": {"matchLabels": selector}, "podMetricsEndpoints": [endpoint]}
    return names.child("monitoring.coreos.com/v1", "PodMonitor", name, component, spec=spec)


ANYWHERE: Final = "anywhere"
OUTSIDE: Final = "outside"
"""Clients of the engines that are not of the pool: the peers of ``engine_clients``."""


@dataclass(frozen=True, slots=True)
class AllowedTraffic:
    """Connections from one component to another."""

    client: str
    """A component, ``outside`` or ``anywhere``."""
    server: str
    port: int
    last: int = 0
    """End of a range of ports; 0 = one port."""


def flows(pool: Pool, plan: Plan, clients: EngineClients) -> list[AllowedTraffic]:
    """Return all connections except those between engines, which may use any port."""
    found = [AllowedTraffic(each, ENGINE, child.ENGINE_PORT) for each in _http_clients(pool, clients)]
    if plan.kv_events:
        ranks = max(each.layout.data for _, each in roles(pool, plan)) - 1
        ports = (KV_EVENTS_PORT, KV_REPLAY_PORT)
        found += [AllowedTraffic(PICKER, ENGINE, port, port + ranks if ranks else 0) for port in ports]
    if pool.picker.mode != "Off":
        open_ports = (child.GRPC_PORT, child.HEALTH_PORT, child.METRICS_PORT)
        found += [AllowedTraffic(ANYWHERE, PICKER, port) for port in open_ports]
        found.append(AllowedTraffic(PICKER, PICKER, child.PEER_PORT))
    if pool.gateway.mode == "Envoy":
        found += [AllowedTraffic(ANYWHERE, ENVOY, port) for port in (child.HTTP_PORT, child.STATUS_PORT)]
    if pool.offload.lmcache and pool.offload.lmcache.memory_bytes:
        found.append(AllowedTraffic(ENGINE, LMCACHE, LMCACHE_PORT))
    return found


def _http_clients(pool: Pool, clients: EngineClients) -> list[str]:
    if clients.everybody:
        return [ANYWHERE]
    found = {PICKER: pool.picker.mode != "Off", ENVOY: pool.gateway.mode == "Envoy", OUTSIDE: clients.peers}
    return [client for client, there in found.items() if there]


def policies(pool: Pool, plan: Plan, clients: EngineClients) -> list[Json]:
    """Return one NetworkPolicy for each component of the pool; none with ``networkPolicy.mode: Off``."""
    if pool.network.mode == "Off":
        return []
    names, all_flows = ObjectNames.of(pool), flows(pool, plan, clients)
    called: Mapping[str, str] = {
        ENGINE: names.engine,
        PICKER: names.picker,
        ENVOY: names.envoy,
        LMCACHE: names.lmcache,
    }
    # blocks go from engine to engine on ports that UCX chooses, as do those of NCCL inside a group
    inside = bool(plan.role) or plan.nodes > 1
    return [
        _policy(names, called[server], server, all_flows, clients.peers, inside=inside and server == ENGINE)
        for server in dict.fromkeys(flow.server for flow in all_flows)
    ]


def _policy(
    names: ObjectNames,
    name: str,
    server: str,
    all_flows: list[AllowedTraffic],
    outside: Sequence[Json],
    *,
    inside: bool,
) -> Json:
    rules: list[Json] = []
    for client in dict.fromkeys(flow.client for flow in all_flows if flow.server == server):
        ports = [
            {"port": flow.port, "protocol": "TCP", **({"endPort": flow.last} if flow.last else {})}
            for flow in all_flows
            if (flow.client, flow.server) == (client, server)
        ]
        own = {"podSelector": {"matchLabels": names.selector(client)}}
        peers = list(outside) if client == OUTSIDE else [own]
        rules.append({"ports": ports} if client == ANYWHERE else {"ports": ports, "from": peers})
    if inside:
        rules.append({"from": [{"podSelector": {"matchLabels": names.selector(ENGINE)}}]})
    pods = {"matchLabels": names.selector(server)}
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": rules}
    return names.child("networking.k8s.io/v1", "NetworkPolicy", name, server, spec=spec)
