"""Alerts, judged by Prometheus' own tools: each fires when it should, and is silent when it should be."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from monitoring.alerts import GROUPS
from monitoring.alerts.cache import CACHE
from monitoring.generate import RULES, alerts
from monitoring.rules import SEVERITIES, Alert, Group, promtool_tests, summaries_only
from tests.monitoring.binaries import promtool

SECONDS = 60


def checked(*words: str | Path, page: str = "") -> str:
    """Return what promtool says. Fails with its whole output if it finds a fault."""
    command = [str(promtool()), *map(str, words)]
    done = subprocess.run(command, input=page, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_rules_are_valid() -> None:
    """`promtool check rules` finds no fault in the file that the chart ships, templates included."""
    count = sum(len(group.records) + len(group.alerts) for group in GROUPS)
    assert f"SUCCESS: {count} rules found" in checked("check", "rules", RULES)


def run_cases(group: Group, folder: Path, change: Callable[[str], str] = str) -> str:
    """Return what `promtool test rules` says of all cases of a group, whose rules may be changed first."""
    (folder / "rules.yaml").write_text(change(yaml.safe_dump(summaries_only(group))))
    files = []
    for step, tests in promtool_tests(group, "rules.yaml").items():
        files.append(folder / f"{step}.yaml")
        files[-1].write_text(yaml.safe_dump(tests))
    return checked("test", "rules", *files)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_every_alert_fires_and_is_silent_as_its_cases_say(group: Group, tmp_path: Path) -> None:
    """`promtool test rules` agrees with every case: labels and summary of firing alerts, and silence."""
    assert "SUCCESS" in run_cases(group, tmp_path)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_every_alert_has_both_kinds_of_cases(alert: Alert) -> None:
    """Each alert has a case in which it fires and one in which it is silent, and words that help."""
    assert {case.fires is not None for case in alert.cases} == {True, False}
    assert alert.severity in SEVERITIES
    assert alert.expr.count("# threshold") <= 1
    assert len(alert.description.split()) > 10
    assert alert.name.startswith("Kvist")


def test_a_broken_rule_is_found(tmp_path: Path) -> None:
    """A rule whose threshold no case reaches fails its cases, so that cases are known to be looked at."""
    with pytest.raises(AssertionError, match="KvistKvCacheHigh: one of two engines"):
        run_cases(
            replace(CACHE, alerts=CACHE.alerts[:1]), tmp_path, lambda text: text.replace("0.85", "0.99")
        )
