"""Whether NetworkPolicies allow a connection, by the rules of ``networking.k8s.io/v1``.

A pod that no policy of its namespace selects accepts every connection; otherwise the rules of all policies
that select it are added up. A rule without ``from`` or ``ports`` is for all clients or ports.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvist_operator.manifests import Rendered

Json = Mapping[str, Any]
POOL_NAMESPACE: Final = "forest"


@dataclass(frozen=True)
class Client:
    """A pod that connects, or only an address."""

    namespace: str = ""
    """Empty for a client that is no pod."""
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "10.1.2.3"


def reaches(found: Rendered, client: Client, labels: Mapping[str, str], port: int) -> bool:
    """Return whether a client may connect to a port of a pod of the pool with these labels."""
    policies = [each["spec"] for each in found.objects if each["kind"] == "NetworkPolicy"]
    over_it = [
        spec
        for spec in policies
        if "Ingress" in spec["policyTypes"] and _selects(spec["podSelector"], labels)
    ]
    rules = [rule for spec in over_it for rule in spec.get("ingress", ())]
    return not over_it or any(_from(rule, client) and _at(rule, port) for rule in rules)


def _from(rule: Json, client: Client) -> bool:
    peers = rule.get("from")
    return not peers or any(_peer(peer, client) for peer in peers)


def _peer(peer: Json, client: Client) -> bool:
    if "ipBlock" in peer:
        address, block = ipaddress.ip_address(client.address), peer["ipBlock"]
        outside = any(address in ipaddress.ip_network(each) for each in block.get("except", ()))
        return address in ipaddress.ip_network(block["cidr"]) and not outside
    if not client.namespace:
        return False
    if "namespaceSelector" in peer:
        within = _selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": client.namespace})
    else:
        within = client.namespace == POOL_NAMESPACE
    return within and _selects(peer.get("podSelector", {}), client.labels)


def _at(rule: Json, port: int) -> bool:
    ports = rule.get("ports")
    return not ports or any(p["port"] <= port <= p.get("endPort", p["port"]) for p in ports)


def _selects(selector: Json, labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items()
    return wanted <= labels.items() and all(
        _holds(each, labels) for each in selector.get("matchExpressions", ())
    )


def _holds(rule: Json, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(rule["key"]), rule.get("values", ())
    return {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }[rule["operator"]]
