"""Promises of the definition: panels that help, runbooks for every alert, quick rules."""

import json
import re

import pytest
from monitoring.dashboards import DASHBOARDS
from monitoring.generate import GUIDE, alerts
from monitoring.panels import Dashboard
from monitoring.rules import quick

PARTS = ("**Meaning.**", "**Causes", "**Steps.**", "**Fixed when**")


def test_every_alert_has_a_runbook() -> None:
    """docs/guides/alerts.md has a section for each alert, with meaning, causes, steps and how to see that it
    is fixed, and for no other."""
    sections = re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE)[1:]
    found = {section.split()[0]: section for section in sections}
    assert set(found) == {alert.name for alert in alerts()}
    lacking = [(name, part) for name, text in found.items() for part in PARTS if part not in text]
    assert lacking == []


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_every_panel_says_what_to_do(dashboard: Dashboard) -> None:
    """A dashboard has 8 to 14 panels; each has a title of its own, a unit, a description and queries."""
    panels = dashboard.panels
    assert 8 <= len(panels) <= 14
    assert len({panel.title for panel in panels}) == len(panels)
    assert [panel.title for panel in panels if len(panel.about.split()) < 5 or not panel.unit] == []
    assert [panel.title for panel in panels if not panel.queries] == []


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_the_json_is_complete(dashboard: Dashboard) -> None:
    """Panels do not overlap and have identifiers of their own; every query has the chosen data source; the
    variables are data source, namespace and pool; each runbook that a text names exists."""
    made = json.loads(dashboard.text())
    assert [each["name"] for each in made["templating"]["list"]] == ["datasource", "namespace", "pool"]
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    targets = [target for panel in panels for target in panel.get("targets", ())]
    assert {target["datasource"]["uid"] for target in targets} == {"${datasource}"}
    named = set(re.findall(r"\bKvist[A-Z]\w+", dashboard.text()))
    assert named <= {alert.name for alert in alerts()}


def test_a_quick_rule_has_shorter_windows() -> None:
    """Ranges and offsets are divided, days by ten times as much, none below a second; names and numbers
    stay."""
    assert quick("rate(x[10m]) / rate(x_30m[1h] offset 1d) > 0.5", 60) == (
        "rate(x[10000ms]) / rate(x_30m[60000ms] offset 144000ms) > 0.5"
    )
    assert quick("rate(x[5m])", 6000) == "rate(x[1000ms])"
