"""Sessions of several turns: chats, agents, questions about a document, code completion."""

from collections.abc import Callable, Iterator
from random import Random

from kvist_sim.virtual.jobs import NOTHING, Passage
from kvist_sim.virtual.traffic import Burst, Popular, Session, answer, lognormal

Bursts = Callable[[Random], Iterator[Burst]]


def chats(systems: int, turns: tuple[int, int], think: float) -> Bursts:
    """People who read, think (``think`` seconds on average) and go on; the history grows."""

    def session(system: Passage, random: Random) -> Session:
        so_far = system
        for _ in range(random.randint(*turns)):
            prompt = so_far.on(lognormal(random, 80, 0.9, 8, 4_000), random)
            pause = 1.0 + random.expovariate(1 / think)
            turn = answer(
                prompt, lognormal(random, 250, 0.7, 8, 2_000), random, max_tokens=2_048, pause=pause
            )
            so_far = turn.whole
            yield turn

    return _of_shared(systems, 900, session)


def returning(systems: int, turns: tuple[int, int], away: float) -> Bursts:
    """People who bring a long text, leave for ``away`` seconds on average, and come back to it."""

    def session(system: Passage, random: Random) -> Session:
        so_far = system.on(lognormal(random, 5_000, 0.6, 500, 24_000), random)
        for _ in range(random.randint(*turns)):
            prompt = so_far.on(lognormal(random, 120, 0.9, 8, 4_000), random)
            pause = away / 3 + random.expovariate(1.5 / away)
            turn = answer(
                prompt, lognormal(random, 250, 0.7, 8, 2_000), random, max_tokens=2_048, pause=pause
            )
            so_far = turn.whole
            yield turn

    return _of_shared(systems, 900, session)


def agents(tools: int, steps: tuple[int, int]) -> Bursts:
    """Programs that call tools: short answers, large results, seconds between; up to tens of thousands of
    tokens."""

    def session(system: Passage, random: Random) -> Session:
        so_far = system.on(lognormal(random, 1_000, 0.7, 100, 8_000), random)
        for _ in range(random.randint(*steps)):
            pause = 0.3 + random.expovariate(1 / 2.0)
            turn = answer(
                so_far, lognormal(random, 90, 0.6, 16, 1_000), random, max_tokens=4_096, pause=pause
            )
            so_far = turn.whole.on(lognormal(random, 800, 1.0, 30, 8_000), random)
            yield turn

    return _of_shared(tools, 4_000, session)


def documents(count: int, tokens: tuple[int, int], zipf: float, questions: tuple[int, int]) -> Bursts:
    """A few questions in a row, each by itself, about one of the documents."""

    def session(document: Passage, random: Random) -> Session:
        for _ in range(random.randint(*questions)):
            prompt = document.on(lognormal(random, 60, 0.6, 8, 500), random)
            pause = 2.0 + random.expovariate(1 / 10.0)
            yield answer(prompt, lognormal(random, 200, 0.6, 8, 1_000), random, max_tokens=1_024, pause=pause)

    def bursts(shared: Random) -> Iterator[Burst]:
        library = [NOTHING.on(shared.randint(*tokens), shared) for _ in range(count)]
        popular = Popular(count, zipf)
        while True:
            yield [_begin(session, library[popular.draw(shared)])]

    return bursts


def completions(repositories: int, requests: tuple[int, int]) -> Bursts:
    """An editor: the same files before the cursor, a line more each time, a few tokens back, at once."""

    def session(repository: Passage, random: Random) -> Session:
        so_far = repository.on(lognormal(random, 1_500, 0.6, 100, 6_000), random)
        for _ in range(random.randint(*requests)):
            prompt = so_far.on(random.randint(10, 120), random)
            pause = 0.4 + random.expovariate(1 / 2.5)
            yield answer(prompt, random.randint(8, 60), random, max_tokens=64, pause=pause)
            so_far = prompt if random.random() < 0.8 else repository.on(1_500, random)

    return _of_shared(repositories, 2_000, session)


def _of_shared(count: int, tokens: int, session: Callable[[Passage, Random], Session]) -> Bursts:
    def bursts(shared: Random) -> Iterator[Burst]:
        beginnings = [NOTHING.on(round(tokens * shared.uniform(0.6, 1.4)), shared) for _ in range(count)]
        popular = Popular(count, 0.8)
        while True:
            yield [_begin(session, beginnings[popular.draw(shared)])]

    return bursts


def _begin(session: Callable[[Passage, Random], Session], beginning: Passage) -> Callable[[Random], Session]:
    return lambda random: session(beginning, random)
