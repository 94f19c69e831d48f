"""Reference of the metrics of picker, model-header filter and operator, from what they export."""

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from tests.reference.markdown import code, page, prose, table

from kvist_epp.model_header.labeller import HeaderMetrics
from kvist_epp.telemetry.metrics import PickerMetrics
from kvist_operator.process.observability import Metrics

HEAD: Final = ("metric", "type", "labels", "meaning")
Row = tuple[str, str, str, str]


def metrics() -> str:
    """Return the page of all metrics."""
    return page(
        "Metrics",
        "kvist_epp.telemetry.metrics and kvist_operator.process.observability",
        "Each process also exports `process_…` (CPU time, memory, open files). What to watch and which "
        "alerts to set: "
        "[metrics guide](../guides/metrics.md).",
        "## Picker",
        "On `--metrics-port` (9090) of kvist-epp. The label `endpoint` is the `ip:port` of an engine; "
        "series of an endpoint are removed when it leaves.",
        table(HEAD, _rows(PickerMetrics(version="x").snapshot().collect())),
        "## Model-header filter",
        "On `--metrics-port` of kvist-epp with `--role=model-header`, besides the families of ports and "
        "certificates above.",
        table(HEAD, _own(HeaderMetrics(version="x").snapshot().collect())),
        "## Operator",
        "On `--metrics-port` (9095) of kvist-operator.",
        table(HEAD, _operator()),
    )


def _rows(families: Iterable[Metric]) -> Iterator[Row]:
    for family in families:
        if family.name.startswith("kvist_"):
            labels: Iterable[str] = getattr(family, "_labelnames", ())
            yield _row(family.name, family.type, labels, family.documentation)


def _own(families: Iterable[Metric]) -> Iterator[Row]:
    """Yield the rows that the picker does not have."""
    known = {family.name for family in PickerMetrics(version="x").snapshot().collect()}
    yield from _rows(family for family in families if family.name not in known)


def _operator() -> Iterator[Row]:
    found = Metrics()
    for metric in vars(found).values():
        if isinstance(metric, MetricWrapperBase):
            yield _row(metric._name, str(metric._type), metric._labelnames, metric._documentation)
    found.count_requests(dict)
    yield from _rows(family for family in found.registry.collect() if hasattr(family, "_labelnames"))


def _row(name: str, kind: str, labels: Iterable[str], text: str) -> Row:
    shown = f"{name}_total" if kind == "counter" else name
    return code(shown), kind, ", ".join(map(code, labels)), prose(text)
