"""``gateway.mode: Route``: what attaches a pool to somebody's Gateway, in one of two flavours. Pure.

InferencePool: the Inference Extension's pool (its ``status`` belongs to gateways) and an HTTPRoute to it.
EnvoyGateway: an HTTPRoute to the engines' Service, the picker as an EnvoyExtensionPolicy, its answer as an
endpoint override (fields: gateway.envoyproxy.io/v1alpha1 of Envoy Gateway 1.9).
"""

from collections.abc import Mapping
from typing import Any, Final

from kvist_epp.names import DESTINATION_HEADER, DESTINATION_NAMESPACE, POOL_GROUP
from kvist_operator.spec.pool import Pool

from .bootstrap import BODY_BYTES, IDLE_SECONDS, MESSAGE_SECONDS
from .cluster_facts import Api, Json, Note, Site
from .engine_workload import quantity
from .object_names import ENGINE, ENGINE_PORT, GRPC_PORT, PICKER, ObjectNames

GATEWAY_GROUP: Final = "gateway.networking.k8s.io"
ENVOY_GROUP: Final = "gateway.envoyproxy.io"
NO_LIMIT: Final = 1_000_000
_RETRIED: Final = ("connect-failure", "refused-stream", "reset")
_NEEDS: Final[Mapping[str, tuple[Api, ...]]] = {
    "InferencePool": (Api.HTTP_ROUTE, Api.INFERENCE_POOL),
    "EnvoyGateway": (Api.HTTP_ROUTE, Api.BACKEND_TLS_POLICY, Api.EXTENSION_POLICY, Api.TRAFFIC_POLICY),
}


def gateway(pool: Pool, site: Site) -> list[Json]:
    """Nothing where an API is missing: half a way in would go round the picker."""
    if pool.gateway.mode != "Route" or missing(pool, site):
        return []
    names, asks = ObjectNames.of(pool), pool.picker.mode != "Off"
    if not asks:
        return [_route(names, pool, _engines(names))]
    if pool.gateway.flavor == "InferencePool":
        backend = {"group": POOL_GROUP, "kind": "InferencePool", "name": names.pool, "weight": 1}
        return [_inference_pool(names, pool), _route(names, pool, backend)]
    return [
        _verified(names),
        _traffic(names),
        _extension(names, pool),
        _route(names, pool, _engines(names)),
    ]


def missing(pool: Pool, site: Site) -> list[Note]:
    """A note for each API that the flavour needs and the cluster lacks."""
    if pool.gateway.mode != "Route":
        return []
    needed = _NEEDS[pool.gateway.flavor] if pool.picker.mode != "Off" else (Api.HTTP_ROUTE,)
    return [
        Note(
            "GatewayAttached",
            "ApiMissing",
            f"{api} is not installed: install it, or choose another spec.gateway.mode or flavor",
        )
        for api in needed
        if api not in site.apis
    ]


def _engines(names: ObjectNames) -> Json:
    return {"group": "", "kind": "Service", "name": names.engine, "port": ENGINE_PORT, "weight": 1}


def _inference_pool(names: ObjectNames, pool: Pool) -> Json:
    return {
        "apiVersion": f"{POOL_GROUP}/v1",
        "kind": "InferencePool",
        "metadata": names.meta(names.pool, PICKER),
        "spec": {
            "selector": {"matchLabels": names.served},
            "targetPorts": [{"number": ENGINE_PORT}],
            "endpointPickerRef": {
                "group": "",
                "kind": "Service",
                "name": names.picker,
                "port": {"number": GRPC_PORT},
                "failureMode": pool.gateway.failure_mode,
            },
        },
    }


