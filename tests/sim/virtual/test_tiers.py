"""Slower places for blocks in virtual time: hits, times, limits and events as real engines have them."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.virtual.policies.ask import Held, asked, context, pods
from tests.sim.virtual.runs import run

from kvist_sim.engine.tiers import DISK, HOST, SHARED, EngineTiers, TierKind, TierNote, TierStore
from kvist_sim.virtual.engine import VirtualEngine
from kvist_sim.virtual.fleet import Fleet
from kvist_sim.virtual.hardware import Hardware
from kvist_sim.virtual.index_feed import ROOT, IndexFeed
from kvist_sim.virtual.jobs import BLOCK, NOTHING, Call, Job, Passage
from kvist_sim.virtual.loads import LoadNote
from kvist_sim.virtual.noting_pool import NotingPool
from kvist_sim.virtual.overlaps import BlockOverlaps
from kvist_sim.virtual.policies import POLICIES
from kvist_sim.virtual.policies.dynamo import credit
from kvist_sim.virtual.policies.llmd import with_lower
from kvist_sim.virtual.policy import Pod
from kvist_sim.virtual.traffic import Shape
from kvist_sim.virtual.workloads.cases import CASES
from kvist_sim.virtual.workloads.dialogues import returning
from kvist_sim.virtual.world import World

DICE = Random(7)
GPU_BLOCKS = 24


def engine(*disks: TierStore[int], host: int = 40, seconds: float = 1e-3) -> VirtualEngine:
    """Return an engine with a small GPU cache, memory for ``host`` blocks, and these disks."""
    tiers = EngineTiers(TierStore(TierKind(HOST, host, seconds)), disks, tokens=BLOCK)
    return VirtualEngine(Hardware(blocks=GPU_BLOCKS), NotingPool(GPU_BLOCKS, BLOCK), tiers)


def disk(blocks: int = 1_000, seconds: float = 2e-3, medium: str = DISK) -> TierStore[int]:
    """Return a disk."""
    return TierStore(TierKind(medium, blocks, seconds))


def prompt(blocks: int = 10) -> Passage:
    """Return a prompt of so many full blocks and ten more tokens."""
    return NOTHING.on(blocks * BLOCK + 10, DICE)


def ask(where: VirtualEngine, text: Passage, *, allowed: frozenset[str] | None = None) -> tuple[Call, float]:
    """Serve one request alone; return it, and the seconds to its first token."""
    call = Call(0, "", text, text.on(2, DICE), 2, 0.0)
    call.load_tiers = allowed
    where.add(Job.of(call))
    now = 0.0
    while not where.idle:
        now += where.plan(now)
        where.complete(now)
    assert call.first_token is not None
    return call, call.first_token


def others(where: VirtualEngine, number: int) -> None:
    """Serve other prompts, so that the GPU forgets."""
    for _ in range(number):
        ask(where, prompt(12))


def sources(call: Call) -> dict[str, int]:
    """Return the tokens of a prompt by where they came from."""
    loaded = sum(call.loaded.values())
    return {"gpu": call.cached - loaded, **call.loaded}


def test_what_the_gpu_has_lost_comes_from_memory_then_from_disk_then_from_another_engine() -> None:
    """The chain of a real engine's test: hit on the GPU, in memory, on disk, and in the shared volume of what
    another engine wrote; each time all full blocks but those of the last token."""
    volume = disk(medium=SHARED)
    first, second = engine(disk(), volume), engine(volume)
    text = prompt()

    assert sources(ask(first, text)[0]) == {"gpu": 0}
    assert sources(ask(first, text)[0]) == {"gpu": 640}
    others(first, 2)
    assert sources(ask(first, text)[0]) == {"gpu": 0, HOST: 640}
    others(first, 6)
    assert sources(ask(first, text)[0]) == {"gpu": 0, DISK: 640}
    assert sources(ask(second, text)[0]) == {"gpu": 0, SHARED: 640}


def test_a_load_takes_the_time_of_its_blocks() -> None:
    """Ten blocks from a disk take ten reads of the disk and ten of the memory, before the last tokens are
    computed; a slow disk takes longer than computing."""
    text = prompt()
    times = {}
    for name, store in (("fast", disk(seconds=1e-3)), ("slow", disk(seconds=50e-3))):
        where = engine(store)
        _, cold = ask(where, text)
        others(where, 8)
        loaded, times[name] = ask(where, text)
        assert sources(loaded)[DISK] == 640
    step = Hardware().timing.step_seconds

    assert times["fast"] == pytest.approx(10 * 1e-3 + 10 * 1e-3 + step, abs=1e-3)
    assert times["slow"] == pytest.approx(10 * 50e-3 + 10 * 1e-3 + step, abs=1e-3)
    assert times["slow"] > cold


def test_loads_from_one_place_wait_for_each_other() -> None:
    """Two engines that read ten blocks each from one volume take as long as one that reads twenty."""
    volume = disk(medium=SHARED, seconds=10e-3)
    texts = [prompt(), prompt()]
    writer = engine(volume)
    for text in texts:
        ask(writer, text)
    first, second = (engine(volume) for _ in range(2))
    alone, waits = ask(first, texts[0])[1], ask(second, texts[1])[1]

    assert waits - alone == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize(("allowed", "tokens"), [(frozenset[str](), 0), (frozenset({DISK}), 0), (None, 640)])
def test_a_request_may_forbid_loads(allowed: frozenset[str] | None, tokens: int) -> None:
    """With ``kv_load_tiers`` only the media named there are read; none of them: all is computed."""
    where = engine()
    text = prompt()
    ask(where, text)
    others(where, 2)

    assert ask(where, text, allowed=allowed)[0].loaded.get(HOST, 0) == tokens


def test_others_run_while_a_request_loads() -> None:
    """A request whose blocks are on their way delays no other one."""
    where = engine(disk(seconds=1.0))
    text = prompt()
    ask(where, text)
    others(where, 8)
    slow, quick = (Call(n, "", each, each.on(2, DICE), 2, 0.0) for n, each in enumerate((text, prompt(3))))
    for call in (slow, quick):
        where.add(Job.of(call))
    now = 0.0
    while not where.idle:
        now += where.plan(now)
        where.complete(now)

    assert quick.last_token is not None
    assert slow.first_token is not None
    assert quick.last_token < 0.2
    assert slow.first_token > 10.0


def notes(where: VirtualEngine) -> list[TierNote | LoadNote | tuple[Job, int, int]]:
    """Return the events of an engine without the GPU's removals."""
    return [each for each in where.take_notes() if not isinstance(each, int)]


