"""Pools as people write them, and what the operator says of each."""

import re
from typing import Final

import pytest
from tests.crd.cases import CRD, Case, cases, planned, refusal

from kvist_operator.errors import OperatorError

REMEDY: Final = (
    r"\b(use|set|write|leave|put|raise|add|give|begin|choose|increase|quote|needs|did you mean|would fit)\b"
    r"|one of|within|such as|like|at most"
)
"""What an error tells to do, or the values that there are."""


@pytest.mark.parametrize("case", cases("valid"), ids=lambda case: case.name)
def test_a_valid_pool_is_planned(case: Case) -> None:
    """Each has a plan, with arguments."""
    assert planned(case.pool).argv[0] == "serve"


@pytest.mark.parametrize("case", cases("invalid"), ids=lambda case: case.name)
def test_an_invalid_pool_is_explained(case: Case) -> None:
    """Each is refused with a message that names the field and the remedy, whatever the API server said."""
    try:
        said = refusal(planned(case.pool))
    except OperatorError as error:
        said = str(error)

    assert case.operator, "the file has no line '# operator: …'"
    assert case.operator in said


@pytest.mark.parametrize("case", cases("warned"), ids=lambda case: case.name)
def test_a_doubtful_pool_is_warned_of(case: Case) -> None:
    """Each is planned, and a warning or the reason of the verdict names the field and the remedy."""
    found = planned(case.pool)

    assert case.warns, "the file has no line '# warns: …'"
    assert [said for said in (*found.warnings, *found.doubts) if case.warns in said]


@pytest.mark.parametrize("case", cases("valid"), ids=lambda case: case.name)
def test_a_valid_pool_has_no_warning(case: Case) -> None:
    """A warning is for a mistake, so that it is read."""
    assert planned(case.pool).warnings == ()


def test_there_are_enough_of_them() -> None:
    """A hundred ways to get it wrong, and most of what a schema can know ends at the API server."""
    found = cases("invalid")

    assert len(found) + len(cases("warned")) >= 100
    assert sum(bool(case.api) for case in found) >= 55


def test_the_crd_is_small() -> None:
    """The CRD is far below the size limits of an annotation (256 KiB) and of a Helm release (1 MiB)."""
    assert CRD.stat().st_size < 96_000


@pytest.mark.parametrize("case", cases("invalid"), ids=lambda case: case.name)
def test_an_error_is_one_sentence_with_field_and_remedy(case: Case) -> None:
    """Each error begins with the path of the field, has one line, and says what to do."""
    try:
        said = f"spec.accelerator: {refusal(planned(case.pool))}"  # a refusal lacks memory, not a field
    except OperatorError as error:
        said = str(error)

    assert re.match(r"(spec|metadata|kind|apiVersion)([.\[][\w.\[\]/-]+)?: ", said)
    assert "\n" not in said
    assert re.search(REMEDY, said), said
