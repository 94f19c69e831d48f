"""The engine of virtual time against the simulator's own scheduler."""

from collections.abc import Sequence
from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_sim.engine.blocks import BlockPool, Hasher, short
from kvist_sim.engine.scheduler import Limits, Scheduler
from kvist_sim.engine.sequence import Sequence as Real
from kvist_sim.engine.timing import Timing
from kvist_sim.virtual.engine import VirtualEngine
from kvist_sim.virtual.hardware import Hardware
from kvist_sim.virtual.jobs import Call, Job, Passage
from kvist_sim.virtual.noting_pool import NotingPool

SIZE = 4
HASHER = Hasher(SIZE)
Ask = tuple[int, list[int], list[int]]
"""(arrives after so many steps, prompt, answer)"""
Story = list[tuple[float, list[str]]]
"""Per step: when it ended, and what it did."""

texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
asks = st.lists(st.tuples(st.integers(0, 6), texts, texts), min_size=1, max_size=14)


def real_story(asked: Sequence[Ask], blocks: int, limits: tuple[int, int]) -> tuple[Story, list[object]]:
    """Return the steps of the simulator's scheduler, and the content of its cache."""
    pool = BlockPool(blocks, SIZE)
    scheduler = Scheduler(pool, HASHER, Limits(*limits, max_model_len=10_000))
    sequences = {
        n: Real(id=str(n), prompt=list(p), output=iter(a), max_tokens=len(a), arrived=0.0)
        for n, (_, p, a) in enumerate(asked)
    }
    story: Story = []
    now, step = 0.0, 0
    todo = list(enumerate(asked))
    while todo or not scheduler.idle:
        while todo and (todo[0][1][0] <= step or scheduler.idle):
            scheduler.add(sequences[todo.pop(0)[0]])
        plan = scheduler.schedule(now)
        now += Timing().step(plan.prefill_tokens, plan.decoding)
        advanced = scheduler.complete(plan, now)
        first = [f"first {s.id} {s.cached}" for s in advanced if s.first_token == now]
        story.append((now, first + [f"end {s.id} {s.preemptions}" for s in advanced if s.finish]))
        step += 1
    return story, [pool.cached(), scheduler.counters.hits, scheduler.counters.preemptions]


def call(number: int, prompt: list[int], answer: list[int]) -> Call:
    """Return the request in virtual time, with the hashes that vLLM would compute."""
    digests: list[bytes] = []
    HASHER.extend(digests, prompt + answer, None, None)
    hashes = list(map(short, digests))
    before = Passage(len(prompt), hashes[: len(prompt) // SIZE], b"")
    return Call(number, "", before, Passage(len(prompt + answer), hashes, b""), len(answer), 0.0)


def virtual_story(asked: Sequence[Ask], blocks: int, limits: tuple[int, int]) -> tuple[Story, list[object]]:
    """Return the steps of the engine in virtual time, and the content of its cache."""
    pool = NotingPool(blocks, SIZE)
    engine = VirtualEngine(Hardware(Timing(), blocks, SIZE, *limits), pool)
    story: Story = []
    now, step = 0.0, 0
    todo = list(enumerate(asked))
    while todo or not engine.idle:
        while todo and (todo[0][1][0] <= step or engine.idle):
            number, (_, prompt, answer) = todo.pop(0)
            engine.add(Job.of(call(number, prompt, answer)))
        now += engine.plan(now)
        first, ended = engine.complete(now)
        story.append(
            (
                now,
                [f"first {j.call.number} {j.call.cached}" for j in first]
                + [f"end {j.call.number} {j.preemptions}" for j in ended],
            )
        )
        step += 1
    cached = {digest: len(copies) for digest, copies in pool._cached.items()}
    return story, [cached, engine.totals.hits, engine.totals.preemptions]


@given(asks, st.integers(17, 40), st.integers(1, 6), st.integers(7, 40))
@settings(max_examples=300, deadline=None)
def test_it_does_what_the_simulator_does(asked: list[Ask], blocks: int, batch: int, budget: int) -> None:
    """Same first tokens, ends and preemptions in the same steps at the same times; the same blocks cached."""
    ordered = sorted(asked, key=lambda ask: ask[0])
    real = real_story(ordered, blocks, (batch, budget))
    virtual = virtual_story(ordered, blocks, (batch, budget))

    assert virtual == real


def test_preemption_is_part_of_the_comparison() -> None:
    """The stories above contain preemptions: four growing answers do not fit into seventeen blocks."""
    asked = [(0, [n] * 12, [n] * 20) for n in range(4)]
    story, (_, _, preemptions) = virtual_story(asked, 17, (4, 40))

    assert preemptions
    assert (story, preemptions) == (real_story(asked, 17, (4, 40))[0], preemptions)
    ends = [what for what in chain.from_iterable(did for _, did in story) if what.startswith("end")]
    assert len(ends) == 4
