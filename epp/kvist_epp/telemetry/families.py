"""Metric families with at most one label, made when they are asked for."""

from collections.abc import Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)


def gauge(name: str, text: str, values: Mapping[str, float], *labels: str) -> Metric:
    """``values`` by label; by ``""`` where there is none."""
    return _filled(GaugeMetricFamily(f"kvist_epp_{name}", text, labels=labels), values, labels)


def counter(name: str, text: str, values: Mapping[str, float], *labels: str) -> Metric:
    """The same for what only grows."""
    return _filled(CounterMetricFamily(f"kvist_epp_{name}", text, labels=labels), values, labels)


def _filled(family: F, values: Mapping[str, float], labels: tuple[str, ...]) -> F:
    for label, value in values.items():
        family.add_metric([label] if labels else [], value)
    return family
