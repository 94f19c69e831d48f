"""KV event messages read with a vocabulary: the same events as without one."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.engines.vllm.test_kv_events import stored_map

from kvist_epp.engines.vllm.event_decoder import EventDecoder
from kvist_epp.engines.vllm.event_encoder import Form, encode
from kvist_epp.engines.vllm.kv_events import Batch, Cleared, Event, Removed, Stored, decode
from kvist_epp.errors import EventError

pack = msgspec.msgpack.encode

PIECES = [
    b"a",
    b"",
    b"A",
    b"41",
    b"A",
    b"the",
    b"the",
    "\u00e9".encode(),
    *[b"%d" % n for n in range(70_000)],
]
"""Ids of every width of msgpack; some do not exist, and some have the bytes of another one."""

DECODER = EventDecoder(PIECES)

known = st.sampled_from([0, 2, 4, 5, 6, 7, 127, 128, 255, 256, 65_535, 65_536, len(PIECES) - 1])
ids = known | st.sampled_from([1, len(PIECES), 2**31])
names = st.integers(0, 2**64 - 1)


@st.composite
def stored(draw: st.DrawFn) -> Stored:
    hashes = draw(st.lists(names, min_size=1, max_size=3))
    return Stored(
        hashes=hashes,
        parent=draw(st.none() | names),
        token_ids=draw(st.lists(draw(st.sampled_from([known, ids])), max_size=6)),
        block_size=draw(st.integers(0, 4)),
        medium=draw(st.sampled_from(["GPU", "CPU"])),
        lora=draw(st.none() | st.just("adapter")),
        opaque_from=draw(st.none() | st.integers(0, len(hashes) - 1)),
        session=draw(st.none() | st.text()),
    )


removed = st.builds(
    Removed,
    hashes=st.lists(names, min_size=1, max_size=3),
    medium=st.sampled_from(["GPU", "CPU", "SHARED"]),
    group=st.sampled_from([None, 0, 1]),
)
batches = st.builds(
    Batch,
    ts=st.floats(allow_nan=False),
    rank=st.none() | st.integers(0, 3),
    events=st.lists(stored() | removed | removed | st.just(Cleared()), max_size=12),
)


def flat(events: list[Event]) -> list[object]:
    """Return the events with ids, and removals block by block."""
    found: list[object] = []
    for event in events:
        if isinstance(event, Removed):
            found += [(event.medium, event.group, name) for name in event.hashes]
        elif isinstance(event, Stored) and event.pieces is not None:
            found.append(msgspec.structs.replace(event, token_ids=DECODER.ids(event.pieces), pieces=None))
        else:
            found.append(event)
    return found


@given(batches, st.sampled_from(["map", "array"]))
def test_a_vocabulary_changes_no_event(batch: Batch, form: Form) -> None:
    """With ids in place of their bytes, and block by block, the events are those that are read without a
    vocabulary, and no removal is lost from the count."""
    payload = encode(batch, form)
    plain, found = decode(payload), DECODER.decode(payload)

    assert flat(found.events) == flat(plain.events)
    assert (found.ts, found.rank, found.unknown, found.malformed) == (plain.ts, plain.rank, 0, 0)
    counted = sum(event.events for event in found.events if isinstance(event, Removed))
    assert counted == sum(isinstance(event, Removed) for event in plain.events)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("form", ["map", "array"])
def test_tokens_behind_blocks_are_read_alike(blocks: int, form: str) -> None:
    """With a vocabulary, as bytes or as ids, blocks have the same tokens as without."""
    tokens, behind = [5, 0, 70_000, 8][: 2 * blocks], [[70_000], [2]][-blocks:]
    fields = stored_map(block_hashes=[1, 2][:blocks], token_ids=tokens, lookahead_token_ids=behind)
    array = ["BlockStored", fields["block_hashes"], None, tokens, 2, None, "GPU", *[None] * 8, behind]
    payload = pack([0.0, [fields if form == "map" else array], 0])

    [found], [plain] = DECODER.decode(payload).events, decode(payload).events
    assert isinstance(found, Stored)
    assert isinstance(plain, Stored)
    if found.pieces is not None:
        found = msgspec.structs.replace(
            found, token_ids=DECODER.ids(found.pieces), head=DECODER.ids(found.head), pieces=None
        )
    assert found == plain
    assert plain.head == [5]


def test_bytes_are_read_in_place_of_ids() -> None:
    """An event of several blocks on the GPU has the bytes of its tokens, one of a single block has both."""
    several = Stored(hashes=[1, 2], parent=None, token_ids=[5, 0, 70_000, 8], block_size=2)
    single = Stored(hashes=[3], parent=2, token_ids=[0, 5], block_size=2)

    first, second = DECODER.decode(encode(Batch(ts=0.0, events=[several, single]))).events

    assert isinstance(first, Stored)
    assert (first.token_ids, first.pieces, first.tokens) == ([], [PIECES[n] for n in (5, 0, 70_000, 8)], 4)
    assert second == msgspec.structs.replace(single, pieces=[PIECES[0], PIECES[5]])


def test_neighbouring_removals_are_one_event() -> None:
    """An engine's event for each evicted block costs a step for each run of them only."""
    events: list[Event] = [Removed(hashes=[n]) for n in range(5)]
    more: list[Event] = [Removed(hashes=[7], medium="CPU"), Removed(hashes=[8])]

    found = DECODER.decode(encode(Batch(ts=0.0, events=[*events, *more]))).events

    assert found == [Removed(hashes=[0, 1, 2, 3, 4], events=5), *more]


@pytest.mark.parametrize("bad", [[1, 0], [len(PIECES), 0], [-1, 0], ["text", 0], [0.5, 0], [None, 0]])
def test_ids_that_do_not_exist_are_read_as_without_a_vocabulary(bad: list[Any]) -> None:
    """An unknown id, or what is none, does not cost the events around it."""
    events = [stored_map(), stored_map(block_hashes=[2, 3], token_ids=bad, block_size=1), ["Novel"]]
    payload = pack([1.0, events, 0])

    assert DECODER.decode(payload) == decode(payload)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_batch_or_an_event_error(payload: bytes) -> None:
    """Garbage from a socket raises EventError and nothing else."""
    try:
        actual: object = DECODER.decode(payload)
    except EventError:
        actual = None

    assert actual is None or isinstance(actual, Batch)


@given(batches)
def test_without_a_vocabulary_ids_are_read(batch: Batch) -> None:
    """A decoder that msgspec does not support, or that has no vocabulary, returns what ``decode`` does."""
    assert EventDecoder([]).decode(encode(batch)) == decode(encode(batch))


def test_pieces_of_a_part_are_those_of_its_blocks() -> None:
    """A part of an event has the bytes of its own tokens."""
    event = Stored(
        hashes=[1, 2, 3],
        parent=None,
        token_ids=[],
        block_size=2,
        pieces=[*map(PIECES.__getitem__, range(2, 8))],
    )

    assert event.slice(1, 3).pieces == PIECES[4:8]
