"""Exponential backoff: the one formula behind every repeated attempt. Pure."""

import math
from typing import Final

_MOST_DOUBLINGS: Final = 32
"""Bound of the exponent, so that thousands of failures do not overflow."""


def backoff_seconds(failures: int, *, first: float, longest: float = math.inf) -> float:
    """Return the seconds to wait after ``failures`` failures in a row (1 or more).

    The pause is ``first`` after the first failure, doubles with each further one, and never exceeds
    ``longest``: ``first=0.2, longest=10`` gives 0.2, 0.4, 0.8, … 6.4, 10, 10.
    """
    return min(longest, first * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))


def jittered(seconds: float, chance: float) -> float:
    """Shorten a pause at random, to half of it at most, so that clients do not return all at once.

    ``chance`` is a random number from 0 to 1.
    """
    return seconds * (0.5 + 0.5 * chance)
