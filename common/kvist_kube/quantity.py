"""Parses Kubernetes quantities. Pure.

The official client has ``kubernetes.utils.quantity.parse_quantity``. Importing it takes 0.6 seconds, because
it imports every model of the API, and it accepts negative numbers and ``NaN``; so it is not used here.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

_UNITS: Final[Mapping[str, Decimal]] = {
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("n", "u", "m", "", "k", "M"), -3)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("GTPE", 3)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}
_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]i|[numkMGTPE]|)")


def parse_quantity(text: str) -> Decimal:
    """Return the number that a quantity means: ``1.5Gi`` is 1610612736, ``500m`` is 0.5.

    Only plain decimal notation is accepted, as Kubernetes writes it. Raises ValueError for anything else.
    """
    matched = _QUANTITY.fullmatch(text)
    if matched is None:
        raise ValueError(f"{text!r:.60} is not a quantity such as 1Gi")
    return Decimal(matched[1]) * _UNITS[matched[2]]


def parse_bytes(text: str) -> int:
    """Return the whole bytes of a quantity, rounded down. Raises ValueError, also for a fraction such as
    ``500m``."""
    if text.endswith(("n", "u", "m")):
        raise ValueError(f"{text!r:.60} is not a quantity of bytes such as 1Gi")
    return int(parse_quantity(text))
