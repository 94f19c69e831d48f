"""``python -m tests.charts.generate``: writes what the chart takes from elsewhere; ``test_generated.py``
holds it to that.

The CRDs from crds/, that of presets made from that of pools; the operator's rules from
``kvist_operator.cluster.kinds``; dashboards and alerts from ``monitoring``, whose names the schema of the
values has; the table of values in README.md from the comments of values.yaml.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from monitoring import generate as monitoring
from tests.crd.presets import PRESETS, preset_crd

from kvist_operator.cluster.kinds import Rule, election, everywhere, namespaced

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "charts" / "kvist"
CRD: Final = CHART / "files" / "inferencepools.yaml"
PRESET_CRD: Final = CHART / "files" / PRESETS.name
RULES: Final = CHART / "templates" / "_rules.tpl"
README: Final = CHART / "README.md"
SCHEMA: Final = CHART / "values.schema.json"
VALUES: Final = CHART / "values.yaml"
BEGIN: Final = "<!-- values: written by `make docs` from values.yaml -->\n"
END: Final = "<!-- end of values -->\n"
_WORDS: Final = "# --"


def crd() -> str:
    """The CRD of pools, as it is."""
    return (ROOT / "crds" / "inferencepools.yaml").read_text()


def rules() -> str:
    """Two templates: rules of a Role, and of the ClusterRole."""
    head = "{{/* Written by `make docs` from kvist_operator.cluster.kinds, which says why. */}}\n"
    return head + "".join(
        f'{{{{- define "kvist.rules.{name}" }}}}\n{_listed(found)}{{{{- end }}}}\n'
        for name, found in (
            ("namespaced", namespaced()),
            ("everywhere", everywhere()),
            ("election", election()),
        )
    )


def _listed(found: list[Rule]) -> str:
    return "".join(
        f"- apiGroups: {json.dumps(rule['apiGroups'])}\n"
        f"  resources: [{', '.join(rule['resources'])}]\n"
        f"  verbs: [{', '.join(rule['verbs'])}]\n"
        for rule in found
    )


@dataclass(frozen=True)
class Value:
    """One of values.yaml that has a description."""

    path: str
    default: Any
    text: str

    def row(self) -> str:
        """Return the value's row of the table."""
        shown = json.dumps(self.default, ensure_ascii=False)
        return f"| `{self.path}` | `{shown}` | {self.text} |\n"


def described(text: str) -> Iterator[Value]:
    """Values with a comment ``# -- …`` in the line above them."""
    values = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    comment = ""
    for line in text.splitlines():
        word = line.strip()
        if word.startswith(_WORDS):
            comment = word.removeprefix(_WORDS).strip()
        elif word and not word.startswith(("#", "-")):
            depth, name = len(line) - len(line.lstrip()), word.partition(":")[0]
            path = [*((d, n) for d, n in path if d < depth), (depth, name)]
            if comment:
                keys = [n for _, n in path]
                yield Value(".".join(keys), _at(values, keys), comment)
            comment = ""


def _at(values: Any, keys: list[str]) -> Any:
    for key in keys:
        values = values[key]
    return values


def table() -> str:
    """Every value, in the order of the file."""
    rows = "".join(value.row() for value in described(VALUES.read_text()))
    return f"| value | default | |\n|---|---|---|\n{rows}"


def readme() -> str:
    """README.md with its table of values."""
    before, begin, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{README}: no line {BEGIN!r}"
    assert end, f"{README}: no line {END!r}"
    return f"{before}{begin}{table()}{end}{after}"


def schema() -> str:
    """values.schema.json with the names of the alerts that values may change."""
    found = json.loads(SCHEMA.read_text())
    rules = found["properties"]["monitoring"]["properties"]["rules"]["properties"]
    rules["alerts"]["propertyNames"]["enum"] = sorted(alert.name for alert in monitoring.alerts())
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


MADE: Final[dict[Path, Callable[[], str]]] = {
    CRD: crd,
    PRESETS: preset_crd,
    PRESET_CRD: preset_crd,
    RULES: rules,
    README: readme,
    SCHEMA: schema,
    **monitoring.MADE,
}

if __name__ == "__main__":
    for file, made in MADE.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(made())
