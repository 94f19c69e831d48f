"""Requests that come alone: system prompts, groups, a hot prefix, nothing shared, bursts of one prompt."""

from collections.abc import Callable, Iterator, Sequence
from random import Random

from kvist_sim.virtual.jobs import NOTHING, Passage
from kvist_sim.virtual.traffic import Burst, Popular, Session, answer, lognormal


def system_prompts(count: int, tokens: tuple[int, int], zipf: float) -> Callable[[Random], Iterator[Burst]]:
    """Many applications, each with its system prompt; a few of them are most of the traffic."""

    def bursts(shared: Random) -> Iterator[Burst]:
        prompts = [NOTHING.on(shared.randint(*tokens), shared) for _ in range(count)]
        popular = Popular(count, zipf)
        while True:
            yield [_asks(prompts[popular.draw(shared)], (800, 0.8), (300, 0.6))]

    return bursts


def groups(count: int, tokens: int, question: int, output: int) -> Callable[[Random], Iterator[Burst]]:
    """Equally popular long prefixes, questions and answers of one length each: llm-d's published benchmark
    (150 groups, 6,000 + 1,200 tokens in, 1,000 out)."""

    def bursts(shared: Random) -> Iterator[Burst]:
        prompts = [NOTHING.on(tokens, shared) for _ in range(count)]
        while True:
            yield [_asks(shared.choice(prompts), (question, 0.0), (output, 0.0))]

    return bursts


def hot_prefix(share: float, tokens: int) -> Callable[[Random], Iterator[Burst]]:
    """One prefix is in most requests; the others share nothing."""

    def bursts(shared: Random) -> Iterator[Burst]:
        hot = NOTHING.on(tokens, shared)
        while True:
            prefix = hot if shared.random() < share else NOTHING
            yield [_asks(prefix, (600 if prefix.tokens else 2_500, 0.8), (300, 0.6))]

    return bursts


def unshared(median: int) -> Callable[[Random], Iterator[Burst]]:
    """No two requests have anything in common."""

    def bursts(_shared: Random) -> Iterator[Burst]:
        while True:
            yield [_asks(NOTHING, (median, 1.0), (250, 0.7))]

    return bursts


def lengths(kinds: Sequence[tuple[float, int, int]]) -> Callable[[Random], Iterator[Burst]]:
    """Kinds of requests that share nothing: (weight, median prompt, median answer) each, in tokens."""
    weights = [weight for weight, _, _ in kinds]

    def bursts(shared: Random) -> Iterator[Burst]:
        while True:
            [(_, prompt, output)] = shared.choices(kinds, weights)
            yield [_asks(NOTHING, (prompt, 0.4), (output, 0.4))]

    return bursts


def long_bursts(share: float, size: int, prompt: int, output: int) -> Callable[[Random], Iterator[Burst]]:
    """Short questions with long answers, and with a probability ``size`` long prompts at once."""

    def bursts(shared: Random) -> Iterator[Burst]:
        while True:
            if shared.random() < share:
                yield [_asks(NOTHING, (prompt, 0.4), (100, 0.4))] * size
            else:
                yield [_asks(NOTHING, (500, 0.8), (output, 0.4))]

    return bursts


def rollouts(size: int, tokens: int, output: int) -> Callable[[Random], Iterator[Burst]]:
    """Reinforcement learning: one prompt many times at once, long answers."""

    def bursts(shared: Random) -> Iterator[Burst]:
        while True:
            prompt = NOTHING.on(lognormal(shared, tokens, 0.5, 200, 8_000), shared)
            yield [_again(prompt, output)] * size

    return bursts


def _asks(
    prefix: Passage, question: tuple[int, float], output: tuple[int, float]
) -> Callable[[Random], Session]:
    def session(random: Random) -> Session:
        prompt = prefix.on(lognormal(random, *question, 16, 16_000), random)
        yield answer(prompt, lognormal(random, *output, 8, 2_000), random, max_tokens=2_048)

    return session


def _again(prompt: Passage, output: int) -> Callable[[Random], Session]:
    def session(random: Random) -> Session:
        yield answer(prompt, lognormal(random, output, 0.5, 50, 3_000), random, max_tokens=4_096)

    return session
