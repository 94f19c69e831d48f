"""Blocks of slower tiers: events in any order, with and without what names their place; and leases."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.copying import heard, told
from tests.fakes.learning import PROMPT, SIZE, Learning, prompted, stored
from tests.oracle import NaiveIndex

from kvist_epp.engines.vllm.kv_events import Cleared, Removed, Stored
from kvist_epp.index.tree.segment import Root
from kvist_epp.kvevents.tier_state import Leases, WaitingBlock, WaitingBlocks

MEDIA = ("CPU", "STORAGE", "SHARED")


def placeholder(*names: int, medium: str = "CPU") -> Stored:
    """Return an engine's default event of a tier's blocks: hashes alone."""
    return Stored(hashes=list(names), parent=None, token_ids=[], block_size=0, medium=medium)


@dataclass(frozen=True)
class Chain:
    """A prompt as one engine holds it on all its media."""

    root: Root
    text: bytes
    hashes: tuple[int, ...]

    def parent(self, at: int) -> int | None:
        return self.hashes[at - 1] if at else None

    def block(self, at: int) -> bytes:
        return self.text[at * SIZE : (at + 1) * SIZE]

    def on_gpu(self, start: int) -> list[Stored]:
        """The GPU's events: the whole chain, or in two parts of several blocks each."""
        end = len(self.hashes)
        parts = [(0, start), (start, end)] if 1 < start < end - 1 else [(0, end)]
        lora, salt = self.root
        return [
            stored(
                list(self.hashes[low:high]),
                self.parent(low),
                self.text[low * SIZE : high * SIZE],
                lora=lora,
                salt=salt if low == 0 else None,
            )
            for low, high in parts
        ]

    def on_tier(self, at: int, medium: str, *, described: bool) -> Stored:
        """One block of the chain as the offloading connector reports it: without salt, or by hash alone."""
        if not described:
            return placeholder(self.hashes[at], medium=medium)
        names, lora = [self.hashes[at]], self.root[0]
        return stored(names, self.parent(at), self.block(at), session=None, medium=medium, lora=lora)


@st.composite
def chains(draw: st.DrawFn) -> list[Chain]:
    """Prompts of several tenants and adapters that share prefixes; equal blocks have equal hashes."""
    names: dict[tuple[Root, bytes], int] = {}
    found = []
    for _ in range(draw(st.integers(1, 3))):
        root = draw(st.sampled_from([(None, None), (None, "salt"), ("ad", None), ("ad", "salt")]))
        blocks = draw(st.lists(st.sampled_from([b"aaaa", b"bbbb"]), min_size=2, max_size=5))
        text = b"".join(blocks)
        prefixes = [(root, text[: SIZE * (at + 1)]) for at in range(len(blocks))]
        found.append(
            Chain(root, text, tuple(names.setdefault(prefix, len(names) + 1) for prefix in prefixes))
        )
    return found


@given(chains(), st.data())
def test_any_order_of_one_block_events_gives_the_index_of_ordered_events(
    prompts: list[Chain], data: st.DataObject
) -> None:
    """Events of tiers before or after the GPU's, children before parents, described or not, copies and
    removals of several blocks: the index is that of the oracle, to which all came in order."""
    on_gpu = [event for one in prompts for event in one.on_gpu(data.draw(st.integers(0, 4)))]
    spots = [(one, at) for one in prompts for at in range(len(one.hashes))]
    moves = data.draw(st.lists(st.tuples(st.sampled_from(spots), st.sampled_from(MEDIA), st.booleans())))
    on_tiers = [one.on_tier(at, medium, described=said) for (one, at), medium, said in moves]
    engine, oracle = Learning(), NaiveIndex()
    number = oracle.publisher("pod")
    for event in data.draw(st.permutations([*on_gpu, *on_tiers])):
        engine.send(event)
    engine.settle()
    _tell_in_order(oracle, number, prompts, on_gpu, on_tiers)
    for medium in ("GPU", *MEDIA):
        gone = data.draw(st.lists(st.sampled_from([name for one in prompts for name in one.hashes])))
        engine.send(Removed(hashes=gone, medium=medium))
        oracle.removed(number, gone, medium=medium)
    engine.settle()

    assert engine.index.blocks(engine.index.publisher(engine.source)) == oracle.blocks(number)
    for one in prompts:
        actual = engine.index.match(one.root, one.text + b"?").of(engine.index.publisher(engine.source))
        assert actual == oracle.match(one.root, one.text + b"?").of(number)


