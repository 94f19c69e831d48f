"""The configuration of the pool's own Envoy (v3 API, 1.40), with names where the guide has addresses. Pure.

Envoy resolves engines by a headless Service, with a picker also those that are not ready: the picker chooses,
and Envoy must have the first address of an empty pool by then. The picker's answer names addresses;
``override_host`` uses the first one that DNS has returned. For a pod that is younger than the last look-up
(two seconds) the fallback policy chooses another, which costs a cache hit and nothing more. ORIGINAL_DST
would know every address at once, but has no fallback and connects to any address in a client's header.
"""

from typing import Any, Final

from kvist_epp.names import (
    DESTINATION_HEADER,
    DESTINATION_NAMESPACE,
    GATEWAY_OWNED,
    PROCESS_METHOD,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    WEBSOCKET,
)
from kvist_operator.spec.pool import Pool, TracingSpec

from .object_names import ADMIN_PORT, ENGINE_PORT, GRPC_PORT, HTTP_PORT, STATUS_PORT, Json, ObjectNames

BODY_BYTES: Final = 32 << 20
"""Largest request body; a larger one gets 413. The picker's --max-message-bytes is a little more."""
HEAP_BYTES: Final = 1 << 31
MESSAGE_SECONDS: Final = 1000
"""Time limit of the picker's answer: longer than a request may be queued in the picker."""
LOOK_UP_SECONDS: Final = 2
IDLE_SECONDS: Final = 4
"""Below vLLM's keep-alive of 5 s."""
SDS_FILE: Final = "authority.json"
CONFIG_FOLDER: Final = "/etc/envoy"
AUTHORITY_FOLDER: Final = "/etc/kvist/ca"

_TYPE: Final = "type.googleapis.com/envoy."
_SERVICE: Final = PROCESS_METHOD.split("/")[1]
_NO_LIMIT: Final = 1_000_000
_POOL: Final = "pool"
_PICKER: Final = "picker"
_ADMIN: Final = "admin"
_COLLECTOR: Final = "collector"
_AUTHORITY: Final = "picker-ca"


def bootstrap(pool: Pool) -> Json:
    """Return Envoy's configuration, as ``envoy -c`` reads it."""
    names, asks = ObjectNames.of(pool), pool.picker.mode != "Off"
    clusters = [_pool(names, asks=asks), _admin()]
    if asks:
        clusters.append(_picker(names))
    if pool.tracing:
        clusters.append(_collector(pool.tracing))
    return {
        "node": {"id": names.envoy, "cluster": names.envoy},  # watching files asks for it
        "admin": {"address": _address("127.0.0.1", ADMIN_PORT)},
        "static_resources": {"listeners": [_inference(pool, asks=asks), _status()], "clusters": clusters},
        "overload_manager": _overload(),
    }


def authority(pool: Pool) -> Json:
    """Return the validation of the picker's certificate, in a separate file, so that a new authority needs no
    restart."""
    names = ObjectNames.of(pool)
    secret = {
        "@type": f"{_TYPE}extensions.transport_sockets.tls.v3.Secret",
        "name": _AUTHORITY,
        "validation_context": {
            "trusted_ca": {"filename": f"{AUTHORITY_FOLDER}/ca.crt"},
            "watched_directory": {"path": AUTHORITY_FOLDER},
            "match_typed_subject_alt_names": [
                {"san_type": "DNS", "matcher": {"exact": names.host(names.picker)}}
            ],
        },
    }
    return {"resources": [secret]}


