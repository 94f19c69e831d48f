"""NetworkPolicies and PodMonitors of a pool. Pure.

Engines publish what they cache (prompts' tokens) to every subscriber, and pickers exchange the same among
themselves: only pickers may connect to those ports. The ports that serve requests, answer probes or expose
metrics are open to the cluster, since gateways and Prometheus may run anywhere. Egress is not restricted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvist_epp.names import KV_EVENTS_PORT, KV_REPLAY_PORT
from kvist_operator.plan import Plan
from kvist_operator.spec.pool import Pool

from . import object_names as child
from .object_names import ENGINE, ENVOY, PICKER, Api, Json, Note, ObjectNames, Site


def monitoring(pool: Pool, site: Site) -> list[Json]:
    """Return the PodMonitors; none if they are disabled or their API is missing."""
    if pool.pod_monitor == "Disabled" or Api.POD_MONITOR not in site.apis:
        return []
    names = ObjectNames.of(pool)
    found = [_monitor(names, names.engine, ENGINE, names.served, "http", "/metrics")]
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
    names: ObjectNames, name: str, component: str, selector: dict[str, str], port: str, path: str
) -> Json:
    """Return a PodMonitor that gives every series the label ``pool``, for queries and autoscalers."""
    label = {"targetLabel": "pool", "replacement": names.pool, "action": "replace"}
    endpoint = {"port": port, "path": path, "interval": "15s", "relabelings": [label]}
    spec = {"selector": {"matchLabels": selector}, "podMetricsEndpoints": [endpoint]}
    return names.child("monitoring.coreos.com/v1", "PodMonitor", name, component, spec=spec)


ANYWHERE: Final = "anywhere"


@dataclass(frozen=True, slots=True)
class AllowedTraffic:
    """Connections from one component to another."""

    client: str
    """A component, or ``anywhere``."""
    server: str
    port: int
    last: int = 0
    """End of a range of ports; 0 = one port."""


def flows(pool: Pool, plan: Plan) -> list[AllowedTraffic]:
    """Return all connections except those inside a group of engine pods, which may use any port."""
    found = [AllowedTraffic(ANYWHERE, ENGINE, child.ENGINE_PORT)]
    if pool.kv_events:
        ranks = plan.layout.data - 1
        ports = (KV_EVENTS_PORT, KV_REPLAY_PORT)
        found += [AllowedTraffic(PICKER, ENGINE, port, port + ranks if ranks else 0) for port in ports]
    if pool.picker.mode != "Off":
        open_ports = (child.GRPC_PORT, child.HEALTH_PORT, child.METRICS_PORT)
        found += [AllowedTraffic(ANYWHERE, PICKER, port) for port in open_ports]
        found.append(AllowedTraffic(PICKER, PICKER, child.PEER_PORT))
    if pool.gateway.mode == "Envoy":
        found += [AllowedTraffic(ANYWHERE, ENVOY, port) for port in (child.HTTP_PORT, child.STATUS_PORT)]
    return found


def policies(pool: Pool, plan: Plan) -> list[Json]:
    """Return one NetworkPolicy for each component of the pool."""
    names, all_flows = ObjectNames.of(pool), flows(pool, plan)
    called: Mapping[str, str] = {ENGINE: names.engine, PICKER: names.picker, ENVOY: names.envoy}
    inside = plan.nodes > 1
    return [
        _policy(names, called[server], server, all_flows, inside=inside and server == ENGINE)
        for server in dict.fromkeys(flow.server for flow in all_flows)
    ]


def _policy(
    names: ObjectNames, name: str, server: str, all_flows: list[AllowedTraffic], *, inside: bool
) -> Json:
    rules: list[Json] = []
    for client in dict.fromkeys(flow.client for flow in all_flows if flow.server == server):
        ports = [
            {"port": flow.port, "protocol": "TCP", **({"endPort": flow.last} if flow.last else {})}
            for flow in all_flows
            if (flow.client, flow.server) == (client, server)
        ]
        source = {"podSelector": {"matchLabels": names.selector(client)}}
        rules.append({"ports": ports} if client == ANYWHERE else {"ports": ports, "from": [source]})
    if inside:
        rules.append({"from": [{"podSelector": {"matchLabels": names.selector(ENGINE)}}]})
    pods = {"matchLabels": names.selector(server)}
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": rules}
    return names.child("networking.k8s.io/v1", "NetworkPolicy", name, server, spec=spec)
