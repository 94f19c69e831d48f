"""Prices of accelerators for an hour, by name: from ``NAME=PRICE`` texts and from mappings. Pure."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvist_operator.errors import SpecError
from kvist_operator.hardware import known_accelerator


def parse_prices(texts: Iterable[str], field: str) -> dict[str, float]:
    """Return prices by name from texts such as ``H100-80GB=2.99``. Raises SpecError that names ``field``."""
    found: dict[str, float] = {}
    for text in texts:
        name, sign, number = text.partition("=")
        if not name or not sign:
            raise SpecError(f"{field} {text}", "write it like H100-80GB=2.99")
        found |= check_prices({name.strip(): number}, field)
    return found


def check_prices(prices: Mapping[Any, Any], field: str) -> dict[str, float]:
    """Return the prices as numbers. Raises SpecError for what is no name and no positive number."""
    found = {}
    for name, value in prices.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not isinstance(name, str) or not name or not 0 < number < math.inf or isinstance(value, bool):
            problem = f"{value!r} is not a price for an hour: write a positive number"
            raise SpecError(f"{field} {name}", problem)
        found[name] = number
    return found


def check_names(prices: Mapping[str, float], field: str) -> None:
    """Raise HardwareError for a name that is not in the table of accelerators."""
    for name in prices:
        known_accelerator(name, field)
