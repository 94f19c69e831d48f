"""Checks of the picker's settings, and parsers of the flags that hold lists. Standard library only.

Every error names the flag and the remedy.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvist_epp.errors import SettingsError
from kvist_epp.flowcontrol.priorities import named_priorities
from kvist_epp.names import POOL_GROUP, THINKING_EFFORTS
from kvist_epp.settings.arguments import flags_of

if TYPE_CHECKING:
    from kvist_epp.settings.settings import Settings

PICKER: Final = "picker"
MODEL_HEADER: Final = "model-header"
ROLES: Final = (PICKER, MODEL_HEADER)
EFFORTS: Final = ("none", "minimal", *THINKING_EFFORTS)
"""Values of ``reasoning_effort`` that engines take."""
THINKING_OFF: Final = ("auto", "none", *THINKING_EFFORTS)
"""Efforts for thinking that a request of the Messages API switches off."""
CONTENT_FORMATS: Final = ("auto", "string", "openai")
GATEWAYS: Final = ("auto", "envoy", "other")
DISAGGREGATION: Final = ("off", "on", "sidecar")
TRACE_PROTOCOLS: Final = ("auto", "http/protobuf", "grpc")
MAX_NAMES: Final = 256
"""Maximum number of names in ``--replicas``; each may resolve to several addresses."""

HostPort = tuple[str, int]
"""A name or address without brackets, and its port."""

_MODEL_HEADER_FIELDS: Final = frozenset(
    (
        *("role", "base_models", "host", "grpc_port", "grpc_health_port", "metrics_port", "transport"),
        *("secure_serving", "cert_path", "client_ca_path", "tls_names", "tls_min_version"),
        *("gateway", "drain_timeout", "drain_delay", "log_format", "log_level", "log_requests"),
        *("max_message_bytes", "max_connections", "max_streams", "max_held_bytes", "max_header_bytes"),
        *("handshake_timeout", "stall_timeout", "stream_idle_timeout", "idle_timeout"),
        *("keepalive_time", "keepalive_timeout", "max_resets_per_second", "max_pings_per_second"),
        *("max_settings_per_second", "max_empty_frames_per_second", "max_control_frames_per_second"),
    )
)
"""Fields of the settings that the role ``model-header`` reads."""
_PORTS: Final = ("grpc_port", "grpc_health_port", "metrics_port", "replica_port")
_ABOVE_ZERO: Final = (
    *("resync_interval", "scrape_interval", "scrape_timeout", "prefill_tokens_per_second"),
    *("request_seconds", "max_backlog_seconds", "gossip_interval", "storage_lease", "kv_lease"),
)
_AT_LEAST_ONE: Final = (
    *("max_num_seqs", "max_message_bytes", "approximate_cache_tokens"),
    *("prewarm_step_tokens", "gpus_per_endpoint"),
)
_NOT_NEGATIVE: Final = (
    *("drain_timeout", "drain_delay", "warmup_timeout", "prewarm_tokens", "gpu_hour_price"),
    *("decision_log", "max_endpoints"),
    *("tpot_target", "queue_requests", "queue_bytes", "queue_seconds", "empty_pool_seconds"),
)
_LIVE_PAGE_FIELDS: Final = ("gpu_hour_price",)
"""Fields of the live page alone. Operators set ``gpus_per_endpoint`` by themselves, and ``live_page_hosts``
are names of ``/debug``, too."""
_TRANSPORT_LIMITS_ABOVE_ZERO: Final = (
    *("handshake_timeout", "stall_timeout", "stream_idle_timeout", "idle_timeout", "keepalive_time"),
    *("keepalive_timeout", "max_resets_per_second", "max_pings_per_second", "max_settings_per_second"),
    *("max_empty_frames_per_second", "max_control_frames_per_second"),
)


def check_values(settings: "Settings") -> None:
    """Check each value by itself. Raises SettingsError."""
    _check_numbers(settings, flags_of(type(settings)))
    parse_target_ports(settings.endpoint_target_ports)
    if settings.gossip_interval > 1:
        raise SettingsError(
            "--gossip-interval: at most 1 s, because a replica that is silent for 3 s counts as gone"
        )
    _check_chats(settings)
    named_priorities(settings.priorities)
    parse_replica_names(settings.replicas)
    parse_base_models(settings.base_models)
    check_trace_endpoint(settings.trace_endpoint, "--trace-endpoint")
    if not 0 <= settings.trace_sample_ratio <= 1:
        raise SettingsError("--trace-sample-ratio: must be from 0 to 1")
    parse_host_names(settings.live_page_hosts)
    _check_transport_limits(settings)


def _check_numbers(settings: "Settings", flags: Mapping[str, str]) -> None:
    for name in _PORTS:
        if not 0 <= getattr(settings, name) <= 65_535:
            raise SettingsError(f"{flags[name]}: {getattr(settings, name)} is not a port (0 to 65535)")
    for f in dataclasses.fields(settings):
        if isinstance(f.default, float) and not math.isfinite(getattr(settings, f.name)):
            raise SettingsError(f"{flags[f.name]}: {getattr(settings, f.name)} is not a finite number")
    for name in (*_ABOVE_ZERO, *_TRANSPORT_LIMITS_ABOVE_ZERO):
        if getattr(settings, name) <= 0:
            raise SettingsError(f"{flags[name]}: must be above zero")
    for name in _AT_LEAST_ONE:
        if getattr(settings, name) < 1:
            raise SettingsError(f"{flags[name]}: must be at least 1")
    for name in _NOT_NEGATIVE:
        if getattr(settings, name) < 0:
            raise SettingsError(f"{flags[name]}: must not be negative")


def _check_transport_limits(settings: "Settings") -> None:
    if not 1 <= settings.max_streams < 1 << 31:
        raise SettingsError("--max-streams: must be from 1 to 2147483647")
    if settings.max_connections < 1:
        raise SettingsError("--max-connections: must be at least 1")
    if settings.max_header_bytes < 1024:
        raise SettingsError("--max-header-bytes: must be at least 1024; gRPC clients send about that much")
    if settings.max_held_bytes < settings.max_message_bytes:
        raise SettingsError("--max-held-bytes: must not be less than --max-message-bytes")


def _check_chats(settings: "Settings") -> None:
    if settings.chat_template_content_format not in CONTENT_FORMATS:
        raise SettingsError(f"--chat-template-content-format: must be one of {', '.join(CONTENT_FORMATS)}")
    if settings.anthropic_disabled_thinking_effort not in THINKING_OFF:
        raise SettingsError(f"--anthropic-disabled-thinking-effort: must be one of {', '.join(THINKING_OFF)}")
    if not settings.tokenizer_mode:
        raise SettingsError("--tokenizer-mode: must not be empty; auto: as the engines choose it")
    if not isinstance(_parsed(settings.default_chat_template_kwargs), dict):
        raise SettingsError('--default-chat-template-kwargs: must be a JSON object, such as {"a": true}')
    efforts = _parsed(settings.reasoning_effort_map)
    if not isinstance(efforts, dict) or not all(type(effort) is str for effort in efforts.values()):
        raise SettingsError(
            '--reasoning-effort-map: must be a JSON object of efforts, such as {"medium": "low"}'
        )
    if unknown := sorted(efforts.keys() - set(EFFORTS)):
        raise SettingsError(
            f"--reasoning-effort-map: {', '.join(unknown)}: must be one of {', '.join(EFFORTS)}"
        )


def _parsed(text: str) -> Any:
    """Return what a JSON document holds, an empty object for an empty text, and None if it is no JSON."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None


