"""Clients' behaviour, independent of routing: sessions that begin at given times, and turns that follow each
other.

A session is an iterator of turns. The first is asked when the session begins, each further one ``pause``
seconds after the answer to the one before: a closed loop within an open one. Everything random in a session
comes from its own dice, so that two policies meet the same users with the same words.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeAlias

from kvist_sim.virtual.jobs import Passage


class Turn(NamedTuple):
    """One request of a session."""

    prompt: Passage
    whole: Passage
    """The prompt with its answer, as the session goes on from it."""
    max_tokens: int
    pause: float = 0.0
    """Seconds after the answer before it; of the first turn not used."""


Session: TypeAlias = Iterator[Turn]
Burst: TypeAlias = Sequence[Callable[[Random], Session]]
"""Sessions that begin at the same moment."""


def poisson(random: Random, rate: float) -> Iterator[float]:
    """Users who do not know of each other."""
    while True:
        yield random.expovariate(rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of traffic."""

    name: str
    summary: str
    bursts: Callable[[Random], Iterator[Burst]]
    """Endless; the dice are for what sessions share (system prompts, documents, popularity)."""
    requests: float
    """Mean number of requests of one burst."""
    standing: float = 0.0
    """Mean seconds that a session of several turns lasts: at the beginning as many are under way as would be
    after a long time. 0: sessions are single requests."""
    gaps: Callable[[Random, float], Iterator[float]] = poisson
    """Seconds between bursts, at so many bursts a second."""
    ttft: float = 2.0
    """Seconds to the first token that users of this kind accept."""
    tpot: float = 0.060
    """Seconds per token after the first: 16 tokens a second, faster than people read."""


def answer(prompt: Passage, tokens: int, random: Random, *, max_tokens: int = 0, pause: float = 0.0) -> Turn:
    """A turn whose answer has so many tokens."""
    return Turn(prompt, prompt.on(tokens, random), max_tokens or tokens, pause)


def lognormal(random: Random, median: float, sigma: float, low: int, high: int) -> int:
    """A length as people's and models' are: many short, few long."""
    return round(min(high, max(low, median * random.lognormvariate(0.0, sigma))))


class Popular:
    """Draws numbers 0 … count - 1, number k with weight 1 / (k + 1) ** zipf."""

    def __init__(self, count: int, zipf: float) -> None:
        self._weights: list[float] = []
        total = 0.0
        for k in range(count):
            total += 1 / (k + 1) ** zipf
            self._weights.append(total)
        self._all = range(count)

    def draw(self, random: Random) -> int:
        """One of them."""
        return random.choices(self._all, cum_weights=self._weights)[0]
