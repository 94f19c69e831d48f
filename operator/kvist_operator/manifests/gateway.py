"""``gateway.mode: Route``: objects that attach a pool to an existing Gateway, in one of two flavors. Pure.

InferencePool: the Inference Extension's pool (its ``status`` belongs to gateways) and an HTTPRoute to it,
unless only routes of the user's own name the pool (no ``parentRefs``); where the API is installed, also a
BackendTLSPolicy for the picker, since Istio asks it in plaintext without; and what the gateway's own policies
have to say of such routes (``gateway_policies``).
EnvoyGateway: an HTTPRoute to the engines' Service, the picker as an EnvoyExtensionPolicy, its answer as an
endpoint override (fields: gateway.envoyproxy.io/v1alpha1 of Envoy Gateway 1.9).
"""

from collections.abc import Mapping
from typing import Final

from kvist_epp.names import DESTINATION_HEADER, DESTINATION_NAMESPACE, POOL_GROUP
from kvist_operator.plan import Plan
from kvist_operator.spec.pool import Pool

from .bootstrap import BODY_BYTES, IDLE_SECONDS, MESSAGE_SECONDS
from .gateway_policies import ENVOY_GROUP, GATEWAY_GROUP, UNBOUNDED, own_policies, route_target
from .object_names import (
    ENGINE,
    ENGINE_PORT,
    GKE,
    GRPC_PORT,
    HIGRESS,
    ISTIO,
    PICKER,
    Api,
    Json,
    Note,
    ObjectNames,
    Site,
)
from .pods import quantity

_PLAINTEXT: Final = {ISTIO: "Istio", HIGRESS: "Higress"}
"""Gateways that ask pickers in plaintext unless a policy says otherwise, by their controllers."""
_RETRIED: Final = ("connect-failure", "refused-stream", "reset")
_NEEDS: Final[Mapping[str, tuple[Api, ...]]] = {
    "InferencePool": (Api.INFERENCE_POOL,),
    "EnvoyGateway": (Api.BACKEND_TLS_POLICY, Api.EXTENSION_POLICY, Api.TRAFFIC_POLICY),
}
"""APIs of a flavor besides that of the route."""


def gateway(pool: Pool, plan: Plan, site: Site) -> list[Json]:
    """Return the objects that attach the pool; none if an API is missing, since a route without the other
    objects would bypass the picker."""
    if pool.gateway.mode != "Route" or missing(pool, site):
        return []
    names = ObjectNames.of(pool)
    engines = {"group": "", "kind": "Service", "name": names.engine, "port": ENGINE_PORT, "weight": 1}
    if pool.picker.mode == "Off":
        return [*own_policies(names, pool, plan, site, engines), _route(names, pool, site, engines)]
    if pool.gateway.flavor == "InferencePool":
        backend = {"group": POOL_GROUP, "kind": "InferencePool", "name": names.pool, "weight": 1}
        verified = [_verified(names)] if Api.BACKEND_TLS_POLICY in site.apis else []
        policies = own_policies(names, pool, plan, site, backend)
        route = [_route(names, pool, site, backend)] if pool.gateway.has_route else []
        return [*verified, _inference_pool(names, pool), *policies, *route]
    target = [route_target(names)]
    return [
        _verified(names),
        _traffic(names, target),
        _extension(names, pool, target),
        _route(names, pool, site, engines),
    ]


def missing(pool: Pool, site: Site) -> list[Note]:
    """Return a note for each API that the flavor needs and the cluster lacks."""
    if pool.gateway.mode != "Route":
        return []
    needed: tuple[Api, ...] = (Api.HTTP_ROUTE,) if pool.gateway.has_route else ()
    if pool.picker.mode != "Off":
        needed += _NEEDS[pool.gateway.flavor]
    return [
        Note(
            "GatewayAttached",
            "ApiMissing",
            f"{api} is not installed: install it, or choose another spec.gateway.mode or flavor",
        )
        for api in needed
        if api not in site.apis
    ]


def plaintext(pool: Pool, site: Site) -> list[Note]:
    """Return advice for pools whose pickers a gateway asks in plaintext, since it lacks the policy for
    TLS."""
    asking = [name for controller, name in _PLAINTEXT.items() if controller in site.gateways]
    asked = pool.gateway.of_extension and pool.picker.mode != "Off" and asking
    if not asked or Api.BACKEND_TLS_POLICY in site.apis:
        return []
    service = ObjectNames.of(pool).picker
    text = (
        f"{asking[0]} asks the pickers in plaintext, and each request fails: install "
        f"{Api.BACKEND_TLS_POLICY} v1 (Gateway API 1.4, Istio 1.28), or create a DestinationRule for the "
        f"Service {service} with TLS mode SIMPLE and insecureSkipVerify, and ignore this"
    )
    return [Note("", "TlsPolicyMissing", text)]


