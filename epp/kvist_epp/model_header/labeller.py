"""From a request to the header that names its model: the whole policy of the role, and its metrics.

The body is read once, by msgspec, which skips everything that is not asked for. This costs less than a search
for the key that tracks nesting, and judges as engines do: text that is not JSON has no model, and of two keys
the last one counts. No name of a model is a metric label: clients choose those.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import msgspec

from kvist_epp.extproc.pick_request import PickRequest, PickResult
from kvist_epp.extproc.rewrite import requested_model
from kvist_epp.http2.limits import PortStats
from kvist_epp.names import BASE_MODEL_HEADER, MODEL_HEADER, REQUEST_ID_HEADER
from kvist_epp.telemetry.counters import Histogram
from kvist_epp.telemetry.families import (
    Family,
    certificate_families,
    counter,
    gauge,
    histogram,
    port_families,
)
from kvist_epp.telemetry.metrics import MetricsPage
from kvist_epp.telemetry.request_log import RequestLine, RequestLog

LABELS: Final = (MODEL_HEADER, BASE_MODEL_HEADER)
"""Headers that no client may set."""
MAX_NAME_BYTES: Final = 1024
"""Longest name, in UTF-8, that is put into a header: gateways bound all headers together, Envoy at 60 KiB."""
OUTCOMES: Final = ("named", "no-body", "no-model", "unusable", "partial")
"""``named``: the header was set. ``unusable``: no header can carry the name. ``partial``: the gateway showed
only the first part of the body."""

_FIRST_BYTES: Final = frozenset(b"{\xef\xfe\xff\x00")
"""First bytes of a JSON object in an encoding that engines read: a brace, or the bytes that UTF-16 and UTF-32
put before one."""
_SPACE: Final = b" \t\r\n"
_INSPECTED_BYTES: Final = 64


class _Body(msgspec.Struct):
    model: Any = None


_decoder: Final = msgspec.json.Decoder(_Body)


def model_of(body: bytes) -> object:
    """Return the top-level ``model`` of a JSON object, of any type; ``None`` if there is none."""
    try:
        return _decoder.decode(body).model
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return _model_of_lax_json(body)


def _model_of_lax_json(body: bytes) -> object:
    """Parse with Python's ``json`` as engines do, which accepts NaN, UTF-16 and more; skip uploads."""
    first = body[:_INSPECTED_BYTES].lstrip(_SPACE)[:1] or body[:1]
    if not _FIRST_BYTES.issuperset(first) and len(body) > _INSPECTED_BYTES:
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found.get("model") if isinstance(found, dict) else None


def header_value(name: object) -> str | None:
    """Return ``name`` as a header's latin-1 text, or ``None`` if a header cannot carry it unchanged.

    A control character would end the header or be refused, a space at either end would be lost.
    """
    if not isinstance(name, str) or not name or name != name.strip():
        return None
    try:
        encoded = name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return None
    if len(encoded) > MAX_NAME_BYTES or any(byte < 0x20 or byte == 0x7F for byte in encoded):
        return None
    return encoded.decode("latin-1")


@dataclass(slots=True)
class HeaderMetrics:
    """Metrics of the role."""

    version: str = ""
    certificate: Callable[[], Mapping[str, float]] = dict
    log_dropped: Callable[[], int] = int
    ports: dict[str, PortStats] = field(default_factory=dict)
    """Statistics of the gRPC ports by name."""
    requests: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    forged: int = 0
    """Requests whose client had set one of the headers."""
    find: Histogram = field(default_factory=Histogram)
    protocol_errors: Counter[str] = field(default_factory=Counter)

    def count(self, outcome: str, seconds: float, *, forged: bool) -> None:
        """Count one answered request."""
        self.requests[outcome] += 1
        self.forged += forged
        self.find.observe(seconds)

    def snapshot(self) -> MetricsPage:
        """Return the page of all families."""
        return MetricsPage(self._families())

    def _families(self) -> Iterable[Family]:
        yield gauge("build_info", "Version of this filter; always 1.", {self.version: 1}, "version")
        yield counter(
            "model_header_requests",
            "Number of requests, by outcome: named, or why not.",
            self.requests,
            "outcome",
        )
        text = "Number of requests whose client had set one of the headers, which were removed."
        yield counter("model_header_forged", text, self.forged)
        yield histogram(
            "model_header_seconds", "Seconds spent on finding the model in a request body.", self.find
        )
        text = "Number of gateway messages that could not be decoded, by kind."
        yield counter("protocol_errors", text, self.protocol_errors, "kind")
        yield from port_families(self.ports)
        yield from certificate_families(self.certificate())
        text = "Number of log lines that were dropped because stderr was slow."
        yield counter("log_lines_dropped", text, self.log_dropped())


class Labeller:
    """Answers each request with its header, counts it and writes its log line."""

    def __init__(self, base_models: Mapping[str, str], metrics: HeaderMetrics, log: RequestLog) -> None:
        """``base_models`` maps each adapter to its base model."""
        self._bases = {base: base for base in base_models.values()} | dict(base_models)
        self._metrics = metrics
        self._log = log

    def decide(self, request: PickRequest) -> PickResult:
        """Return the headers to set, and those of the client's to remove. Rejects no request."""
        begun = perf_counter()
        name, outcome = _requested_name(request)
        labels = self._labels(name)
        forged = tuple([label for label in LABELS if label in request.headers])
        remove = tuple([label for label in forged if label not in labels]) if forged else ()
        seconds = perf_counter() - begun
        self._metrics.count(outcome, seconds, forged=bool(forged))
        if self._log.enabled:
            self._log.write(_log_line(request, name, outcome, seconds))
        return PickResult((), tuple(labels.items()), remove=remove)

    def _labels(self, name: str | None) -> dict[str, str]:
        if name is None or (value := header_value(name)) is None:
            return {}
        base = header_value(self._bases.get(name))
        return {MODEL_HEADER: value} if base is None else {MODEL_HEADER: value, BASE_MODEL_HEADER: base}


def _requested_name(request: PickRequest) -> tuple[str | None, str]:
    """Return the model that the engine will be asked for, if a header can carry it, and the outcome.

    The name that a rewrite header demands takes precedence over the body's, as in the picker behind.
    """
    if request.partial:
        return None, "partial"  # a later key would win, and the rest of the body was not seen
    if not request.body:
        return None, "no-body"
    found = model_of(request.body)
    if found is None:
        return None, "no-model"
    name = requested_model(request.headers) or found
    return (str(name), "named") if header_value(name) is not None else (None, "unusable")


def _log_line(request: PickRequest, name: str | None, outcome: str, seconds: float) -> RequestLine:
    return RequestLine(
        id=request.headers.get(REQUEST_ID_HEADER, ""),
        session="",
        path=request.path,
        kind="model-header",
        outcome=outcome,
        model=name,
        us={"find": round(seconds * 1e6)},
    )
