"""The documents agree with the code."""

import ast
import re
from pathlib import Path

import yaml

from kvist_epp.http2.limits import CONNECTION_ENDS, STREAM_ENDS, Limits
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry.metrics import PickerMetrics
from tests import docs
from tests.docs_runner.blocks import documents

DOCS = Path(__file__).parent.parent / "docs"


def test_the_documents_have_the_configurations_that_are_tested() -> None:
    """All three files are written by kvist_sim.envoy; the data-plane suite runs them (test_attach.py)."""
    assert yaml.safe_load(docs.ENVOY.read_text()) == docs.envoy()
    assert yaml.safe_load(docs.ORIGINAL_DST.read_text()) == docs.original_dst()
    assert yaml.safe_load(docs.LAPTOP.read_text()) == docs.laptop()


def test_the_architecture_names_every_package() -> None:
    """The table of packages is up to date: `make docs` writes it from their docstrings."""
    page = docs.ARCHITECTURE.read_text()
    assert docs.with_packages(page) == page
    assert "[`kvist_epp.index.tree`](../epp/kvist_epp/index/tree/__init__.py)" in page


def test_every_link_leads_somewhere() -> None:
    """Files and headings that documents link to exist."""
    wrong = [
        f"{file.name}: {link}"
        for file in {*documents(), *DOCS.rglob("*.md")}
        for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text())
        if not link.startswith("http") and not _leads(file, link)
    ]
    assert wrong == []


def _leads(file: Path, link: str) -> bool:
    path, _, heading = link.partition("#")
    target = (file.parent / path).resolve() if path else file
    return target.exists() and (not heading or heading in _headings(target))


def _headings(file: Path) -> set[str]:
    """Return the headings in the form that links use."""
    titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_metrics_guide_names_every_metric_and_no_other() -> None:
    """Every kvist_epp_ name in the guide is exported by the picker, and each exported one is in the guide."""
    page, _ = PickerMetrics(version="x").snapshot().format("")
    exported = {
        line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE kvist_epp_")
    }
    named = set(re.findall(r"kvist_epp_\w+", (DOCS / "guides" / "metrics.md").read_text()))
    named = {re.sub("_(bucket|count|sum)$", "", name) for name in named}
    assert named - exported == set()
    assert exported - named == set()


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
    """Return the settings that ``Limits.of`` reads."""

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