def _route(names: ObjectNames, pool: Pool, backend: Json) -> Json:
    spec: Json = {
        "parentRefs": [_parent(parent) for parent in pool.gateway.parents],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                "backendRefs": [backend],
                "timeouts": {"request": "0s"},
            }
        ],
    }
    if pool.gateway.hostnames:
        spec["hostnames"] = list(pool.gateway.hostnames)
    return {
        "apiVersion": f"{GATEWAY_GROUP}/v1",
        "kind": "HTTPRoute",
        "metadata": names.meta(names.engine, ENGINE),
        "spec": spec,
    }


def _parent(parent: Mapping[str, Any]) -> Json:
    """With the defaults of the API, so that what is applied is what is read."""
    return {"group": GATEWAY_GROUP, "kind": "Gateway", **parent}


def _verified(names: ObjectNames) -> Json:
    """The gateway trusts the authority that the operator made for the pickers."""
    return {
        "apiVersion": f"{GATEWAY_GROUP}/v1",
        "kind": "BackendTLSPolicy",
        "metadata": names.meta(names.picker, PICKER),
        "spec": {
            "targetRefs": [{"group": "", "kind": "Service", "name": names.picker, "sectionName": "grpc"}],
            "validation": {
                "caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": names.authority}],
                "hostname": names.host(names.picker),
            },
        },
    }


def _target(names: ObjectNames) -> list[Json]:
    return [{"group": GATEWAY_GROUP, "kind": "HTTPRoute", "name": names.engine}]


def _traffic(names: ObjectNames) -> Json:
    """``requestBuffer`` raises the gateway's limit of 32 KiB for bodies that the picker reads whole."""
    return {
        "apiVersion": f"{ENVOY_GROUP}/v1alpha1",
        "kind": "BackendTrafficPolicy",
        "metadata": names.meta(names.engine, ENGINE),
        "spec": {
            "targetRefs": _target(names),
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
            "circuitBreaker": _unbounded(),
            "requestBuffer": {"limit": quantity(BODY_BYTES)},
        },
    }


def _extension(names: ObjectNames, pool: Pool) -> Json:
    """Responses are not looked at: the stream to the picker ends with the pick."""
    return {
        "apiVersion": f"{ENVOY_GROUP}/v1alpha1",
        "kind": "EnvoyExtensionPolicy",
        "metadata": names.meta(names.engine, ENGINE),
        "spec": {
            "targetRefs": _target(names),
            "extProc": [
                {
                    "backendRefs": [
                        {"group": "", "kind": "Service", "name": names.picker, "port": GRPC_PORT}
                    ],
                    "backendSettings": _asked(),
                    "messageTimeout": f"{MESSAGE_SECONDS}s",
                    "failOpen": pool.gateway.failure_mode == "FailOpen",
                    "statusOnError": 503,
                    "processingMode": {"request": {"body": "Buffered"}},
                    "metadata": {"writableNamespaces": [DESTINATION_NAMESPACE]},
                }
            ],
        },
    }


def _asked() -> Json:
    """A picker that refuses a connection is left alone for a while, and another one is asked.

    Not checked actively, as the pool's own Envoy does: Envoy Gateway 1.9 gives its checks no ALPN, and
    pickers with ``--transport=grpc`` refuse such clients."""
    passive = {
        "splitExternalLocalOriginErrors": True,
        "consecutiveLocalOriginFailures": 1,
        "interval": "1s",
        "baseEjectionTime": "30s",
        "maxEjectionPercent": 50,
    }
    return {
        "timeout": {"tcp": {"connectTimeout": "1s"}},
        "healthCheck": {"passive": passive},
        "retry": {
            "numRetries": 3,
            "retryOn": {"triggers": list(_RETRIED)},
            "perRetry": {"backOff": {"baseInterval": "10ms", "maxInterval": "50ms"}},
        },
        "circuitBreaker": _unbounded(),
    }


def _unbounded() -> Json:
    """Engines and pickers have queues of their own."""
    limits = ("maxConnections", "maxPendingRequests", "maxParallelRequests", "maxParallelRetries")
    return dict.fromkeys(limits, NO_LIMIT)
