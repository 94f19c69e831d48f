"""The destination of traces: flags, OpenTelemetry's variables, and which of them wins."""

import pytest

from kvist_epp.errors import SettingsError
from kvist_epp.settings.settings import Settings
from kvist_epp.tracing.destination import destination, resource

GENERAL = "OTEL_EXPORTER_OTLP_"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_"


def url(flag: str = "", protocol: str = "auto", **environment: str) -> str | None:
    """The URL of the collector; None if traces are off."""
    found = destination(Settings(trace_endpoint=flag, trace_protocol=protocol), environment)
    return None if found is None else found.url


def test_traces_are_off_by_default() -> None:
    """Without a flag or variable there is no collector, and a variable can be overruled by OpenTelemetry's
    switches."""
    collector = {f"{GENERAL}ENDPOINT": "http://c:4318"}
    assert url() is None
    assert url(**collector, OTEL_SDK_DISABLED="true") is None
    assert url(**collector, OTEL_TRACES_EXPORTER="none") is None


def test_the_path_of_traces_is_added() -> None:
    """A base URL gets /v1/traces over HTTP, one for traces alone stays as it is."""
    assert url("http://c:4318") == url("http://c:4318/") == "http://c:4318/v1/traces"
    assert url("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"
    assert url(**{f"{GENERAL}ENDPOINT": "http://c/otlp"}) == "http://c/otlp/v1/traces"
    assert url(**{f"{TRACES}ENDPOINT": "http://c/otlp"}) == "http://c/otlp"
    assert url("http://c:4317", "grpc") == "http://c:4317"


def test_flags_win_and_variables_for_traces_come_second() -> None:
    """The flag, then the variable of traces, then the general one."""
    both = {f"{GENERAL}ENDPOINT": "http://general", f"{TRACES}ENDPOINT": "http://traces"}
    assert url("http://flag", **both) == "http://flag/v1/traces"
    assert url(**both) == "http://traces"
    assert url("http://flag", OTEL_SDK_DISABLED="true") == "http://flag/v1/traces"


def test_protocol_headers_and_certificate_come_from_variables() -> None:
    """Settings without a flag are read from OpenTelemetry's variables, headers percent-decoded."""
    found = destination(
        Settings(),
        {
            f"{GENERAL}ENDPOINT": "c:4317",
            f"{GENERAL}PROTOCOL": "grpc",
            f"{GENERAL}HEADERS": "Authorization=Bearer%20key, x-tenant = blue",
            f"{GENERAL}CERTIFICATE": "/ca.crt",
        },
    )
    assert found is not None
    assert (found.url, found.protocol, found.hostport) == ("http://c:4317", "grpc", "c:4317")
    assert found.headers == {"authorization": "Bearer key", "x-tenant": "blue"}
    assert (found.certificate, found.secure) == ("/ca.crt", False)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({f"{GENERAL}ENDPOINT": "ftp://c"}, f"{GENERAL}ENDPOINT"),
        ({f"{TRACES}ENDPOINT": "http://"}, f"{TRACES}ENDPOINT"),
        ({f"{GENERAL}ENDPOINT": "http://c", f"{GENERAL}PROTOCOL": "http/json"}, f"{GENERAL}PROTOCOL"),
        ({f"{GENERAL}ENDPOINT": "http://c", f"{GENERAL}HEADERS": "secret"}, f"{GENERAL}HEADERS"),
    ],
)
def test_a_bad_variable_names_itself(environment: dict[str, str], named: str) -> None:
    """A variable that cannot be used is refused by its name, without a header's value."""
    with pytest.raises(SettingsError, match=f"^{named}: ") as refused:
        destination(Settings(), environment)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--trace-endpoint=collector:4318"],
        ["--trace-endpoint=http://:4318"],
        ["--trace-endpoint=http://c:x"],
        ["--trace-sample-ratio=1.1"],
        ["--trace-sample-ratio=-0.1"],
        ["--trace-sample-ratio=nan"],
    ],
)
def test_a_bad_flag_names_itself(flags: list[str]) -> None:
    """A value that cannot be used is refused with the name of the flag."""
    with pytest.raises(SettingsError, match=flags[0].partition("=")[0]):
        Settings.from_args(flags)


def test_the_resource_describes_this_picker() -> None:
    """Name, version and instance are set; OpenTelemetry's variables win."""
    assert resource({}, "1.0", "picker-0") == {
        "service.name": "kvist-epp",
        "service.version": "1.0",
        "service.instance.id": "picker-0",
    }
    more = {"OTEL_RESOURCE_ATTRIBUTES": "service.name=a,k8s.pod.name=p%2C1", "OTEL_SERVICE_NAME": "b"}
    found = resource(more, "1.0", "picker-0")
    assert (found["service.name"], found["k8s.pod.name"]) == ("b", "p,1")
