"""Text that the engine generates: words of the corpus, in the order of the corpus. Pure.

A *unit* is a space and what follows up to the next space. Tokenizers of today split before a space, so that
the tokens of the units, joined, are the tokens of the text: what is generated is canonical, and the next turn
of a chat, which sends it back as text, finds it in the cache.
"""

import random
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Final

_UNIT: Final = re.compile(r" [^\s]+")
_PROSE: Final = re.compile(r"[A-Z][^\n|{}]{120,}")


class Writer:
    """Generator of texts from ``corpus``; ``encode`` is the tokenizer's, without added tokens."""

    def __init__(self, corpus: str, encode: Callable[[str], list[int]], *, noncanonical: float = 0.0) -> None:
        self._encode = lru_cache(maxsize=100_000)(encode)
        self._noncanonical = noncanonical
        self._after: dict[str, list[str]] = {}
        for paragraph in _PROSE.findall(corpus):
            self._learn(_UNIT.findall(" " + paragraph))
        self._starts = [unit for unit in self._after if unit[1].isupper()]

    def _learn(self, units: list[str]) -> None:
        for unit, following in pairwise(units):
            self._after.setdefault(unit, []).append(following)

    def tokens(self, seed: str, length: int | None, *, leading_space: bool) -> Iterator[int]:
        """Yield token ids of one text: ``length`` of them, or without end.

        Equal arguments give equal text.
        """
        draw = random.Random(seed)
        left = length
        for unit in self._units(draw, leading_space=leading_space):
            ids = self._spelled(unit, draw)
            if left is not None and left <= len(ids):
                yield from ids[:left]
                return
            left = left and left - len(ids)
            yield from ids

    def _units(self, draw: random.Random, *, leading_space: bool) -> Iterator[str]:
        unit = draw.choice(self._starts)
        yield unit if leading_space else unit[1:]
        while True:
            unit = draw.choice(self._after.get(unit) or self._starts)
            yield unit

    def _spelled(self, unit: str, draw: random.Random) -> list[int]:
        if self._noncanonical and draw.random() < self._noncanonical and len(unit) > 2:
            middle = draw.randrange(1, len(unit))
            return self._encode(unit[:middle]) + self._encode(unit[middle:])
        return self._encode(unit)


def length(seed: str, mean: float, minimum: int) -> int:
    """Return the tokens until the model would stop: exponential, at least ``minimum`` and 1."""
    return max(minimum, 1 + int(random.Random(seed + "/length").expovariate(1 / mean)))
