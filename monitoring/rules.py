"""The words of the alerts' definition, and the files that are made of it.

A threshold that users may change is marked in its expression by a comment, which Prometheus ignores::

    max by (namespace, pool, instance) (vllm:kv_cache_usage_perc{pool!=""}) > 0.85 # threshold

The chart replaces the number before the mark (``monitoring.rules.alerts``); without the chart the file is
used as it is.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any, Final

MARK: Final = "# threshold"
SEVERITIES: Final = ("critical", "warning")
RUNBOOK: Final = "docs/guides/alerts.md"
"""Page of the runbooks; each alert has a section with its name."""
INTERVAL: Final = "1m"
"""Time between two evaluations of a group."""
_THRESHOLD: Final = re.compile(rf"([\d.]+) {MARK}")
_RANGE: Final = re.compile(r"\[(\d+)([smhd])\]")
_OFFSET: Final = re.compile(r"\boffset (\d+)([smhd])\b")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """Series over time, and the alert that they must raise, or must not."""

    about: str
    """The situation, in a few words."""
    series: Mapping[str, str]
    """Values by series, in promtool's notation: one sample each ``step``."""
    at: str
    """Time of the check."""
    fires: Labels | None = None
    """Labels of the alert without name and severity; None: it must be silent."""
    summary: str = ""
    """Text of the firing alert's summary."""
    step: str = INTERVAL
    """Time between two samples, and between two evaluations."""


@dataclass(frozen=True, slots=True)
class Record:
    """A recording rule."""

    record: str
    expr: str
    about: str
    """What its value is."""

    def rule(self) -> dict[str, Any]:
        """Return the rule as Prometheus reads it."""
        return {"record": self.record, "expr": text_of(self.expr)}


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert, with its tests."""

    name: str
    severity: str
    expr: str
    wait: str
    """Time for which the expression must hold, Prometheus' ``for``."""
    summary: str
    description: str
    meaning: str
    """The condition in words, for the table of the guide."""
    cases: Sequence[Case] = field(default=())

    @property
    def threshold(self) -> str:
        """Return the number that users may change; empty: there is none."""
        found = _THRESHOLD.search(self.expr)
        return found[1] if found else ""

    @property
    def anchor(self) -> str:
        """Return the fragment of its section in the page of the runbooks."""
        return self.name.lower()

    def rule(self) -> dict[str, Any]:
        """Return the rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": text_of(self.expr),
            "for": self.wait,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": text_of(self.summary),
                "description": text_of(self.description),
                "runbook": f"{RUNBOOK}#{self.anchor}",
            },
        }


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated together, in order."""

    name: str
    records: Sequence[Record] = ()
    alerts: Sequence[Alert] = ()

    def document(self) -> dict[str, Any]:
        """Return the group as Prometheus reads it."""
        rules = [each.rule() for each in self.records] + [each.rule() for each in self.alerts]
        return {"name": self.name, "interval": INTERVAL, "rules": rules}


def text_of(text: str) -> str:
    """Return a text of the definition without its indentation."""
    return dedent(text).strip()


def rules_file(groups: Iterable[Group]) -> dict[str, Any]:
    """Return the content of a rules file of Prometheus."""
    return {"groups": [group.document() for group in groups]}


def summaries_only(group: Group) -> dict[str, Any]:
    """Return the rules that promtool tests: the summary is their only annotation, because promtool compares
    all annotations of an alert, and a case states the summary."""
    made = rules_file([group])
    for rule in made["groups"][0]["rules"]:
        if "alert" in rule:
            rule["annotations"] = {"summary": rule["annotations"]["summary"]}
    return made


def promtool_tests(group: Group, rules: str) -> dict[str, Any]:
    """Return promtool's test files by the time between two evaluations: each case of each alert, with the
    rules in the file ``rules``."""
    cases = [(alert, case) for alert in group.alerts for case in alert.cases]
    return {
        step: {
            "rule_files": [rules],
            "evaluation_interval": step,
            "tests": [_promtool_test(alert, case) for alert, case in cases if case.step == step],
        }
        for step in dict.fromkeys(case.step for _, case in cases)
    }


def _promtool_test(alert: Alert, case: Case) -> dict[str, Any]:
    expected: list[dict[str, Any]] = []
    if case.fires is not None:
        labels = {**case.fires, "severity": alert.severity}
        expected.append({"exp_labels": labels, "exp_annotations": {"summary": case.summary}})
    return {
        "name": f"{alert.name}: {case.about}",
        "interval": case.step,
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [{"eval_time": case.at, "alertname": alert.name, "exp_alerts": expected}],
    }


def quick(expr: str, factor: float) -> str:
    """Return an expression with its ranges and offsets divided by ``factor``, days by ten times as much, for
    tests with a real Prometheus."""
    expr = _RANGE.sub(lambda found: f"[{_divided(found, factor)}]", expr)
    return _OFFSET.sub(lambda found: f"offset {_divided(found, factor)}", expr)


def _divided(found: re.Match[str], factor: float) -> str:
    seconds = int(found[1]) * _SECONDS[found[2]] / factor / (10 if found[2] == "d" else 1)
    return f"{max(1000, round(seconds * 1000))}ms"
