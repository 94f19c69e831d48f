"""Traces of an Envoy: its OpenTelemetry tracer, which exports over gRPC.

``docs/guides/tracing.md`` has the same configuration. Type names and fields: Envoy's v3 API (1.40).
"""

from typing import Final

from kvist_sim.envoy_settings import Json

_CLUSTER: Final = "collector"
_TYPE: Final = "type.googleapis.com/envoy."


def add_tracing(settings: Json, collector: str, *, percent: float = 100.0) -> None:
    """Have an Envoy's configuration send traces to ``collector`` (``ip:port``), of so many percent of the
    requests without a trace."""
    host, _, port = collector.rpartition(":")
    address = {"socket_address": {"address": host, "port_value": int(port)}}
    http = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    protocol = {
        "@type": f"type.googleapis.com/{http}",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    hosts = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    settings["static_resources"]["clusters"].append(
        {
            "name": _CLUSTER,
            "type": "STATIC",
            "connect_timeout": "1s",
            "load_assignment": {"cluster_name": _CLUSTER, "endpoints": hosts},
            "typed_extension_protocol_options": {http: protocol},
        }
    )
    tracer = {
        "@type": f"{_TYPE}config.trace.v3.OpenTelemetryConfig",
        "service_name": "envoy",
        "grpc_service": {"envoy_grpc": {"cluster_name": _CLUSTER}, "timeout": "1s"},
    }
    chain = settings["static_resources"]["listeners"][0]["filter_chains"][0]
    chain["filters"][0]["typed_config"]["tracing"] = {
        "provider": {"name": "envoy.tracers.opentelemetry", "typed_config": tracer},
        "random_sampling": {"value": percent},
        "spawn_upstream_span": True,
    }


def send_spans_at_once(settings: Json) -> None:
    """Have an Envoy export each span at once, not when there are five or after five seconds; for tests."""
    flush = {"tracing.opentelemetry.min_flush_spans": 1, "tracing.opentelemetry.flush_interval_ms": 200}
    layers = settings.setdefault("layered_runtime", {}).setdefault("layers", [])
    layers.append({"name": "tracing", "static_layer": flush})
