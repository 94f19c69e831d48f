"""The best endpoints by cost, of a list or an array of costs, in the order in which they are picked. Pure."""

from heapq import nsmallest
from math import inf

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Flags = NDArray[np.bool_]
Places = NDArray[np.intp]


def best_of_few(
    costs: list[float], running: list[float], full: list[bool] | None, first: int, limit: int, near: float
) -> list[int]:
    """Return the places of the best endpoints, at most ``limit``: those that are not full first.

    Endpoints within ``near`` seconds of the least cost are a tie, which goes to the fewest running requests,
    then to the least cost. What is equal then is taken from the place ``first`` on, around.

    Example: costs 1.0, 1.0005, 1.2 with 5, 2 and 0 running and ``near`` 0.001: the order is 1, 0, 2.
    """
    count = len(costs)
    left = costs[first:] + costs[:first]
    if full is None:
        least = min(left)
        found = [left.index(least)]
        left[found[0]] = inf
        if count > 1 and min(left) <= least + near:
            left[found[0]] = least
            found = [at for at, cost in enumerate(left) if cost <= least + near]
            found.sort(key=lambda at: (running[(at + first) % count], left[at]))
            del found[limit:]
            for at in found:
                left[at] = inf
        while len(found) < limit and len(found) < count:
            found.append(at := left.index(min(left)))
            left[at] = inf
        return [(at + first) % count for at in found]
    tie = min(left) + near
    keys = [
        (full[place := (at + first) % count], cost > tie, running[place] if cost <= tie else 0.0, cost, at)
        for at, cost in enumerate(left)
    ]
    return [(key[-1] + first) % count for key in nsmallest(limit, keys)]


def best_of_many(
    costs: Vector, running: Vector, full: Flags | None, first: int, limit: int, near: float
) -> list[int]:
    """Return what ``best_of_few`` returns, of arrays."""
    count = len(costs)
    costs = np.concatenate((costs[first:], costs[:first]))
    lowest = costs[costs.argmin()]
    tied = (costs <= lowest + near).nonzero()[0]
    # running requests are whole numbers, and costs of a tie differ by less than 1
    keys = running[(tied + first) % count] + (costs[tied] - lowest)
    if full is None:
        found = least(keys, tied, limit)
        if len(found) < limit:
            costs[tied] = inf
            found += least(costs, None, limit - len(found))
    else:
        full = np.concatenate((full[first:], full[:first]))
        costs[tied] = inf
        found = least(np.where(full[tied], inf, keys), tied, limit)
        found += least(np.where(full, inf, costs), None, limit - len(found))
        found += least(np.where(full[tied], keys, inf), tied, limit - len(found))
        found += least(np.where(full, costs, inf), None, limit - len(found))
    return [(at + first) % count for at in found]


def least(keys: Vector, places: Places | None, limit: int) -> list[int]:
    """Return the places of the least keys, in order and without infinite ones; overwrites ``keys``.

    ``places``: those that the keys belong to; None: they belong to all, in order.
    """
    found: list[int] = []
    while len(found) < limit:
        at = int(keys.argmin())
        if keys[at] == inf:
            break
        keys[at] = inf
        found.append(at if places is None else int(places[at]))
    return found


def cheapest(costs: Vector, parts: Places, number: int) -> list[int]:
    """Return the places of the ``number`` least costs, and perhaps of some more.

    ``parts``: starts of at least ``number`` parts of the columns. Sorting their minima takes a fifth of the
    time that numpy needs to select from all.
    """
    minima = np.minimum.reduceat(costs, parts)
    minima.sort()
    found = (costs <= minima[number - 1]).nonzero()[0]
    equal: list[int] = []
    if len(found) > 2 * number:  # many have the same cost, as in an idle pool
        equal = found[:number].tolist()
        found = (costs < minima[number - 1]).nonzero()[0]
        if len(found) > 2 * number:  # most of the least are in one part
            found = found[costs[found].argpartition(number)[:number]]
    return [*found.tolist(), *equal]
