"""Inputs that the fuzzers once found, and their seeds, in plain Python."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.targets import TARGETS

REGRESSIONS = Path(__file__).parent / "regressions"


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_was_found_pass(name: str) -> None:
    """Every seed passes, and so does each input that once failed."""
    found = [path.read_bytes() for path in sorted((REGRESSIONS / name).glob("*"))]
    for text in (*TARGETS[name].seeds, *found):
        TARGETS[name].run(text)


@pytest.mark.parametrize("name", TARGETS)
@given(st.binary(max_size=400))
def test_any_bytes_pass(name: str, data: bytes) -> None:
    """A short random walk through each target, without a coverage-guided fuzzer's help."""
    TARGETS[name].run(data)
