"""What a ``kvist-epp`` process is for, and which flags make sense then. Standard library only."""

from collections.abc import Iterable
from typing import Final

from kvist_epp.errors import SettingsError

PICKER: Final = "picker"
MODEL_HEADER: Final = "model-header"
ROLES: Final = (PICKER, MODEL_HEADER)

_OF_MODEL_HEADER: Final = frozenset(
    (
        *("role", "base_models", "host", "grpc_port", "grpc_health_port", "metrics_port", "transport"),
        *("secure_serving", "cert_path", "client_ca_path", "tls_names", "tls_min_version"),
        *("drain_timeout", "drain_delay", "log_format", "log_level", "log_requests"),
        *("max_message_bytes", "max_connections", "max_streams", "max_held_bytes", "max_header_bytes"),
        *("handshake_timeout", "stall_timeout", "stream_idle_timeout", "idle_timeout"),
        *("keepalive_time", "keepalive_timeout", "max_resets_per_second", "max_pings_per_second"),
        *("max_settings_per_second", "max_empty_frames_per_second", "max_control_frames_per_second"),
    )
)
"""Fields of the settings that the role reads."""


def check_role(role: str, given: Iterable[str]) -> None:
    """``given``: fields of the settings that are not at their default. Raises SettingsError."""
    if role == MODEL_HEADER:
        idle = [name for name in given if name not in _OF_MODEL_HEADER]
    else:
        idle = [name for name in given if name == "base_models"]
    if idle:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise SettingsError(f"{flags}: of no use with --role={role}")


def base_models_of(text: str) -> dict[str, str]:
    """``adapter=base,other=base`` as a mapping; raises SettingsError."""
    found: dict[str, str] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        adapter, _, base = (part.strip() for part in word.rpartition("="))
        if not adapter or not base:
            raise SettingsError(f"--base-models: {word!r} is no adapter=base")
        if found.setdefault(adapter, base) != base:
            raise SettingsError(f"--base-models: {adapter!r} is there twice")
    return found