def check_startup(settings: "Settings") -> None:
    """Check what matters only when a process starts: flags that need or exclude each other.

    Raises SettingsError.
    """
    _check_tls(settings)
    _check_role(settings)
    if settings.role == MODEL_HEADER:
        return
    _check_discovery(settings)
    check_replica_flags(
        settings.replicas,
        settings.replica_cert_path,
        os.environ,
        insecure=settings.replica_insecure,
        host=settings.host,
    )
    if settings.queue_seconds + settings.empty_pool_seconds >= settings.stream_idle_timeout:
        raise SettingsError(
            "--queue-seconds, --empty-pool-seconds: their sum must be less than --stream-idle-timeout"
        )
    _check_live_page(settings)
    if settings.queue_bytes > settings.max_held_bytes:
        raise SettingsError("--queue-bytes: must not exceed --max-held-bytes, which holds the same requests")


def _check_live_page(settings: "Settings") -> None:
    if settings.live_page:
        return
    flags = flags_of(type(settings))
    for f in dataclasses.fields(settings):
        if f.name in _LIVE_PAGE_FIELDS and getattr(settings, f.name) != f.default:
            raise SettingsError(f"{flags[f.name]}: has no effect with --live-page=false; remove one of them")


def _check_tls(settings: "Settings") -> None:
    flags = flags_of(type(settings))
    for name in ("cert_path", "client_ca_path", "tls_names"):
        if getattr(settings, name) and not settings.secure_serving:
            raise SettingsError(
                f"{flags[name]}: has no effect with --secure-serving=false; remove one of them"
            )
    if settings.cert_path and settings.tls_names:
        raise SettingsError("--tls-names: applies only to the self-issued certificate; remove --cert-path")
    if settings.tls_min_version != "1.2" and settings.transport == "grpc":
        raise SettingsError("--tls-min-version: --transport=grpc accepts 1.2 and later; use fast")


def _check_role(settings: "Settings") -> None:
    given = [f.name for f in dataclasses.fields(settings) if getattr(settings, f.name) != f.default]
    if settings.role == MODEL_HEADER:
        unused = [name for name in given if name not in _MODEL_HEADER_FIELDS]
    else:
        unused = [name for name in given if name == "base_models"]
    if unused:
        flags = flags_of(type(settings))
        raise SettingsError(
            f"{', '.join(flags[name] for name in unused)}: no effect with --role={settings.role}"
        )


