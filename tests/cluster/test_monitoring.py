"""Dashboards and alerts on a real cluster: every expression is evaluated by a real Prometheus that scrapes
engines, pickers, Envoy and the operator."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from monitoring.alerts import GROUPS
from monitoring.dashboards import DASHBOARDS
from monitoring.promql import selectors
from monitoring.rules import quick
from tests.cluster.cluster import Cluster
from tests.cluster.observed import Observed, observed
from tests.cluster.prometheus import QUICK
from tests.monitoring.test_alerts import checked

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]
Json = dict[str, Any]
GUIDE_JOB = "kvist-pools"
NO_RESPONSES = "responses do not pass the pickers of a pool: its Envoy sends the access log"
NO_FAULT = "counts faults, of which a healthy pool has none"
EMPTY_PANELS: dict[tuple[str, str, str], str] = {
    ("picker", "Predicted time to first token", "observed p90"): NO_RESPONSES,
    ("picker", "Observed over predicted", "median"): NO_RESPONSES,
    ("picker", "Wait in the queue", "p90 {{outcome}}"): "no request has to wait under this load",
    ("picker", "Errors of gateways", "protocol {{kind}}"): NO_FAULT,
    ("picker", "Errors of gateways", "TLS {{reason}}"): NO_FAULT,
    ("endpoint", "Served elsewhere", "{{endpoint}}"): NO_FAULT,
}
"""Queries of panels by dashboard, title and legend, and why they return nothing here."""
_REFUSED = 'outcome=~"rejected-.+|evicted-.+",outcome!="rejected-context-cancelled"'
EMPTY_SERIES = {
    "kvist_epp_protocol_errors_total": NO_FAULT,
    f"kvist_epp_requests_total{{{_REFUSED}}}": NO_FAULT,
    "kvist_epp_served_elsewhere_total": NO_FAULT,
}
"""Series of alerts, and why there are none here."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Observed]:
    """A pool under observation that has served for a while."""
    folder = tmp_path_factory.mktemp("prometheus")
    async with observed(cluster, folder) as made, made.twig.load() as load:
        await load.until(150)
        await asyncio.sleep(5)  # more than the shortest window of a rule
        yield made


async def test_all_targets_are_scraped_with_the_labels_of_their_pool(seen: Observed) -> None:
    """Two engines, two pickers, two Envoys and the operator are up; the pickers' own label ``endpoint`` is
    not renamed, and the operator's figures have the namespace of their pool."""
    targets = [each for each in await seen.prometheus.targets() if each["scrapePool"] != GUIDE_JOB]
    assert [(each["health"], each["lastError"]) for each in targets] == [("up", "")] * 7
    assert await seen.prometheus.query("count by (endpoint) (kvist_epp_index_trust)")
    assert await seen.prometheus.query('kvist_epp_index_trust{exported_endpoint!=""}') == []
    [replicas] = await seen.prometheus.query("kvist_operator_pool_replicas")
    assert replicas["metric"].items() >= seen.labels.items()


async def test_the_guide_s_scrape_configuration_finds_the_same_targets(seen: Observed) -> None:
    """A Prometheus without PodMonitors scrapes the same pages of a pool, and gives them the same labels."""
    found: dict[bool, set[tuple[str, ...]]] = {True: set(), False: set()}
    for target in await seen.prometheus.targets():
        labels = target["labels"]
        if labels.get("pool"):
            row = (target["scrapeUrl"], *(labels[name] for name in ("namespace", "pool", "pod", "container")))
            found[target["scrapePool"] == GUIDE_JOB].add(row)
    assert found[True] == found[False]
    assert len(found[True]) == 6


@pytest.mark.parametrize("component", ["picker", "operator"])
async def test_pages_follow_the_conventions_of_prometheus(seen: Observed, component: str) -> None:
    """`promtool check metrics` finds nothing on the pages of a running picker and operator."""
    targets = await seen.prometheus.targets()
    [url, *_] = [each["scrapeUrl"] for each in targets if each["labels"]["container"] == component]
    async with seen.twig.cluster.http() as http, http.get(url) as response:
        page = await response.text()
    assert page.count("# HELP kvist_") > 10
    assert await asyncio.to_thread(checked, "check", "metrics", page=page) == ""


async def has_data(seen: Observed, expr: str) -> bool:
    """Return whether an expression has a value other than NaN."""
    return any(each["value"][1] != "NaN" for each in await seen.prometheus.query(expr))


async def test_every_panel_has_data_or_a_reason_for_none(seen: Observed) -> None:
    """Every query of every panel returns data, or is in the table of reasons and returns none."""
    empty = set()
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query in panel.queries:
                expr = quick(dashboard.chosen(query.expr), QUICK).replace("$__rate_interval", "5s")
                for name, value in seen.labels.items():
                    expr = expr.replace(f"${name}", value)
                if not await has_data(seen, expr):
                    empty.add((dashboard.name, panel.title, query.legend))
    assert empty == set(EMPTY_PANELS)


async def test_every_series_of_every_alert_exists_or_has_a_reason(seen: Observed) -> None:
    """Every alert and recording rule can be evaluated; each series that it selects is there, or is in the
    table of reasons and is not, so that no alert is silent because its metric does not exist."""
    expressions = [record.expr for group in GROUPS for record in group.records]
    expressions += [alert.expr for group in GROUPS for alert in group.alerts]
    empty = set()
    for expr in expressions:
        await seen.prometheus.query(quick(expr, QUICK))
        empty |= {each for each in selectors(expr) if not await has_data(seen, each)}
    assert empty == set(EMPTY_SERIES)


async def test_a_healthy_pool_raises_no_alert(seen: Observed) -> None:
    """No alert fires on a pool that serves a steady load."""
    assert await seen.prometheus.query('ALERTS{alertstate="firing"}') == []