def _tell_in_order(
    oracle: NaiveIndex,
    number: int,
    prompts: Sequence[Chain],
    on_gpu: Sequence[Stored],
    on_tiers: Sequence[Stored],
) -> None:
    """Give the oracle the GPU's blocks, parents first, then those of the tiers, by hash alone."""
    for event in sorted(on_gpu, key=lambda event: event.hashes[0]):
        one = next(one for one in prompts if {*event.hashes} <= {*one.hashes})
        start = one.hashes.index(event.hashes[0])
        blocks = [one.block(start + at) for at in range(len(event.hashes))]
        assert oracle.stored(number, one.root, event.parent, event.hashes, blocks, block_size=SIZE)
    once: set[tuple[int, str]] = set()
    for event in on_tiers:
        [name] = event.hashes
        if event.medium == "CPU" or (name, event.medium) not in once:
            once.add((name, event.medium))
            assert oracle.held(number, [name], event.medium) == 1


def test_children_before_parents_that_only_a_tier_has() -> None:
    """The GPU's events have the first two blocks of a prompt, a tier's the rest, one by one and backwards."""
    engine = prompted()
    text = PROMPT + b"ccccddddeeee"
    for name in (5, 4, 3):
        engine.send(stored([name], name - 1, text[4 * name - 4 : 4 * name], medium="CPU", session=None))
    engine.settle()

    assert (engine.tokens(text), engine.tokens(text, medium="CPU")) == (20, 12)


def test_storage_that_reports_a_waiting_block_twice_holds_it_once() -> None:
    """Two events of one file, by hash alone and before the block is known, are undone by one removal."""
    engine = prompted()
    engine.send(placeholder(3, medium="STORAGE"), placeholder(3, medium="STORAGE"))
    engine.send(stored([3], 2, b"cccc", medium="CPU", session=None))
    engine.send(stored([3, 4], 2, b"ccccdddd"), Removed(hashes=[3], medium="STORAGE"))
    engine.settle()

    assert engine.index.blocks(engine.index.publisher(engine.source)) == {"GPU": 4, "CPU": 1}


def test_a_salted_block_s_tier_is_joined_by_hash() -> None:
    """Events of tiers have no salt (vLLM issue 49413): the GPU's event of the same hash had it."""
    engine = Learning()
    engine.send(stored([1, 2], None, PROMPT, salt="tenant"))
    engine.send(*(stored([n], n - 1 or None, PROMPT[4 * n - 4 : 4 * n], medium="CPU") for n in (2, 1)))
    engine.send(Removed(hashes=[1, 2]))

    assert engine.index.match(("tenant", None), PROMPT + b"?").best == 0
    assert [engine.tokens(PROMPT, salt, medium="CPU") for salt in ("tenant", None)] == [8, 0]


def test_a_block_with_media_never_matches_from_a_tier_either() -> None:
    """The tier's event has the placeholder tokens of an image as if they were text."""
    engine = Learning()
    engine.send(stored([1, 2, 3], None, b"aaaabbbbcccc", opaque_from=1))
    engine.send(*(stored([n], n - 1, b"bbbb", medium="CPU", session=None) for n in (3, 2)))
    engine.send(stored([4], 3, b"dddd", medium="CPU", session=None), Removed(hashes=[2, 3]))
    engine.settle()

    assert engine.tokens(b"aaaabbbbbbbb") == 4
    assert engine.index.blocks(engine.index.publisher(engine.source)) == {"GPU": 1, "CPU": 3}


def test_a_placeholder_waits_for_the_gpu_s_event() -> None:
    """On a load from disk the tier's placeholder precedes the GPU's event that says what the hash means."""
    engine = Learning()
    engine.send(placeholder(2), placeholder(1), stored([1, 2], None, PROMPT), Removed(hashes=[2, 1]))

    assert engine.tokens(PROMPT, medium="CPU") == 8


def test_a_placeholder_that_was_removed_while_it_waited_is_not_learned() -> None:
    """Removals of several blocks reach those that wait, copy by copy."""
    engine = Learning()
    engine.send(placeholder(1, 2), placeholder(2), Removed(hashes=[1, 2], medium="CPU"))
    engine.send(stored([1, 2], None, PROMPT))

    assert engine.index.blocks(engine.index.publisher(engine.source)) == {"GPU": 2, "CPU": 1}


def test_first_blocks_of_unknown_salt_are_not_learned_once_salts_are_in_use() -> None:
    """An engine of any publisher has shown a salt: a tier's first block that no GPU event names may be
    another tenant's, and is given up."""
    engine = Learning()
    engine.send(stored([7, 8], None, b"ccccdddd", salt="tenant"))
    engine.send(stored([1], None, b"aaaa", medium="CPU"), stored([2], 1, b"bbbb", medium="CPU"))
    engine.now = 31.0
    engine.ingestor.expire()
    engine.settle()

    assert engine.tokens(PROMPT) == 0
    assert engine.counters.held_unknown == 2