def _check_discovery(settings: "Settings") -> None:
    sources = {
        "--endpoints-file": settings.endpoints_file,
        "--endpoint-selector": settings.endpoint_selector,
        "--pool-name": settings.pool_name,
    }
    given = [flag for flag, value in sources.items() if value]
    if not given:
        raise SettingsError(
            "--endpoints-file, --endpoint-selector or --pool-name: set one of them to locate the endpoints"
        )
    if len(given) > 1:
        raise SettingsError(f"{' and '.join(given)}: only one of them may be set")
    if bool(settings.endpoint_selector) != bool(settings.endpoint_target_ports):
        raise SettingsError("--endpoint-selector and --endpoint-target-ports: each needs the other")
    if settings.pool_namespace and settings.endpoints_file:
        raise SettingsError("--pool-namespace: has no effect with --endpoints-file")
    if settings.pool_group != POOL_GROUP and not settings.pool_name:
        raise SettingsError("--pool-group: has no effect without --pool-name")


def check_replica_flags(
    replicas: str, cert_path: str, environment: Mapping[str, str], *, insecure: bool, host: str
) -> None:
    """Check that plaintext between replicas is requested explicitly, except on the loopback interface.

    Raises SettingsError.
    """
    if not replicas:
        if cert_path or insecure:
            raise SettingsError("--replica-cert-path, --replica-insecure: no effect without --replicas")
        return
    if cert_path and insecure:
        raise SettingsError("--replica-cert-path and --replica-insecure: only one of them may be set")
    if not (cert_path or insecure or is_loopback_only(replicas, host, environment)):
        raise SettingsError(
            "--replica-cert-path: replicas exchange prompts; set it to a folder with tls.crt, tls.key and "
            "ca.crt, or set --replica-insecure if the network between replicas is private"
        )


def is_loopback_only(replicas: str, host: str, environment: Mapping[str, str]) -> bool:
    """Return whether all replicas are processes of this machine, reached over the loopback interface."""
    in_cluster = "KUBERNETES_SERVICE_HOST" in environment
    hosts = [name for name, _ in parse_replica_names(replicas)] + ([host] if host else [])
    return not in_cluster and all(map(_is_loopback, hosts))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_replica_names(text: str) -> tuple[HostPort, ...]:
    """Parse ``--replicas``, a comma-separated list of ``name:port``, ``1.2.3.4:port`` and ``[::1]:port``.

    Raises SettingsError.
    """
    words = [word.strip() for word in text.split(",")] if text else []
    if len(words) > MAX_NAMES:
        raise SettingsError(
            f"--replicas: at most {MAX_NAMES} names; the name of a headless Service covers all replicas"
        )
    return tuple(map(_parse_host_port, words))


def _parse_host_port(word: str) -> HostPort:
    host, _, port = word.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    digits = port.isascii() and port.isdigit() and len(port) < 6
    if not bare or (":" in bare and bare == host) or not digits or not 1 <= int(port) <= 65_535:
        raise SettingsError(f"--replicas: {word!r} is not name:port, such as kvist-epp-peers.ns.svc:9004")
    return bare, int(port)


def parse_base_models(text: str) -> dict[str, str]:
    """Parse ``--base-models``, such as ``adapter=base,other=base``. Raises SettingsError."""
    found: dict[str, str] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        adapter, _, base = (part.strip() for part in word.rpartition("="))
        if not adapter or not base:
            raise SettingsError(f"--base-models: {word!r} is not ADAPTER=BASE")
        if found.setdefault(adapter, base) != base:
            raise SettingsError(f"--base-models: {adapter!r} has two different base models")
    return found


def check_trace_endpoint(url: str, name: str) -> None:
    """Check the address of a collector; empty is none. Raises SettingsError, which has ``name``."""
    if not url:
        return
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that cannot be one
        valid = False
    if not valid:
        raise SettingsError(f"{name}: {url!r} is not a URL such as http://collector:4318")


def parse_host_names(text: str) -> tuple[str, ...]:
    """Parse ``--live-page-hosts``, such as ``kvist.example.com,picker``. Raises SettingsError."""
    names = tuple(word.strip().lower().rstrip(".") for word in text.split(",") if word.strip())
    for name in names:
        if not name.isascii() or not all(letter.isalnum() or letter in "-._" for letter in name):
            raise SettingsError(
                f"--live-page-hosts: {name!r} is not a host name without port, such as kvist.example.com"
            )
    return names


def parse_target_ports(text: str) -> tuple[int, ...]:
    """Parse ``--endpoint-target-ports``: ``8000,8001`` → (8000, 8001), each once. Raises SettingsError."""
    words = text.split(",") if text else []
    ports = [int(word) if word.isascii() and word.isdigit() and len(word) < 6 else 0 for word in words]
    if len(ports) > 8 or not all(1 <= port <= 65_535 for port in ports):
        raise SettingsError(f"--endpoint-target-ports: {text!r} is not 1 to 8 ports, such as 8000,8001")
    return tuple(dict.fromkeys(ports))
