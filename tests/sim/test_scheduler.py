"""The scheduler in virtual time: who runs, what it costs, and that nothing is lost."""

from collections.abc import Iterator
from itertools import count, islice

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.naive_pool import Subscriber

from kvist_sim.engine.blocks import BlockPool, Hasher
from kvist_sim.engine.scheduler import Limits, Plan, Scheduler
from kvist_sim.engine.sequence import Sequence, State
from kvist_sim.engine.timing import Timing

SIZE = 4
TIMING = Timing()
numbers = count()


def scheduler(blocks: int = 100, **limits: int | bool) -> Scheduler:
    """An engine with blocks of four tokens."""
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 4 * (blocks - 1)} | limits
    return Scheduler(BlockPool(blocks, SIZE), Hasher(SIZE), Limits(**given))  # type: ignore[arg-type]


def sequence(
    prompt: list[int], max_tokens: int, *, arrived: float = 0.0, says: Iterator[int] | None = None
) -> Sequence:
    """A request that goes on until its limit unless `says` ends before."""
    return Sequence(
        id=f"r{next(numbers)}",
        prompt=prompt,
        output=count(1_000) if says is None else says,
        max_tokens=max_tokens,
        arrived=arrived,
    )


def step(engine: Scheduler, now: float) -> tuple[Plan, list[Sequence], float]:
    """One step in virtual time: the plan, who got a token, and when it ended."""
    plan = engine.schedule(now)
    then = now + TIMING.step(plan.prefill_tokens, plan.decoding)
    return plan, engine.complete(plan, then), then


def finish(engine: Scheduler, now: float = 0.0) -> float:
    """Steps until idle; when that was."""
    while not engine.idle:
        now = step(engine, now)[2]
    return now


def test_prompt_is_computed_in_chunks() -> None:
    """A prompt longer than the budget takes several steps and yields its first token in the last of them."""
    engine = scheduler()
    one = sequence(list(range(70)), 2)
    engine.add(one)

    plans = [step(engine, 0.0) for _ in range(4)]

    assert [(plan.prefill_tokens, plan.decoding) for plan, _, _ in plans] == [
        (32, 0),
        (32, 0),
        (6, 0),
        (0, 1),
    ]
    assert [advanced for _, advanced, _ in plans] == [[], [], [one], [one]]
    assert (one.finish, one.generated, one.tokens[70:]) == ("length", 2, [1_000, 1_001])


def test_decoding_goes_before_new_prompts() -> None:
    """A running sequence keeps its token per step while a long prompt is computed with what is left."""
    engine = scheduler()
    first, second = sequence([1, 2, 3], 9), sequence(list(range(10, 50)), 9)
    engine.add(first)
    step(engine, 0.0)
    engine.add(second)

    plan, advanced, _ = step(engine, 1.0)

    assert plan.work == ((first, 1), (second, 31))
    assert (plan.prefill_tokens, plan.decoding) == (31, 1)
    assert advanced == [first]


def test_step_takes_as_long_as_the_hardware() -> None:
    """Prompts cost compute, decoding a pass over the weights; together the longer of the two."""
    assert TIMING.step(0, 1) == TIMING.step_seconds + TIMING.sequence_seconds
    assert TIMING.step(15_928, 0) == 1.0
    assert TIMING.step(15_927, 1) == 1.0 + TIMING.sequence_seconds
    assert TIMING.scaled(10).step(15_928, 0) == 0.1


def test_shared_prefix_is_computed_once() -> None:
    """The second request with a prefix computes only what comes after it, and says so."""
    engine = scheduler()
    engine.add(sequence(list(range(20)), 1))
    finish(engine)
    again = sequence([*range(20), 99], 1)
    engine.add(again)

    plan, _, _ = step(engine, 0.0)

    assert (again.cached, plan.prefill_tokens) == (20, 1)
    assert (engine.counters.queries, engine.counters.hits) == (41, 20)


def test_decode_blocks_come_one_at_a_time() -> None:
    """A block is announced when its last token has been computed: one step after it was drawn."""
    engine = scheduler()
    engine.add(sequence([1, 2, 3], 6))
    events = []
    now = 0.0
    while not engine.idle:
        now = step(engine, now)[2]
        events.append([event.token_ids for event in engine.pool.take_events()])  # type: ignore[union-attr]

    assert events == [[], [[1, 2, 3, 1_000]], [], [], [], [[1_001, 1_002, 1_003, 1_004]]]