def test_a_tier_s_block_is_placed_where_another_engine_says() -> None:
    """Engines give equal blocks equal hashes: what one reads from shared storage another one computed."""
    engine = Learning()
    engine.send(stored([1, 2], None, PROMPT, salt="tenant"))
    engine.source = "ns/other/0"
    engine.send(placeholder(2, 1, medium="SHARED"))

    assert [engine.tokens(PROMPT, salt, medium="SHARED") for salt in ("tenant", None)] == [8, 0]


def test_another_engine_s_word_comes_late() -> None:
    """A block waits until another engine has computed it, too, and is placed before it is given up."""
    engine = Learning()
    engine.send(placeholder(1, 2, medium="SHARED"))
    engine.source = "ns/other/0"
    engine.send(stored([1, 2], None, PROMPT))
    engine.source = "ns/pod/0"
    engine.now = 31.0
    engine.ingestor.expire()

    assert (engine.tokens(PROMPT, medium="SHARED"), engine.counters.held_unknown) == (8, 0)


def test_a_block_from_decode_that_moved_to_a_tier_is_credited_there() -> None:
    """A block that was evicted from the GPU before its check and proved canonical counts on the tier."""
    engine = prompted()
    engine.send(stored([3], 2, b"cccc"), placeholder(3), Removed(hashes=[3]))
    engine.settle()

    assert (engine.tokens(PROMPT + b"cccc"), engine.tokens(PROMPT + b"cccc", medium="CPU")) == (12, 4)


def next_on_cpu(engine: Learning) -> int:
    """Return how many tokens before the prompt's second block host memory evicts next."""
    number = engine.index.publisher(engine.source)
    end = engine.index.match((None, None), PROMPT + b"?").end(number)
    return 0 if end is None else engine.index.next_evicted(number, "CPU", end, after=SIZE, limit=SIZE)


def test_the_block_that_a_tier_evicted_last_may_be_one_that_was_never_credited() -> None:
    """The engine's last removal from host memory, of whatever block, tells what goes next there; the GPU's
    removals, and those that the index makes by itself, do not."""
    engine = prompted()
    engine.send(*[placeholder(1, 2, medium=medium) for medium in ("CPU", "STORAGE")], Removed(hashes=[2, 1]))
    engine.send(Removed(hashes=[2], medium="CPU"))
    assert next_on_cpu(engine) == SIZE
    engine.send(stored([3], 2, b"zzza"), stored([3], 2, b"zzza", medium="CPU", session=None))
    engine.settle()
    engine.send(Removed(hashes=[3]))
    assert next_on_cpu(engine) == SIZE
    engine.send(Removed(hashes=[3], medium="CPU"))
    assert next_on_cpu(engine) == 0


def test_a_block_from_decode_that_is_not_canonical_is_not_credited_on_a_tier() -> None:
    """Tokens that no prompt would have are no hit on any medium."""
    engine = prompted()
    engine.send(stored([3], 2, b"zzza"), stored([3], 2, b"zzza", medium="CPU", session=None))
    engine.settle()
    engine.send(Removed(hashes=[3]), stored([3], 2, b"zzza", medium="STORAGE", session=None))
    engine.settle()

    assert engine.tokens(PROMPT + b"zzza") == 8


def test_clearing_the_gpu_does_not_forget_what_waits() -> None:
    """AllBlocksCleared is of the GPU; a restart forgets the tiers, too."""
    engine = Learning()
    engine.send(placeholder(1, 2), Cleared(), stored([1, 2], None, PROMPT))
    cleared = engine.index.blocks(engine.index.publisher(engine.source))
    engine.ingestor.forget(engine.source)
    engine.send(stored([1, 2], None, PROMPT))

    assert (cleared, engine.index.blocks(0)) == ({"GPU": 2, "CPU": 2}, {"GPU": 2})


def aged(engine: Learning, seconds: float) -> None:
    """Let time pass, half a lease at a time, until every expired block is removed."""
    end = engine.now + seconds
    while engine.now < end:
        engine.now = min(end, engine.now + 1800.0)
        engine.ingestor.expire()
        while engine.ingestor.needs_sweep:
            engine.ingestor.sweep()


