"""Promises of the dashboards and alerts as the chart renders them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitoring.dashboards import DASHBOARDS
from monitoring.generate import FOLDER, RULES, alerts
from tests.charts.generate import CHART
from tests.charts.helm import NAMESPACE, Helm, HelmError, Json, of_kind, settings
from tests.monitoring.test_alerts import checked

API = ("--api-versions", "monitoring.coreos.com/v1/PrometheusRule")
ENABLED = {"monitoring__rules__mode": "Enabled", "monitoring__dashboards__mode": "Enabled"}


def rule_of(objects: list[Json]) -> Json:
    """Return the only PrometheusRule."""
    [found] = of_kind(objects, "PrometheusRule")
    return found


def alerts_of(objects: list[Json]) -> dict[str, Json]:
    """Return the alerts of the only PrometheusRule, by name."""
    rules = [rule for group in rule_of(objects)["spec"]["groups"] for rule in group["rules"]]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def made(helm: Helm, *words: str, **values: Any) -> list[Json]:
    """Return the objects with monitoring on."""
    return helm.template(*settings(**{**ENABLED, **values}), *words)


def test_the_rules_are_those_of_the_file(helm: Helm) -> None:
    """Without values the PrometheusRule has the groups of files/rules.yaml."""
    assert rule_of(made(helm))["spec"] == yaml.safe_load(RULES.read_text())


def test_both_need_their_api(helm4: Helm) -> None:
    """Auto makes rules and dashboards where the cluster has the API; Enabled and Disabled do not look."""
    found = {}
    for mode in ("Auto", "Enabled", "Disabled"):
        for words in ((), API):
            values = settings(monitoring__rules__mode=mode, monitoring__dashboards__mode=mode)
            objects = helm4.template(*values, *words)
            found[mode, bool(words)] = [len(of_kind(objects, k)) for k in ("PrometheusRule", "ConfigMap")]
    none, both = [0, 0], [1, len(DASHBOARDS)]
    assert found == {
        ("Auto", False): none,
        ("Auto", True): both,
        ("Enabled", False): both,
        ("Enabled", True): both,
        ("Disabled", False): none,
        ("Disabled", True): none,
    }


def test_an_alert_can_be_changed(helm: Helm, tmp_path: Path) -> None:
    """Threshold, duration, severity, labels and the runbooks' URL are those of the values; a disabled alert
    is left out, the others stay, and promtool accepts the result."""
    objects = made(
        helm,
        monitoring__rules__runbookUrl="https://wiki.example.com/alerts",
        monitoring__rules__alertLabels={"team": "search", "severity": "ignored"},
        monitoring__rules__alerts={
            "KvistKvCacheHigh": {"threshold": 0.9, "for": "20m", "severity": "info"},
            "KvistHitRateFell": {"enabled": False},
        },
    )
    found = alerts_of(objects)
    assert set(found) == {alert.name for alert in alerts()} - {"KvistHitRateFell"}
    high, critical = found["KvistKvCacheHigh"], found["KvistKvCacheCritical"]
    assert high["expr"].endswith("> 0.9 # threshold")
    assert (high["for"], high["labels"]) == ("20m", {"severity": "info", "team": "search"})
    assert high["annotations"]["runbook_url"] == "https://wiki.example.com/alerts#kvistkvcachehigh"
    assert critical["expr"].endswith("> 0.95 # threshold")
    assert critical["labels"] == {"severity": "critical", "team": "search"}
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(rule_of(objects)["spec"]))
    checked("check", "rules", rules)


def test_every_threshold_can_be_changed(helm4: Helm) -> None:
    """A threshold replaces the number of its alert and nothing else, for every alert that has one."""
    known = {alert.name: alert for alert in alerts()}
    changes = {name: {"threshold": 123.5} for name, alert in known.items() if alert.threshold}
    found = alerts_of(made(helm4, monitoring__rules__alerts=changes))
    plain = alerts_of(made(helm4))
    for name, alert in known.items():
        before = plain[name]["expr"]
        expected = before.replace(f"{alert.threshold} # threshold", "123.5 # threshold")
        assert found[name]["expr"] == expected, name
        assert (before != expected) is bool(alert.threshold)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"monitoring__rules__alerts": {"KvistKvCacheHi": {"enabled": False}}}, "KvistKvCacheHi"),
        ({"monitoring__rules__alerts": {"KvistPickerDown": {"threshold": 1}}}, "has no threshold"),
        ({"monitoring__rules__alerts": {"KvistPickerDown": {"for": "soon"}}}, "for"),
        ({"monitoring__rules__mode": "On"}, "mode"),
        ({"monitoring__rules__runbookUrl": "wiki/alerts"}, "runbookUrl"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_their_name(helm: Helm, values: Json, said: str) -> None:
    """An unknown alert, a threshold that does not exist and a malformed duration fail before anything is
    made."""
    with pytest.raises(HelmError) as refused:
        made(helm, **values)
    assert said in str(refused.value)


def test_the_dashboards_are_those_of_the_files(helm: Helm) -> None:
    """Each ConfigMap has one dashboard, byte by byte, with label and folder for Grafana's sidecar, in the
    namespace that is asked for."""
    for namespace in ("", "grafana"):
        objects = made(helm, monitoring__dashboards__namespace=namespace)
        found = {each["metadata"]["name"]: each for each in of_kind(objects, "ConfigMap")}
        assert sorted(found) == sorted(f"kvist-{each.name}" for each in DASHBOARDS)
        for each in found.values():
            metadata = each["metadata"]
            assert metadata["namespace"] == (namespace or NAMESPACE)
            assert metadata["labels"]["grafana_dashboard"] == "1"
            assert metadata["annotations"] == {"grafana_folder": "kvist"}
            [(name, text)] = each["data"].items()
            assert text == (FOLDER / name.removeprefix("kvist-")).read_text()
            assert json.loads(text)["uid"] == metadata["name"]


def test_other_labels_replace_the_usual_ones(helm4: Helm) -> None:
    """Values may change the sidecar's label and annotation, and remove the folder."""
    objects = made(
        helm4,
        monitoring__dashboards__labels={"grafana_dashboard": None, "dashboards": "main"},
        monitoring__dashboards__annotations={"grafana_folder": None},
    )
    metadata = of_kind(objects, "ConfigMap")[0]["metadata"]
    assert metadata["labels"]["dashboards"] == "main"
    assert "grafana_dashboard" not in metadata["labels"]
    assert "annotations" not in metadata


def test_the_chart_has_no_file_that_the_definition_does_not_make() -> None:
    """A dashboard that was removed or renamed leaves no file behind."""
    assert {file.stem for file in (CHART / "files" / "dashboards").iterdir()} == {
        each.name for each in DASHBOARDS
    }