def test_events_of_computed_blocks_come_one_by_one_and_out_of_order() -> None:
    """The order is the recorded one: the GPU's event, then one event of the memory for each block, children
    before parents, then the disk's in the same order; each names its parent."""
    where = engine(disk())
    text = prompt()
    ask(where, text)
    gpu, *rest = notes(where)
    host, stored = rest[:10], rest[10:]

    assert isinstance(gpu, tuple)
    assert not isinstance(gpu, TierNote | LoadNote)
    assert [each.medium for each in rest if isinstance(each, TierNote)] == [HOST] * 10 + [DISK] * 10
    names = [each.names for each in host if isinstance(each, TierNote)]
    assert names == [each.names for each in stored if isinstance(each, TierNote)]
    assert sorted(names) == sorted((name,) for name in text.blocks)
    assert names != [(name,) for name in text.blocks]
    parents = dict(zip(text.blocks, [None, *text.blocks], strict=False))
    assert all(each.parent == parents[each.names[0]] for each in rest if isinstance(each, TierNote))


def test_a_block_from_disk_is_in_memory_before_it_is_on_the_gpu() -> None:
    """The order is the recorded one: blocks leave the memory one by one, others take their place in order,
    and the GPU's event covers the whole prefix that was loaded."""
    where = engine(disk())
    text = prompt()
    ask(where, text)
    others(where, 8)
    where.take_notes()
    ask(where, text)
    seen = [each for each in notes(where) if isinstance(each, TierNote | LoadNote)]
    load = next(at for at, each in enumerate(seen) if isinstance(each, LoadNote))
    before = [each for each in seen[:load] if isinstance(each, TierNote)]

    assert [(each.medium, each.stored) for each in before] == [(HOST, False)] * 10 + [(HOST, True)] * 10
    assert [each.names for each in before[10:]] == [(name,) for name in text.blocks]
    found = seen[load]
    assert isinstance(found, LoadNote)
    assert (found.first, found.end) == (0, 10)


def test_a_disk_says_nothing_of_what_is_gone() -> None:
    """Memory reports what it drops, several blocks at once; a disk that is cleaned does not."""
    where = engine(disk(blocks=15), host=15)
    ask(where, prompt())
    where.take_notes()
    ask(where, prompt())
    gone = [each for each in notes(where) if isinstance(each, TierNote) and not each.stored]

    assert [(each.medium, len(each.names)) for each in gone] == [(HOST, 5)]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_the_index_of_routers_holds_what_memory_holds(asked: Sequence[tuple[int, bool]]) -> None:
    """After any requests, the index that follows the events names exactly the blocks in memory, and every
    block that was ever written to disk."""
    where, index, pod = engine(disk(), host=30), BlockOverlaps(), Pod(0, "pod", GPU_BLOCKS, BLOCK)
    index.joined(pod)
    texts = [prompt(3 + n) for n in range(6)]
    for number, other in asked:
        ask(where, texts[number])
        if other:
            others(where, 1)
        index.told(pod, list(where.take_notes()), 0.0)
    assert where.tiers is not None

    for text in texts:
        held = where.pool.held_prefix(text.blocks, text.tokens)
        assert index.match(text.blocks, [pod]) == [held]
        [found] = index.lower(text.blocks, [pod], [held])
        there = where.tiers.find(text.blocks[held:])
        assert found == {m: n for m in (HOST, DISK) if (n := sum(s.kind.medium == m for s in there))}


