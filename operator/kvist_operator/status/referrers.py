"""Gateways with routes of the user's own to a pool, as the status of its InferencePool names them. Pure.

Gateways write ``status.parents`` (Gateway API Inference Extension v1). What they write differs: Envoy AI
Gateway and Istio name no controller, and Istio calls every parent of a route a Gateway, of its own API's
group and in no order. So the group is not read, and the Gateway's class tells more than the report.
"""

from collections.abc import Iterator, Mapping
from operator import itemgetter

from kvist_operator.manifests.object_names import Referrer

from .condition import FALSE, TRUE, UNKNOWN, Condition, Truth
from .views import Object, unmet


def referrers(extension: Object | None, namespace: str) -> tuple[Referrer, ...]:
    """Return what has a route to an InferencePool of this namespace, each once and in order, with the
    controllers that the reports name."""
    return tuple(sorted({found for found, _ in _reports(extension, namespace)}))


def attachment(extension: Object | None, namespace: str, kind: str) -> Condition | None:
    """Return a condition of this kind by the reports; None if there is none. One Gateway that accepts the
    pool is enough, since the others' routes are not the pool's."""
    accepted: dict[str, None] = {}
    refusals: list[Condition] = []
    for found, conditions in sorted(_reports(extension, namespace), key=itemgetter(0)):
        name = found.name if found.namespace == namespace else f"{found.namespace}/{found.name}"
        if refusal := unmet(conditions):
            status = UNKNOWN if refusal.get("status") == UNKNOWN else FALSE
            refusals.append(refused_by(name, refusal, kind, status))
        else:
            accepted[name] = None
    if accepted:
        message = "; ".join([", ".join(accepted), *(each.message for each in refusals)])
        return Condition(kind, TRUE, "RouteAccepted", message)
    return refusals[0] if refusals else None


def refused_by(name: str, refusal: Object, kind: str, status: Truth) -> Condition:
    """Return a condition of this kind with what the Gateway of this name has refused."""
    reason = str(refusal.get("reason") or "NotAttached")
    return Condition(kind, status, reason, f"{name}: {refusal.get('message') or refusal['type']}")


def _reports(extension: Object | None, namespace: str) -> Iterator[tuple[Referrer, Mapping[str, Object]]]:
    """Yield each report with its conditions by type; ``kind: Status`` is a placeholder of the API."""
    for each in ((extension or {}).get("status") or {}).get("parents") or ():
        ref = each.get("parentRef") or {}
        kind = ref.get("kind") or "Gateway"
        if not ref.get("name") or kind == "Status":
            continue
        found = Referrer(
            namespace=ref.get("namespace") or namespace,
            name=ref["name"],
            kind=kind,
            controller=each.get("controllerName") or "",
        )
        yield found, {c["type"]: c for c in each.get("conditions") or ()}
