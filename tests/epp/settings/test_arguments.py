"""Times as Go writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.settings.arguments import parse_seconds

PARTS = st.lists(
    st.tuples(st.integers(0, 10_000), st.sampled_from(["h", "m", "s", "ms", "us", "ns"])), min_size=1
)
SIZES = {"h": 3600, "m": 60, "s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@given(PARTS)
def test_parts_add_up(parts: list[tuple[int, str]]) -> None:
    """Any parts in any order are the sum of what each is."""
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert parse_seconds(text) == pytest.approx(sum(number * SIZES[unit] for number, unit in parts))
    assert parse_seconds(f"-{text}") == -parse_seconds(text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_seconds(number: float) -> None:
    """A duration without a unit is in seconds."""
    assert parse_seconds(str(number)) == number


@given(st.text(alphabet="0123456789.hmsnuµ -+", max_size=12))
def test_anything_else_is_an_error_that_quotes_it(text: str) -> None:
    """A text is a time or refused, never something in between."""
    try:
        parse_seconds(text)
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017 - most texts are none, some are
