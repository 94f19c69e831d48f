"""Times on the command line: seconds, or what Go's ``time.ParseDuration`` takes, so that llm-d's values work.

Standard library only: the operator imports this module.
"""

import math
import re
from typing import Final

_UNITS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|us|µs|ns|h|m|s)")


def seconds(text: str) -> float:
    """``30``, ``30s``, ``1m30s`` or ``1.5h`` as seconds. Raises ValueError for anything else."""
    try:
        return float(text)
    except ValueError:
        sign, parts = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
        if not parts or _PART.sub("", parts):
            raise ValueError(f"{text!r} is no time; write seconds or 1m30s") from None
        return sign * math.fsum(float(number) * _UNITS[unit] for number, unit in _PART.findall(parts))
