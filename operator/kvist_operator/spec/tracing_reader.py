"""Reader of ``spec.tracing``: the collector of OpenTelemetry traces. Pure."""

from typing import Final

from .fields import Fields
from .pool import TracingSpec

ENDPOINT: Final = r"http://[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?:[0-9]{1,5}"
ENDPOINT_LENGTH: Final = 300


def read_tracing(f: Fields | None) -> TracingSpec | None:
    """Return the fields; None without the section. Raises SpecError."""
    if f is None:
        return None
    hint = "the collector's OTLP port for gRPC, such as http://collector.observability:4317"
    like = "http://collector.observability:4317"
    return f.done(
        TracingSpec(
            endpoint=f.required("endpoint", hint, pattern=ENDPOINT, like=like, most=ENDPOINT_LENGTH),
            sampling_percent=f.number("samplingPercent", 10, low=0, high=100),
            engines=f.switch("engines", True),
        )
    )
