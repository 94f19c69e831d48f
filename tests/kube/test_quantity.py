"""Kubernetes quantities."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity as official

from kvist_kube.quantity import parse_bytes, parse_quantity

SUFFIXES = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]


@given(st.decimals(0, 10**6, places=3), st.sampled_from(SUFFIXES))
def test_quantities_mean_what_the_official_client_says(number: Decimal, suffix: str) -> None:
    """Each suffix has the factor that the official client gives it."""
    assert parse_quantity(f"{number}{suffix}") == official(f"{number}{suffix}")


@pytest.mark.parametrize("text", ["", "Gi", "-1", "1 Gi", "1gi", "NaN", "1e3", ".5", "1.", "1KB"])
def test_other_texts_are_rejected(text: str) -> None:
    """Signs, exponents and unknown suffixes are errors that name the text."""
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


def test_bytes_are_whole() -> None:
    """Bytes are rounded down; a suffix for fractions is an error."""
    assert (parse_bytes("1.5Ki"), parse_bytes("0.3")) == (1536, 0)
    with pytest.raises(ValueError, match="'100m' is not a quantity of bytes"):
        parse_bytes("100m")
