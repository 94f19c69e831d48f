"""What the documents say is so."""

import ast
import re
from pathlib import Path

import yaml

from kvist_epp.admin.metrics import Metrics
from kvist_epp.settings import Settings
from kvist_epp.wire.limits import Limits
from kvist_epp.wire.tally import CONNECTION_ENDS, STREAM_ENDS
from tests import docs

DOCS = Path(__file__).parent.parent / "docs"


def test_the_envoy_guide_has_the_configuration_that_is_tested() -> None:
    """docs/guides/envoy.yaml is what kvist_sim.envoy writes, which the data-plane suite runs."""
    assert yaml.safe_load(docs.ENVOY.read_text()) == docs.envoy()


def test_the_metrics_guide_names_real_metrics() -> None:
    """Every kvist_epp_ name in the guide is one that the picker exports."""
    page, _ = Metrics(version="x").snapshot().write("")
    exported = {
        line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE kvist_epp_")
    }
    words = (
        (DOCS / "guides" / "metrics.md")
        .read_text()
        .replace("`", " ")
        .replace("(", " ")
        .replace("{", " ")
        .split()
    )
    named = {word for word in words if word.startswith("kvist_epp_")}
    assert named - exported == set()


def test_the_protocol_names_every_limit_and_its_default() -> None:
    """docs/protocol.md has a row with the default of each flag that bounds HTTP/2, and each reason."""
    text = (DOCS / "protocol.md").read_text()
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in text.splitlines()]
    told = {row[2]: row[3] for row in rows if len(row) > 4 and row[3].isdigit() and row[2]}
    flags = [name for name in _limits() if name != "max_message_bytes"]
    assert {f"--{name.replace('_', '-')}": f"{getattr(Settings(), name):g}" for name in flags} == {
        flag: f"{float(default):g}" for flag, default in told.items() if flag != "--max-message-bytes"
    }
    assert [reason for reason in (*CONNECTION_ENDS, *STREAM_ENDS) if f"`{reason}`" not in text] == []


def _limits() -> list[str]:
    """The settings that ``Limits.of`` reads."""

    class Read:
        def __init__(self) -> None:
            self.names: list[str] = []

        def __getattr__(self, name: str) -> float:
            self.names.append(name)
            return float(getattr(Settings(), name))

    read = Read()
    Limits.of(read)  # type: ignore[arg-type]  # it only asks for attributes
    return list(dict.fromkeys(read.names))


def test_every_test_that_the_protocol_names_exists() -> None:
    """Each rule of docs/protocol.md names a test, and each test it names is one of this suite."""
    text = (DOCS / "protocol.md").read_text()
    there = {
        node.name
        for file in Path(__file__).parent.rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = set(re.findall(r"`(test_\w+)`", text))
    rules = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert named - there == set()
    assert [line for line in rules if "`test_" not in line] == []
    assert [int(line.split("|")[1]) for line in rules] == list(range(1, len(rules) + 1))
