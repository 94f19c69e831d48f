"""The files that are made of dashboards and alerts, by path; ``tests.charts.generate`` writes them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import yaml

from monitoring.alerts import GROUPS
from monitoring.dashboards import DASHBOARDS
from monitoring.rules import RUNBOOK, SEVERITIES, Alert, rules_file

ROOT: Final = Path(__file__).parents[1]
FILES: Final = ROOT / "charts" / "kvist" / "files"
RULES: Final = FILES / "rules.yaml"
FOLDER: Final = FILES / "dashboards"
GUIDE: Final = ROOT / RUNBOOK
BEGIN: Final = "<!-- alerts: written by `make docs` from monitoring/alerts -->\n"
END: Final = "<!-- end of alerts -->\n"
_HEAD: Final = (
    "# Written by `make docs` from monitoring/alerts. Prometheus reads it as it is; the chart renders it.\n"
)


class _Text(yaml.SafeDumper):
    """Writes long texts as blocks."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Text.add_representer(str, _block)


def rules() -> str:
    """Return the rules file."""
    text = yaml.dump(rules_file(GROUPS), Dumper=_Text, sort_keys=False, width=1000, allow_unicode=True)
    return _HEAD + str(text)


def alerts() -> list[Alert]:
    """Return all alerts, in the order of the file."""
    return [alert for group in GROUPS for alert in group.alerts]


def table() -> str:
    """Return the guide's table: every alert, the critical ones first."""
    found = sorted(alerts(), key=lambda alert: SEVERITIES.index(alert.severity))
    cells = ((f"[{a.name}](#{a.anchor})", a.severity, a.meaning, a.wait, a.threshold) for a in found)
    rows = "".join(f"| {' | '.join(row)} |\n" for row in cells)
    return f"| alert | severity | fires when | for | threshold |\n|---|---|---|---|---|\n{rows}"


def guide() -> str:
    """Return the guide with its table of alerts."""
    before, begin, rest = GUIDE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{GUIDE}: no line {BEGIN!r}"
    assert end, f"{GUIDE}: no line {END!r}"
    return f"{before}{begin}{table()}{end}{after}"


MADE: Final[dict[Path, Callable[[], str]]] = {
    RULES: rules,
    GUIDE: guide,
    **{FOLDER / f"{each.name}.json": partial(type(each).text, each) for each in DASHBOARDS},
}