@pytest.mark.parametrize("medium", ["STORAGE", "SHARED", "NEW"])
def test_blocks_that_no_event_removes_expire(medium: str) -> None:
    """A disk's files may be cleaned behind the engine's back: they are believed for an hour, or until they
    are stored again. Host memory's blocks are removed by events, and stay."""
    engine = prompted()
    engine.send(placeholder(1, 2, medium=medium), placeholder(1, 2), Removed(hashes=[1, 2]))
    aged(engine, 1800.0)
    engine.send(placeholder(1, medium=medium))
    aged(engine, 1800.0)
    half = engine.index.blocks(engine.index.publisher(engine.source))
    aged(engine, 1800.0)

    assert half == {"CPU": 2, medium: 1}
    assert engine.index.blocks(engine.index.publisher(engine.source)) == {"CPU": 2}
    assert (len(engine.ingestor._publishers[engine.source].leases), engine.tokens(PROMPT)) == (0, 8)


def test_a_load_renews_the_lease() -> None:
    """The GPU has the blocks again: their files were there, or will be."""
    engine = prompted()
    engine.send(placeholder(1, 2, medium="STORAGE"), Removed(hashes=[2, 1]))
    aged(engine, 1800.0)
    engine.send(stored([1, 2], None, PROMPT, session="t"))
    aged(engine, 1800.0)

    assert engine.index.blocks(engine.index.publisher(engine.source)) == {"GPU": 2, "STORAGE": 2}


def test_a_block_of_a_disk_is_stored_once_however_often_an_event_says_so() -> None:
    """Nothing removes its copies one by one."""
    engine = prompted()
    engine.send(*(placeholder(1, 2, medium="STORAGE") for _ in range(3)))
    engine.send(Removed(hashes=[1], medium="STORAGE"))

    assert engine.index.blocks(engine.index.publisher(engine.source)) == {"GPU": 2, "STORAGE": 1}
    assert engine.index.stats()["copies"] == 0


def test_a_lost_removal_on_the_gpu_leaves_no_block_behind() -> None:
    """A block of a tier that was never credited goes with the tier's removal: nothing keeps it."""
    engine = prompted()
    engine.send(stored([3], 2, b"zzza"), placeholder(3), Removed(hashes=[3]))
    engine.settle()
    engine.send(Removed(hashes=[3], medium="CPU"))

    assert len(engine.ingestor._publishers[engine.source].decode_blocks) == 0


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.sampled_from(MEDIA), st.booleans())))
def test_waiting_blocks_are_bounded_and_leave_once(moves: list[tuple[int, int, str, bool]]) -> None:
    """Whatever comes and goes, a block leaves once, with all its media, of which only host memory counts
    copies; the oldest makes room."""
    waiting, added, left = WaitingBlocks(limit=4), 0, 0
    for name, parent, medium, take in moves:
        if take:
            left += sum(len(block.media) for block in waiting.take([name]))
            continue
        block = WaitingBlock(name, parent, b"aaaa", 4, None, 0.0, [medium])
        there = any(one.hash == name and medium in one.media for one in waiting.old(0.0))
        dropped = waiting.add(block)
        added += medium == "CPU" or not there
        left += len(dropped.media) if dropped else 0
        assert len(waiting) <= 4
    for block in waiting.old(0.0):
        assert waiting.give_up(block)
        left += len(block.media)

    assert (left, len(waiting), waiting.take(range(7))) == (added, 0, [])


def test_leases_are_bounded() -> None:
    """More blocks than the limit shorten the lease instead of taking memory."""
    leases = Leases(3600.0, limit=10)
    for name in range(20):
        leases.add("STORAGE", [name])
    expired = [name for _, names in leases.take_expired() for name in names]

    assert sorted(expired) == list(range(12))
    assert len(leases) == 8


def test_expired_blocks_are_taken_out_in_steps() -> None:
    """A pick may run between the removals of many thousand blocks."""
    leases = Leases(10.0)
    leases.add("STORAGE", range(1000))
    leases.end("STORAGE")
    steps = []
    while leases.expired:
        steps += [len(names) for _, names in leases.take_expired()]

    assert steps == [512, 488]
    assert not leases


def test_blocks_that_a_snapshot_brings_are_leased() -> None:
    """A replica that did not see the events that stored them believes them no longer than another one."""
    engine, copy = prompted(), Learning()
    engine.send(placeholder(1, 2, medium="STORAGE"), placeholder(1), Removed(hashes=[1, 2]))
    copy.ingestor.add_publisher(engine.source, "ns/pod")
    assert heard(copy.ingestor, told(engine.index, [engine.source])) == [engine.source]
    aged(copy, 1800.0)
    half = copy.index.blocks(copy.index.publisher(engine.source))
    aged(copy, 3600.0)

    assert (half, copy.index.blocks(0)) == ({"CPU": 1, "STORAGE": 2}, {"CPU": 1})
