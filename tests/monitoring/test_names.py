"""No dashboard, rule or guide names a metric or a label that does not exist."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from monitoring.alerts import GROUPS
from monitoring.dashboards import DASHBOARDS
from monitoring.generate import ROOT
from monitoring.panels import Dashboard
from monitoring.promql import named
from tests.docs_runner.blocks import documents
from tests.monitoring import registries
from tests.monitoring.registries import Known

_NAME = re.compile(
    r"\b((?:kvist_epp|kvist_operator)_[a-z0-9_]+|vllm:[a-z]+_[a-z0-9_]+|envoy_[a-z]+_[a-z0-9_]+)(\{[^}]*\})?"
)
_LABEL = re.compile(r"([a-z_]+)\s*(?:=|!=|,|\}|$)")
_LEGEND = re.compile(r"\{\{(\w+)\}\}")
_TEMPLATE = re.compile(r"\$labels\.(\w+)")


@pytest.fixture(scope="session")
def known() -> Known:
    """Return every metric with its labels."""
    return asyncio.run(registries.known())


def faults(expr: str, known: Known) -> list[str]:
    """Return the metrics and labels of an expression that do not exist."""
    found = []
    for name, labels in named(expr).items():
        if name not in known:
            found.append(name)
        else:
            found += [f"{name}{{{label}}}" for label in sorted(labels - known[name])]
    return found


def test_rules_name_what_exists(known: Known) -> None:
    """Every metric and label of every alert and recording rule is exported by some program."""
    rules = {record.record: record.expr for group in GROUPS for record in group.records}
    rules |= {alert.name: alert.expr for group in GROUPS for alert in group.alerts}
    wrong = {name: faults(expr, known) for name, expr in rules.items()}
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_dashboards_name_what_exists(dashboard: Dashboard, known: Known) -> None:
    """Every metric and label of every panel is exported by some program, those of the variables too."""
    wrong = {panel.title: faults(expr, known) for panel, expr in dashboard.expressions()}
    assert {title: found for title, found in wrong.items() if found} == {}
    assert dashboard.series in known


def test_a_wrong_name_is_found(known: Known) -> None:
    """A name without its suffix, a label of another metric and a renamed one are faults."""
    assert faults("rate(kvist_epp_requests[5m])", known) == ["kvist_epp_requests"]
    assert faults("sum by (endpoint) (kvist_epp_requests_total)", known) == [
        "kvist_epp_requests_total{endpoint}"
    ]
    assert faults('vllm:gpu_cache_usage_perc{pool="p"} > 1', known) == ["vllm:gpu_cache_usage_perc"]


def kept(expr: str) -> frozenset[str]:
    """Return all labels that an expression names, or that its recorded series have."""
    recorded = registries.recorded()
    return frozenset().union(
        *(labels | recorded.get(name, frozenset()) for name, labels in named(expr).items())
    )


def test_texts_name_labels_that_are_there() -> None:
    """Summaries, descriptions and legends use only labels that their expressions keep."""
    wrong = [
        (alert.name, label)
        for group in GROUPS
        for alert in group.alerts
        for label in _TEMPLATE.findall(alert.summary + alert.description)
        if label not in kept(alert.expr)
    ]
    wrong += [
        (panel.title, label)
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for query in panel.queries
        for label in _LEGEND.findall(query.legend)
        if label not in kept(dashboard.chosen(query.expr))
    ]
    assert wrong == []


def mentioned(file: Path) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric that a document names, with the labels in braces behind it."""
    for name, braces in _NAME.findall(file.read_text()):
        if not name.endswith("_"):  # kvist_epp_http2_…
            yield name, set(_LABEL.findall(re.sub(r'"[^"]*"', "", braces.strip("{}"))))


@pytest.mark.parametrize("file", documents(), ids=lambda file: str(file.relative_to(ROOT)))
def test_documents_name_what_exists(file: Path, known: Known) -> None:
    """Every metric and label in a document exists; a histogram may be named without its suffix."""
    families = known | {
        name.removesuffix("_bucket"): labels for name, labels in known.items() if name.endswith("_bucket")
    }
    wrong = [name for name, _ in mentioned(file) if name not in families]
    wrong += [
        f"{name}{{{label}}}"
        for name, labels in mentioned(file)
        for label in labels - families.get(name, frozenset())
    ]
    assert wrong == []
