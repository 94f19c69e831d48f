"""Which pairs of engines are connected, where all of them would be too many. Pure.

Three hundred engines have 89,700 ordered pairs, of which each takes seconds to connect. So in large sets of
compatible endpoints each endpoint gets a few partners for either leg: endpoints lie on a ring, in the order
of a hash of their keys. One that prefills has the next ones that decode as partners, one that decodes the
ones before it that prefill. An endpoint that comes or goes changes the partners of its neighbours only.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Final

from kvist_epp.endpoints.endpoint import Endpoint

PARTNERS: Final = 8
"""Partners of an endpoint for either leg, if there are so many. In pools of 300 endpoints with random loads
the chosen pair then costs 16 ms more on average than if all had met (decision 54)."""

_Place = tuple[int, str]
"""Position on the ring, and key."""


def wanted_pairs(endpoints: Iterable[Endpoint], partners: int = PARTNERS) -> list[tuple[str, str]]:
    """Return the pairs to connect, as keys of the prefill and of the decode endpoint.

    The first partners of all endpoints come first, then their second ones, and so on. Each endpoint has
    ``partners`` for each leg that its role allows, or all if there are fewer; endpoints of the rarer role
    have more. The result depends on the endpoints alone, not on their order.
    """
    sets: dict[str, tuple[list[_Place], list[_Place]]] = {}
    for one in endpoints:
        first, second = sets.setdefault(one.kv_compatibility, ([], []))
        place = _position(one.key), one.key
        if one.can_prefill:
            first.append(place)
        if one.can_decode:
            second.append(place)
    rounds: list[list[tuple[str, str]]] = [[] for _ in range(partners)]
    for label in sorted(sets):
        first, second = map(sorted, sets[label])
        for key, others in _next_ones(first, second, partners):
            for pairs, other in zip(rounds, others, strict=False):
                pairs.append((key, other))
        # the same ring the other way round
        for key, others in _next_ones(_mirrored(second), _mirrored(first), partners):
            for pairs, other in zip(rounds, others, strict=False):
                pairs.append((other, key))
    return list(dict.fromkeys(chain.from_iterable(rounds)))


def _position(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest())


def _mirrored(places: Sequence[_Place]) -> list[_Place]:
    return [(-at, key) for at, key in reversed(places)]


def _next_ones(
    places: Iterable[_Place], others: list[_Place], number: int
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each key with those of the next others on the ring, nearest first; both are in order."""
    positions = [at for at, _ in others]
    ring = [key for _, key in others]
    ring += ring[: number + 1]
    for at, key in places:
        begin = bisect_left(positions, at)
        found = ring[begin : begin + min(number + 1, len(others))]
        yield key, [other for other in found if other != key][:number]