def test_batch_is_full() -> None:
    """max_num_seqs bounds the batch; the queue is first come, first served."""
    engine = scheduler(max_num_seqs=2)
    three = [sequence([number] * 3, 2) for number in range(3)]
    for one in three:
        engine.add(one)

    assert [one for one, _ in step(engine, 0.0)[0].work] == three[:2]
    assert list(engine.waiting) == three[2:]
    finish(engine)
    assert [one.finish for one in three] == ["length"] * 3


def test_preemption_recomputes_the_youngest() -> None:
    """Without free blocks, the sequence admitted last frees its blocks, waits at the front, and loses
    no token."""
    engine = scheduler(blocks=7)  # six usable
    old, young = sequence([1] * 8, 9), sequence([2] * 8, 9)
    engine.add(old)
    engine.add(young)
    now = 0.0
    while not young.preemptions:
        now = step(engine, now)[2]

    assert (young.state, engine.waiting[0], young.blocks, old.preemptions) == (State.WAITING, young, [], 0)
    finish(engine, now)
    assert young.tokens == [2] * 8 + list(range(1_000, 1_009))
    assert engine.counters.preemptions == young.preemptions
    assert engine.counters.queries == 16


def test_admission_waits_for_the_whole_prompt() -> None:
    """--scheduler-reserve-full-isl: a prompt starts only when all of it fits; without, when its chunk
    does."""
    for reserve, started in ((True, False), (False, True)):
        engine = scheduler(blocks=12, reserve_full_prompt=reserve, max_num_batched_tokens=24)
        engine.add(sequence([1] * 16, 20))
        step(engine, 0.0)
        late = sequence(list(range(40)), 1)
        engine.add(late)
        step(engine, 0.0)

        assert (late.state is State.RUNNING) is started


def test_without_chunks_a_prompt_waits_for_budget() -> None:
    """--no-enable-chunked-prefill: a prompt is computed whole or not yet."""
    engine = scheduler(chunked_prefill=False)
    first, second = sequence([1] * 20, 1), sequence([2] * 20, 1)
    engine.add(first)
    engine.add(second)

    assert step(engine, 0.0)[0].work == ((first, 20),)
    assert step(engine, 0.0)[0].work == ((second, 20),)


def test_end_of_text_and_abort() -> None:
    """The model may stop by itself; a client that leaves frees its blocks at once, wherever its request
    is."""
    engine = scheduler(max_num_seqs=1)
    short, gone, never = sequence([1], 9, says=iter([7])), sequence([2] * 9, 9), sequence([3], 9)
    for one in (short, gone, never):
        engine.add(one)
    step(engine, 0.0)
    step(engine, 0.0)

    assert (short.finish, short.generated) == ("stop", 2)

    plan = engine.schedule(0.0)
    engine.end(gone)
    engine.end(never)

    assert engine.complete(plan, 1.0) == []
    assert engine.idle
    assert engine.pool.free_blocks == engine.pool.capacity
    engine.end(gone)
    assert (gone.finish, never.finish) == ("abort", "abort")


requests = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=22),  # prompt
    st.integers(1, 14),  # max_tokens
    st.integers(0, 12),  # step of arrival
    st.one_of(st.none(), st.integers(0, 12)),  # step in which the client leaves
)


@settings(max_examples=150, deadline=None)
@given(st.lists(requests, max_size=12), st.integers(10, 30), st.integers(3, 40), st.integers(1, 6))
def test_any_workload_ends_and_events_describe_the_cache(
    workload: list[tuple[list[int], int, int, int | None]], blocks: int, budget: int, seats: int
) -> None:
    """Whatever comes: limits hold, everyone gets exactly their tokens, nothing leaks, events equal
    content."""
    engine = scheduler(blocks, max_num_batched_tokens=budget, max_num_seqs=seats)
    pending = [(sequence(prompt, tokens), at, leaves) for prompt, tokens, at, leaves in workload]
    subscriber = Subscriber()
    for number in count():
        for one, at, leaves in pending:
            if at == number:
                engine.add(one)
            if leaves == number and at <= number:
                engine.end(one)
        plan, _, _ = step(engine, float(number))
        subscriber.apply(engine.pool.take_events())

        assert plan.tokens <= budget
        assert len(engine.running) <= seats
        assert subscriber.content() == engine.pool.cached()
        if number > 12 and engine.idle:
            break

    assert engine.pool.free_blocks == engine.pool.capacity
    for one, at, leaves in pending:
        left = leaves is not None and leaves >= at
        assert one.finish == "length" or (left and one.finish == "abort")
        assert left or one.generated == one.max_tokens
        assert one.tokens[len(one.prompt) :] == list(islice(count(1_000), one.generated))
        assert (one.cached or 0) < len(one.prompt)