def _inference_pool(names: ObjectNames, pool: Pool) -> Json:
    picker = {
        "group": "",
        "kind": "Service",
        "name": names.picker,
        "port": {"number": GRPC_PORT},
        "failureMode": pool.gateway.failure_mode,
    }
    spec = {
        "selector": {"matchLabels": names.served},
        "targetPorts": [{"number": ENGINE_PORT}],
        "endpointPickerRef": picker,
    }
    return names.child(f"{POOL_GROUP}/v1", "InferencePool", names.pool, PICKER, spec=spec)


def _route(names: ObjectNames, pool: Pool, site: Site, backend: Json) -> Json:
    """Return the route. It has no limit of time, since answers take minutes and some gateways' default is
    15 s; but GKE refuses a route with timeouts, and then the whole Gateway stays as it was."""
    rule: Json = {"matches": [{"path": {"type": "PathPrefix", "value": "/"}}], "backendRefs": [backend]}
    if GKE not in site.gateways:
        rule["timeouts"] = {"request": "0s"}
    # with the API's defaults, so that the object that is read equals the applied one
    parents = [{"group": GATEWAY_GROUP, "kind": "Gateway", **parent} for parent in pool.gateway.parents]
    spec: Json = {"parentRefs": parents, "rules": [rule]}
    if pool.gateway.hostnames:
        spec["hostnames"] = list(pool.gateway.hostnames)
    return names.child(f"{GATEWAY_GROUP}/v1", "HTTPRoute", names.engine, ENGINE, spec=spec)


def _verified(names: ObjectNames) -> Json:
    """Return the policy by which the gateway trusts the authority of the pickers' certificates."""
    spec = {
        "targetRefs": [{"group": "", "kind": "Service", "name": names.picker, "sectionName": "grpc"}],
        "validation": {
            "caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": names.authority}],
            "hostname": names.host(names.picker),
        },
    }
    return names.child(f"{GATEWAY_GROUP}/v1", "BackendTLSPolicy", names.picker, PICKER, spec=spec)


def _traffic(names: ObjectNames, target: list[Json]) -> Json:
    """Return the policy for connections to engines. ``requestBuffer`` raises the gateway's limit of 32 KiB,
    since the picker reads whole bodies."""
    spec = {
        "targetRefs": target,
        "routingType": "Endpoint",
        "loadBalancer": {
            "type": "LeastRequest",
            "endpointOverride": {"extractFrom": [{"header": DESTINATION_HEADER}]},
        },
        "retry": {"numRetries": 2, "retryOn": {"triggers": list(_RETRIED)}},
        "timeout": {
            "tcp": {"connectTimeout": "5s"},
            "http": {
                "requestTimeout": "0s",
                "streamIdleTimeout": "0s",
                "connectionIdleTimeout": f"{IDLE_SECONDS}s",
            },
        },
        "circuitBreaker": UNBOUNDED,
        "requestBuffer": {"limit": quantity(BODY_BYTES)},
    }
    return names.child(f"{ENVOY_GROUP}/v1alpha1", "BackendTrafficPolicy", names.engine, ENGINE, spec=spec)


def _extension(names: ObjectNames, pool: Pool, target: list[Json]) -> Json:
    """Return the policy by which the gateway calls the picker; the stream ends with the pick, so responses
    are not sent.

    A picker that refuses a connection is ejected for a while, and another one is called. There are no active
    health checks as in the pool's own Envoy: those of Envoy Gateway 1.9 have no ALPN, and pickers with
    ``--transport=grpc`` refuse such clients.
    """
    passive = {
        "splitExternalLocalOriginErrors": True,
        "consecutiveLocalOriginFailures": 1,
        "interval": "1s",
        "baseEjectionTime": "30s",
        "maxEjectionPercent": 50,
    }
    connection = {
        "timeout": {"tcp": {"connectTimeout": "1s"}},
        "healthCheck": {"passive": passive},
        "retry": {
            "numRetries": 3,
            "retryOn": {"triggers": list(_RETRIED)},
            "perRetry": {"backOff": {"baseInterval": "10ms", "maxInterval": "50ms"}},
        },
        "circuitBreaker": UNBOUNDED,
    }
    processor = {
        "backendRefs": [{"group": "", "kind": "Service", "name": names.picker, "port": GRPC_PORT}],
        "backendSettings": connection,
        "messageTimeout": f"{MESSAGE_SECONDS}s",
        "failOpen": pool.gateway.failure_mode == "FailOpen",
        "statusOnError": 503,
        "processingMode": {"request": {"body": "Buffered"}},
        "metadata": {"writableNamespaces": [DESTINATION_NAMESPACE]},
    }
    spec = {"targetRefs": target, "extProc": [processor]}
    return names.child(f"{ENVOY_GROUP}/v1alpha1", "EnvoyExtensionPolicy", names.engine, ENGINE, spec=spec)
