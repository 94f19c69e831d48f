"""Every metric of a cluster with kvist, with its labels, from the programs themselves.

Picker and operator: their registries. Engines: the page of the simulated engine, whose names are vLLM's
(tests/engine compares them with a real one). Envoy: the page of a real one with the filter.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from monitoring.alerts import GROUPS
from prometheus_client.core import Metric
from tests.epp.kvevents import recorded_tiers

from kvist_epp.model_header.labeller import HeaderMetrics
from kvist_epp.telemetry.metrics import PickerMetrics
from kvist_operator.process.observability import Metrics as OperatorMetrics
from kvist_sim.engine.metrics import Metrics as EngineMetrics
from kvist_sim.envoy import Envoy, Gateway, config

Known = dict[str, frozenset[str]]
TARGET: Final = frozenset({"namespace", "pool", "pod", "container", "instance", "job"})
"""Labels that Prometheus gives every series: the usual ones, and ``pool`` by relabelling."""
POOL: Final = frozenset({"namespace", "pool"})
_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="')
_SUFFIXES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "counter": {"_total": ()},
    "histogram": {"_bucket": ("le",), "_sum": (), "_count": ()},
    "gauge": {"": ()},
}


def _series(families: Iterable[Metric], labels: Mapping[str, Iterable[str]]) -> Known:
    """Return the labels of each series; ``labels``: those of families without samples."""
    found: Known = {}
    for family in families:
        own = set(labels.get(family.name, ()))
        for sample in family.samples:
            own |= set(sample.labels)
        for suffix, more in _SUFFIXES[family.type].items():
            found[f"{family.name}{suffix}"] = frozenset({*own, *more} - ({"le"} - set(more)))
    return found


def _declared(families: Iterable[Any]) -> dict[str, Iterable[str]]:
    """Return the label names that families, or metrics of prometheus_client, were made with."""
    return {each.name: each._labelnames for each in families if hasattr(each, "_labelnames")}


def picker() -> Known:
    """Return the metrics of pickers and of the model header."""
    metrics = PickerMetrics(version="x")
    families = [*metrics.snapshot().collect(), *HeaderMetrics(version="x").snapshot().collect()]
    return _series(families, _declared(families))


def operator() -> Known:
    """Return the metrics of the operator."""
    metrics = OperatorMetrics()
    metrics.count_requests(lambda: {"GET 200": 1})
    families = list(metrics.registry.collect())
    declared = {
        each._name: each._labelnames for each in vars(metrics).values() if hasattr(each, "_labelnames")
    }
    return _series(families, declared | _declared(families))


def engine() -> Known:
    """Return the metrics of engines, with those that a real one with slower KV tiers has besides."""
    metrics = EngineMetrics("m", 4096, {"block_size": "16", "num_gpu_blocks": "100"})
    metrics.rank(0)
    tiers = recorded_tiers.recorded("self-describing").steps[-1].metrics
    return series_of(tiers) | series_of(metrics.page().decode())


async def envoy() -> Known:
    """Return the metrics of an Envoy with the filter and one endpoint."""
    gateway = Gateway(endpoints=["127.0.0.1:1"], picker="127.0.0.1:1")
    async with Envoy(config(gateway)) as running:
        return series_of(await running.metrics())


def series_of(text: str) -> Known:
    """Return the series of a page under the names that are written there (a parser adds ``_total``)."""
    found: dict[str, set[str]] = {}
    for name, labels in _SAMPLE.findall(text):
        found.setdefault(name, set()).update(_LABEL.findall(labels))
    return {name: frozenset(labels) for name, labels in found.items()}


def recorded() -> Known:
    """Return what the recording rules make, and the series of alerts."""
    made = {record.record: POOL for group in GROUPS for record in group.records}
    return made | {"ALERTS": frozenset({"alertname", "alertstate", "severity"}) | POOL}


async def known() -> Known:
    """Return all of them, with the labels that Prometheus adds."""
    scraped = {**picker(), **operator(), **engine(), **await envoy()}
    return {name: labels | TARGET for name, labels in scraped.items()} | recorded()
