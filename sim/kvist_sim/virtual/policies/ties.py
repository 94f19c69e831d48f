"""The best of several, by lot among equals; and how deep a chain of blocks is held."""

from bisect import bisect_left
from collections.abc import Container, Sequence
from random import Random


def least(values: Sequence[float], random: Random) -> int:
    """Position of the least value; among equal ones by lot."""
    best = min(values)
    ties = [position for position, value in enumerate(values) if value == best]
    return ties[0] if len(ties) == 1 else random.choice(ties)


def most(values: Sequence[float], random: Random) -> int:
    """Position of the greatest value; among equal ones by lot."""
    return least([-value for value in values], random)


def depth(blocks: Sequence[int], held: Container[int]) -> int:
    """Return the number of leading blocks held, given that a holder of a block holds all before it."""
    return bisect_left(blocks, True, key=lambda block: block not in held)
