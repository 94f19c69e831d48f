"""The collector that gets the spans, as the flags or OpenTelemetry's variables name it. Pure.

Source: OpenTelemetry's specification of the OTLP exporter and of the SDK's environment variables. A flag
takes precedence over a variable, and a variable for traces alone (``OTEL_EXPORTER_OTLP_TRACES_…``) over the
general one. Other variables of OpenTelemetry have no effect.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from kvist_epp.errors import SettingsError
from kvist_epp.settings.settings import Settings
from kvist_epp.settings.validation import TRACE_PROTOCOLS, check_trace_endpoint

TRACES_PATH: Final = "/v1/traces"
SERVICE: Final = "kvist-epp"
GRPC: Final = "grpc"
_AUTO, _HTTP, _ = TRACE_PROTOCOLS
_GENERAL: Final = "OTEL_EXPORTER_OTLP_"
_TRACES: Final = "OTEL_EXPORTER_OTLP_TRACES_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Address of a collector, and what it wants with each export."""

    url: str
    """Over HTTP the whole URL of its traces, over gRPC its address."""
    protocol: str
    """``http/protobuf`` or ``grpc``."""
    headers: Mapping[str, str]
    """Headers of each export, such as a key of the collector."""
    certificate: str
    """PEM file with the authorities of its certificate; empty: the system's."""

    @property
    def secure(self) -> bool:
        """Return whether it is reached over TLS."""
        return self.url.startswith("https://")

    @property
    def hostport(self) -> str:
        """Return the address alone, as gRPC expects it."""
        return urlsplit(self.url).netloc.rpartition("@")[2]


def destination(settings: Settings, environment: Mapping[str, str]) -> Destination | None:
    """Return the collector; None if traces are off. Raises SettingsError, which names flag or variable."""
    name, url = _endpoint(settings, environment)
    if not url:
        return None
    protocol = settings.trace_protocol
    if protocol == _AUTO:
        variable, protocol = _variable(environment, "PROTOCOL")
        protocol = protocol or _HTTP
        if protocol not in TRACE_PROTOCOLS[1:]:
            known = " or ".join(TRACE_PROTOCOLS[1:])
            raise SettingsError(f"{variable}: {protocol!r} is not supported: set --trace-protocol to {known}")
    url = url if "://" in url else f"http://{url}"
    check_trace_endpoint(url, name)
    if protocol != GRPC and name != f"{_TRACES}ENDPOINT" and not url.rstrip("/").endswith(TRACES_PATH):
        url = url.rstrip("/") + TRACES_PATH
    variable, text = _variable(environment, "HEADERS")
    headers = {key.lower(): value for key, value in _pairs(text, variable).items()}
    certificate = _variable(environment, "CERTIFICATE")[1]
    return Destination(url=url, protocol=protocol, headers=headers, certificate=certificate)


def resource(environment: Mapping[str, str], version: str, instance: str) -> dict[str, str]:
    """Return attributes that describe this picker: OpenTelemetry's variables win. Raises SettingsError."""
    found = {"service.name": SERVICE, "service.version": version, "service.instance.id": instance}
    found |= _pairs(environment.get("OTEL_RESOURCE_ATTRIBUTES", ""), "OTEL_RESOURCE_ATTRIBUTES")
    if name := environment.get("OTEL_SERVICE_NAME", ""):
        found["service.name"] = name
    return found


def _endpoint(settings: Settings, environment: Mapping[str, str]) -> tuple[str, str]:
    if settings.trace_endpoint:
        return "--trace-endpoint", settings.trace_endpoint
    disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return "", ""
    return _variable(environment, "ENDPOINT")


def _variable(environment: Mapping[str, str], name: str) -> tuple[str, str]:
    """Return the name and the value of a variable: that of traces, else the general one."""
    for variable in (_TRACES + name, _GENERAL + name):
        if value := environment.get(variable, "").strip():
            return variable, value
    return _GENERAL + name, ""


def _pairs(text: str, variable: str) -> dict[str, str]:
    """Parse ``key=value,key=value``, percent-encoded. Raises SettingsError, without the values: a collector's
    key may be among them."""
    found = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        key, sign, value = word.partition("=")
        if not sign or not key.strip():
            raise SettingsError(f"{variable}: must be KEY=VALUE, separated by commas")
        found[unquote(key.strip())] = unquote(value.strip())
    return found
