"""Policies of single gateways, by which they treat a pool's route as it has to be treated: answers that take
minutes, prompts of megabytes, thousands of requests at once. Pure.

A gateway is known by its controller (``Site.gateways``). A policy whose API is missing is left out, and one
for the pool's route if it has none: then the gateway's own limits hold. Fields that users add to a policy
stay, since server-side apply owns only ours.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from kvist_operator.plan import Plan
from kvist_operator.spec.pool import Pool

from .bootstrap import BODY_BYTES
from .engine_roles import roles
from .engine_workload import HEALTH_PATH, READINESS
from .object_names import ENGINE, ENVOY_GATEWAY, GKE, NGINX, Api, Json, ObjectNames, Site

GATEWAY_GROUP: Final = "gateway.networking.k8s.io"
ENVOY_GROUP: Final = "gateway.envoyproxy.io"
GKE_GROUP: Final = "networking.gke.io"
NGINX_GROUP: Final = "gateway.nginx.org"
UNBOUNDED: Final = dict.fromkeys(
    ("maxConnections", "maxPendingRequests", "maxParallelRequests", "maxParallelRetries"), 1_000_000
)
"""Circuit breaker without limits: engines and pickers have queues of their own."""
LONGEST_ANSWER_HOURS: Final = 24
"""Where a gateway has no word for an answer without a limit of time."""
_SERVING: Final = "USE_SERVING_PORT"
"""The port of each endpoint. It is GKE's default, but rules of its CRD of 2026 refuse a probe that does not
say so."""
_LONGEST_DRAIN: Final = 3600
"""Most seconds for which GKE keeps connections to a pod that leaves."""
_HEALTH: Final = "HealthCheckPolicy"
_BACKEND: Final = "GCPBackendPolicy"

_Policy = tuple[Api, str, str, Json]
"""API, version with its group, kind and ``spec``."""


def own_policies(names: ObjectNames, pool: Pool, plan: Plan, site: Site, backend: Json) -> list[Json]:
    """Return the policies of the pool's gateways. ``backend``: what the route leads to, a Service or an
    InferencePool."""
    return [
        names.child(version, kind, names.engine, ENGINE, spec=spec)
        for controller, policies in _POLICIES.items()
        if controller in site.gateways
        for api, version, kind, spec in policies(names, pool, plan, backend)
        if api in site.apis and (pool.gateway.has_route or not _of_route(names, spec))
    ]


def _of_route(names: ObjectNames, spec: Json) -> bool:
    """Return whether a policy targets the pool's route."""
    return route_target(names) in (spec.get("targetRef"), *spec.get("targetRefs", ()))


def _gke(_names: ObjectNames, pool: Pool, plan: Plan, backend: Json) -> Iterator[_Policy]:
    """GKE asks ``/`` for health by default, which vLLM answers with 404, ends answers after 30 s and cuts
    those of pods that leave."""
    target = {key: backend[key] for key in ("group", "kind", "name")}
    probe = {
        "checkIntervalSec": READINESS["periodSeconds"],
        "timeoutSec": READINESS["timeoutSeconds"],
        "unhealthyThreshold": READINESS["failureThreshold"],
        "healthyThreshold": 1,
        "config": {
            "type": "HTTP",
            "httpHealthCheck": {"requestPath": HEALTH_PATH, "portSpecification": _SERVING},
        },
    }
    leaving = max(each.pod.grace_seconds for _, each in roles(pool, plan))
    limits = {
        "timeoutSec": LONGEST_ANSWER_HOURS * 3600,
        "connectionDraining": {"drainingTimeoutSec": min(leaving, _LONGEST_DRAIN)},
    }
    version = f"{GKE_GROUP}/v1"
    yield Api.HEALTH_CHECK_POLICY, version, _HEALTH, {"targetRef": target, "default": probe}
    yield Api.GCP_BACKEND_POLICY, version, _BACKEND, {"targetRef": target, "default": limits}


def _nginx(names: ObjectNames, _pool: Pool, _plan: Plan, _backend: Json) -> Iterator[_Policy]:
    """nginx refuses bodies over 1 MiB by default and ends answers that pause for 60 s."""
    version, target = f"{NGINX_GROUP}/v1alpha1", route_target(names)
    body = {"maxSize": f"{BODY_BYTES >> 20}m"}
    timeout = {"read": f"{LONGEST_ANSWER_HOURS}h"}
    yield Api.CLIENT_SETTINGS, version, "ClientSettingsPolicy", {"targetRef": target, "body": body}
    yield Api.PROXY_SETTINGS, version, "ProxySettingsPolicy", {"targetRefs": [target], "timeout": timeout}


def _envoy(names: ObjectNames, _pool: Pool, _plan: Plan, _backend: Json) -> Iterator[_Policy]:
    """Envoy sends no more than 1,024 requests at once to the engines of a route by default. This is for pools
    of the Inference Extension (Envoy AI Gateway); the flavor EnvoyGateway has a policy that says more."""
    spec = {"targetRefs": [route_target(names)], "circuitBreaker": UNBOUNDED}
    yield Api.TRAFFIC_POLICY, f"{ENVOY_GROUP}/v1alpha1", "BackendTrafficPolicy", spec


def kept_controllers(children: Iterable[Json]) -> frozenset[str]:
    """Return the gateways whose policies for an InferencePool are among a pool's objects. They stay while no
    gateway reports a route to it, since users add settings to them."""
    kept = any(each["kind"] in (_HEALTH, _BACKEND) for each in children)
    return frozenset({GKE}) if kept else frozenset()


def route_target(names: ObjectNames) -> Json:
    """Return the reference to a pool's route by which policies target it."""
    return {"group": GATEWAY_GROUP, "kind": "HTTPRoute", "name": names.engine}


_POLICIES: Final[Mapping[str, Callable[[ObjectNames, Pool, Plan, Json], Iterator[_Policy]]]] = {
    GKE: _gke,
    NGINX: _nginx,
    ENVOY_GATEWAY: _envoy,
}