def _inference(pool: Pool, *, asks: bool) -> Json:
    # clients' requests lose the headers that only gateways and pickers may set
    mutation = "http.early_header_mutation.header_mutation"
    removed = [{"remove": name} for name in (DESTINATION_HEADER, *GATEWAY_OWNED)]
    cleaning = _extension(f"{mutation}.v3.HeaderMutation") | {"mutations": removed}
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": _POOL, "timeout": "0s", "retry_policy": _retries(2)},
    }
    found: Json = {
        **_extension("filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "inference",
        "use_remote_address": True,
        "stream_idle_timeout": "0s",
        "http_protocol_options": {"accept_http_10": True},  # what NGINX before 1.29.7 speaks to upstreams
        "upgrade_configs": [{"upgrade_type": WEBSOCKET}],
        "early_header_mutation_extensions": [_named(f"envoy.{mutation}", cleaning)],
        "http_filters": [*([_ext_proc(pool)] if asks else []), _router()],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    if asks:
        found["access_log"] = [_access_log()]
    if pool.tracing:
        found["tracing"] = _tracing(pool.tracing, ObjectNames.of(pool).envoy)
    return _listener("inference", "::", HTTP_PORT, found) | {"per_connection_buffer_limit_bytes": BODY_BYTES}


def _retries(number: int) -> Json:
    """Return a retry policy. ``reset``: the endpoint failed before the first byte of its response, while
    Envoy still has the body."""
    previous = _extension("retry.host.previous_hosts.v3.PreviousHostsPredicate")
    return {
        "retry_on": "connect-failure,refused-stream,reset",
        "num_retries": number,
        "retry_host_predicate": [_named("envoy.retry_host_predicates.previous_hosts", previous)],
        "host_selection_retry_max_attempts": 10,
    }


def _ext_proc(pool: Pool) -> Json:
    settings = {
        **_extension("filters.http.ext_proc.v3.ExternalProcessor"),
        "grpc_service": {
            "envoy_grpc": {"cluster_name": _PICKER},
            "retry_policy": _retries(3)
            | {"retry_back_off": {"base_interval": "0.01s", "max_interval": "0.05s"}},
        },
        "message_timeout": f"{MESSAGE_SECONDS}s",
        "failure_mode_allow": pool.gateway.failure_mode == "FailOpen",
        "status_on_error": {"code": "ServiceUnavailable"},
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SKIP",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SKIP",
        },
        "metadata_options": {"receiving_namespaces": {"untyped": [DESTINATION_NAMESPACE]}},
    }
    return _named("envoy.filters.http.ext_proc", settings)


def _router() -> Json:
    return _named("envoy.filters.http.router", _extension("filters.http.router.v3.Router"))


def _access_log() -> Json:
    settings = {
        **_extension("access_loggers.grpc.v3.HttpGrpcAccessLogConfig"),
        "common_config": {
            "log_name": "kvist",
            "transport_api_version": "V3",
            "grpc_service": {"envoy_grpc": {"cluster_name": _PICKER}},
            "buffer_flush_interval": "0.1s",
        },
        "additional_request_headers_to_log": [REQUEST_ID_HEADER, SESSION_HEADER, DESTINATION_HEADER],
    }
    return _named("envoy.access_loggers.http_grpc", settings)


def _tracing(spec: TracingSpec, service: str) -> Json:
    """Return Envoy's tracer. Its decision to sample is kept by picker and engines, which get it in the
    requests; ``spawn_upstream_span`` makes the request to the engine a span, the parent of the engine's."""
    tracer = {
        "@type": f"{_TYPE}config.trace.v3.OpenTelemetryConfig",
        "service_name": service,
        "grpc_service": {"envoy_grpc": {"cluster_name": _COLLECTOR}, "timeout": "1s"},
    }
    return {
        "provider": _named("envoy.tracers.opentelemetry", tracer),
        "random_sampling": {"value": spec.sampling_percent},
        "spawn_upstream_span": True,
    }


def _collector(spec: TracingSpec) -> Json:
    return {
        **_by_name(_COLLECTOR, *spec.address),
        "connect_timeout": "1s",
        "typed_extension_protocol_options": _http(explicit_http_config={"http2_protocol_options": {}}),
    }


def _status() -> Json:
    """Return the listener for /ready and metrics; the rest of the admin page is not reachable from
    outside."""
    routes = [
        {"match": {"path": path}, "route": {"cluster": _ADMIN}} for path in ("/ready", "/stats/prometheus")
    ]
    manager = {
        **_extension("filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "status",
        "http_filters": [_router()],
        "route_config": {"virtual_hosts": [{"name": "status", "domains": ["*"], "routes": routes}]},
    }
    return _listener("status", "::", STATUS_PORT, manager)


def _listener(name: str, host: str, port: int, manager: Json) -> Json:
    address = _address(host, port)
    address["socket_address"]["ipv4_compat"] = True
    filters = [_named("envoy.http_connection_manager", manager)]
    return {"name": name, "address": address, "filter_chains": [{"filters": filters}]}


def _pool(names: ObjectNames, *, asks: bool) -> Json:
    fallback = _policy("least_request.v3.LeastRequest")
    return {
        **_by_name(_POOL, names.host(names.engines), ENGINE_PORT),
        "connect_timeout": "5s",
        "load_balancing_policy": _override(fallback) if asks else fallback,
        "circuit_breakers": _unbounded(),
        "typed_extension_protocol_options": _http(
            explicit_http_config={"http_protocol_options": {}},
            common_http_protocol_options={"idle_timeout": f"{IDLE_SECONDS}s"},
        ),
    }


def _picker(names: ObjectNames) -> Json:
    """Return the cluster of pickers, each with its own address and health check each second, so that a dead
    or draining one is avoided before a request needs it."""
    check = {
        "grpc_health_check": {"service_name": _SERVICE},
        "timeout": "1s",
        "interval": "1s",
        "no_traffic_interval": "1s",
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
    }
    return {
        **_by_name(_PICKER, names.host(names.peers), GRPC_PORT),
        "connect_timeout": "1s",
        "health_checks": [check],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"},
        "circuit_breakers": _unbounded(),
        "typed_extension_protocol_options": _http(explicit_http_config={"http2_protocol_options": {}}),
        "transport_socket": _tls(names),
    }


def _tls(names: ObjectNames) -> Json:
    source = {"path_config_source": {"path": f"{CONFIG_FOLDER}/{SDS_FILE}"}, "resource_api_version": "V3"}
    context = {
        **_extension("transport_sockets.tls.v3.UpstreamTlsContext"),
        "sni": names.host(names.picker),
        "common_tls_context": {
            "alpn_protocols": ["h2"],
            "validation_context_sds_secret_config": {"name": _AUTHORITY, "sds_config": source},
        },
    }
    return _named("envoy.transport_sockets.tls", context)


def _admin() -> Json:
    load = _assignment(_ADMIN, "127.0.0.1", ADMIN_PORT)
    return {"name": _ADMIN, "type": "STATIC", "connect_timeout": "1s", "load_assignment": load}


def _by_name(name: str, host: str, port: int) -> Json:
    """Return a cluster of all addresses of a name. ``V4_PREFERRED`` works for a Service of either IP
    family."""
    look_up = _extension("clusters.dns.v3.DnsCluster") | {
        "dns_refresh_rate": f"{LOOK_UP_SECONDS}s",
        "dns_failure_refresh_rate": {"base_interval": "1s", "max_interval": f"{LOOK_UP_SECONDS}s"},
        "dns_lookup_family": "V4_PREFERRED",
    }
    return {
        "name": name,
        "cluster_type": _named("envoy.clusters.dns", look_up),
        "load_assignment": _assignment(name, host, port),
    }


def _override(fallback: Json) -> Json:
    metadata = {"key": DESTINATION_NAMESPACE, "path": [{"key": DESTINATION_HEADER}]}
    return _policy(
        "override_host.v3.OverrideHost",
        override_host_sources=[{"header": DESTINATION_HEADER}, {"metadata": metadata}],
        fallback_policy=fallback,
    )


def _policy(kind: str, **settings: Any) -> Json:
    name = f"envoy.load_balancing_policies.{kind.partition('.')[0]}"
    typed = _extension(f"load_balancing_policies.{kind}") | settings
    return {"policies": [{"typed_extension_config": _named(name, typed)}]}


def _http(**options: Json) -> Json:
    name = "upstreams.http.v3.HttpProtocolOptions"
    return {f"envoy.extensions.{name}": _extension(name) | options}


def _unbounded() -> Json:
    """Return a circuit breaker without limits: engines and pickers have queues of their own."""
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"thresholds": [dict.fromkeys(limits, _NO_LIMIT)]}


def _overload() -> Json:
    """Return limits by which new requests get 503 when bodies fill the memory, before the process is
    killed."""
    heap = "envoy.resource_monitors.fixed_heap"
    connections = {
        **_extension("resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig"),
        "max_active_downstream_connections": _NO_LIMIT,
    }
    limit = _extension("resource_monitors.fixed_heap.v3.FixedHeapConfig") | {
        "max_heap_size_bytes": HEAP_BYTES * 9 // 10
    }
    return {
        "resource_monitors": [
            _named("envoy.resource_monitors.global_downstream_max_connections", connections),
            _named(heap, limit),
        ],
        "actions": [
            {
                "name": "envoy.overload_actions.stop_accepting_requests",
                "triggers": [{"name": heap, "threshold": {"value": 0.95}}],
            }
        ],
    }


def _assignment(name: str, host: str, port: int) -> Json:
    endpoint = {"endpoint": {"address": _address(host, port)}}
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]}


def _address(host: str, port: int) -> Json:
    return {"socket_address": {"address": host, "port_value": port}}


def _named(name: str, settings: Json) -> Json:
    return {"name": name, "typed_config": settings}


def _extension(kind: str) -> Json:
    return {"@type": f"{_TYPE}extensions.{kind}"}