def test_published_credits_of_slower_places() -> None:
    """Dynamo counts a block in memory as 0.75, on disk as 0.25, in a shared pool as 0.5; llm-d one in memory
    as 0.8 and others as 1."""
    lower = {HOST: 4, DISK: 8, SHARED: 2}
    assert credit(lower) == 4 * 0.75 + 8 * 0.25 + 2 * 0.5
    assert with_lower([10], [lower]) == [10 + 4 * 0.8 + 8 + 2]


def test_policies_of_others_weigh_slower_places() -> None:
    """With equal load and GPUs, Dynamo and llm-d prefer the pod that has a prompt in memory; a block on the
    GPU counts more."""
    for name in ("dynamo", "llm-d-weighted"):
        make = next(each for each in POLICIES if each.name == name).make
        for held, below, best in (({}, {1: {HOST: 10}}, 1), ({0: 10}, {1: {HOST: 10}}, 0)):
            there = pods(2)
            policy = make(context(Held(held, below)))
            for pod in there:
                policy.joined(pod, 0.0)
            assert policy.choose(asked(range(20)), there, 0.0) == best, name


def test_requests_of_a_run_use_every_place() -> None:
    """In a small run of chats that come back, prompts are found on GPUs, in memory and on disks."""
    chats = Shape(name="back", summary="", bursts=returning(2, (3, 5), 20.0), requests=4.0, standing=60.0)
    hardware = Hardware(blocks=600)
    tiers = (TierKind(HOST, 800, 2e-4), TierKind(DISK, 10_000, 2e-3))
    spec = next(each for each in POLICIES if each.name == "dynamo")
    world = World(chats, Fleet((hardware,) * 2, tiers=tiers), spec, rate=3.0, requests=240, seed=1)
    calls = world.run().calls
    total = {medium: sum(call.loaded.get(medium, 0) for call in calls) for medium in (HOST, DISK)}

    assert min(total.values()) > 640
    assert sum(call.cached for call in calls) > sum(total.values())


def test_pools_without_slower_places_run_as_before() -> None:
    """No request loads anything."""
    spec = next(each for each in POLICIES if each.name == "dynamo")
    assert all(not call.loaded for call in run(spec).calls)


def test_three_rows_of_the_table_have_slower_places() -> None:
    """Conversations that come back, documents beyond all GPUs, and a disk slower than computing."""
    tiered = {case.name: case.fleet(4) for case in CASES if case.fleet(4).tiers}

    assert list(tiered) == ["returning", "library", "archive"]
    block = BLOCK / Hardware().timing.prefill_tokens_per_second
    speeds = {name: [kind.block_seconds < block for kind in fleet.tiers] for name, fleet in tiered.items()}
    assert speeds == {"returning": [True, True], "library": [True, True], "archive": [True, False]}
    assert [kind.medium for kind in tiered["library"].tiers] == [HOST, SHARED]


def test_the_picker_s_index_knows_every_place() -> None:
    """The product's index, which follows an engine's events, finds a prompt in memory, then on disk, and
    in the volume for the engine that shares it."""
    feed, first, second = IndexFeed(), Pod(0, "a", GPU_BLOCKS, BLOCK), Pod(1, "b", GPU_BLOCKS, BLOCK)
    for pod in (first, second):
        feed.joined(pod)
    where, text = engine(disk(), disk(medium=SHARED)), prompt()

    def hit(number: int) -> dict[str, int]:
        found = feed.index.match(ROOT, text.text).of(number)
        return {"gpu": found.tokens - sum(found.lower.values()), **found.lower}

    for number, expected in ((0, {"gpu": 640}), (2, {"gpu": 0, HOST: 640}), (8, {"gpu": 0, DISK: 640})):
        if not number:
            ask(where, text)
        others(where, number)
        feed.told(first, list(where.take_notes()), 0.0)
        assert hit(feed.numbers[first]) == expected
    assert hit(feed.storages["volume"]) == {"gpu": 0, SHARED: 640}
    assert hit(feed.numbers[second]) == {"gpu": 0}
