"""Amounts as Kubernetes writes them: ``1Gi``, ``512M``, ``5k``."""

import re
from typing import Final

_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?)([kMGT]?|[KMGT]i)B?")


def number(text: object) -> int:
    """The amount, a ``B`` for bytes behind it or not. Raises ValueError."""
    found = _AMOUNT.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is no amount, such as 1Gi")
    return int(float(found[1]) * _UNITS[found[2]])
