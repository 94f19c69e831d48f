"""The statements of docs/guides/troubleshooting.md hold, and the page is complete."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.operator.broken import gallery

import kvist_operator
from kvist_operator.errors import OperatorError
from kvist_operator.manifests import engine_clients, termination_log, tokenizer
from kvist_operator.manifests.object_names import ObjectNames
from kvist_operator.status.advice import GUIDE as NAMED
from kvist_operator.status.advice import RULES
from kvist_operator.status.diagnosis import ORDER
from kvist_operator.status.reasons import CLUSTER, PODS, REASONS, SERVING, SPEC, Reason
from kvist_operator.status.termination_message import SAYINGS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / NAMED).read_text()
PACKAGE = Path(kvist_operator.__file__).parent


def rows() -> dict[str, list[str]]:
    """Return the cells of each reason, from all tables of reasons."""
    tables = GUIDE.partition("## Reasons")[2].partition("## Termination messages")[0]
    found = [line.strip("| ").split(" | ") for line in tables.splitlines() if line.startswith("| `")]
    return {reason: cells for cells in found for reason in re.findall(r"`(\w+)`", cells[0])}


def errors(kind: type[OperatorError] = OperatorError) -> Iterator[str]:
    """Yield the reasons of all subclasses of an exception."""
    for below in kind.__subclasses__():
        yield below.reason
        yield from errors(below)


def literals() -> Iterator[str]:
    """Yield the reasons that are literals where conditions, notes and troubles are constructed."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                index = {"Condition": 2, "Note": 1, "Trouble": 0, "PodFinding": 0}.get(node.func.id)
                if index is not None and len(node.args) > index:
                    yield from _texts(node.args[index])


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield the text constants of an expression, also those of a conditional."""
    parts = (node.body, node.orelse) if isinstance(node, ast.IfExp) else (node,)
    yield from (p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str))


OTHERS = {
    *("Scaling", "RollingOut", "NoTokenizer", tokenizer.UNREADABLE),
    *(engine_clients.UNKNOWN, engine_clients.UNSCRAPED),
}
"""Given by name."""


def test_every_reason_has_a_row_and_every_row_a_reason() -> None:
    """Every reason of a condition has a row in the guide, and every row is a reason."""
    known = {*errors(), *literals(), *ORDER, *OTHERS, *(saying.reason for saying in SAYINGS)}

    assert known - set(rows()) == set()
    assert set(rows()) - known == set()


def test_every_row_says_what_it_means_and_what_to_do() -> None:
    """Every row has three cells, none of them empty."""
    assert [reason for reason, cells in rows().items() if len(cells) != 3 or not all(cells)] == []


def test_the_guide_says_what_kvist_why_says() -> None:
    """Meaning and remedy of each reason are those of the table that ``kvist why`` reads; none is in it twice,
    but the one of the operator's own log."""
    assert {reason: Reason(*cells[1:]) for reason, cells in rows().items()} == dict(REASONS)
    tables = (SPEC, CLUSTER, PODS, SERVING)
    assert sum(map(len, tables)) - len(REASONS) == len({"CannotStart"})


def test_every_kind_of_problem_has_its_place_in_the_order() -> None:
    """Every reason of a pod's trouble is in the order of diagnosis."""
    assert {saying.reason for saying in SAYINGS} - set(ORDER) == set()
    assert {broken.reason for broken in gallery()} - set(ORDER) <= {"PickerUnavailable", "EnvoyUnavailable"}


def test_the_example_is_the_message() -> None:
    """The example equals the condition's message, except for line breaks and counts."""
    [example] = re.findall(r"message\}'\n(.*?)```", GUIDE, re.DOTALL)
    [said] = [broken.message for broken in gallery() if broken.name == "cache-too-small"]

    assert " ".join(example.split()).partition("; ")[2] == said.partition("; ")[2]


def test_the_rest_of_the_guide_names_what_there_is() -> None:
    """The guide has a row for each rule of advice, the ConfigMap, its variables and the section that advice
    refers to."""
    heads = re.findall(r"^\| `([A-Z][\w ]*)` \|", GUIDE.partition("## Advice")[2], re.MULTILINE)

    assert len(heads) == len(RULES)
    assert ObjectNames("NAME", "").engine_settings in GUIDE
    assert [
        name for name in (*termination_log.VARIABLES, termination_log.LEVEL) if f"`{name}`" not in GUIDE
    ] == []
    assert "## Where prompts diverge" in GUIDE
