"""Snapshots as bytes, whole, cut or corrupted: what is applied is right, or nothing is applied."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.index.test_index_histories import check
from tests.fakes.copying import heard, told

from kvist_epp.errors import SnapshotError
from kvist_epp.index.byte_index import Index
from kvist_epp.index.snapshot.parts import Begin, Content, Counted, End, Extra, Holding, Part
from kvist_epp.kvevents.decode_blocks import BlockTokens, DecodeBlock, DecodeBlockState
from kvist_epp.replicas.snapshot_chunks import CHUNK_PARTS, ChunkReader, ChunkWriter

PODS = ("a/0", "b/0", "c/0")
ROOT = (None, None)

texts = st.text(max_size=8)
names = st.integers(0, (1 << 64) - 1)
small = st.integers(0, (1 << 32) - 1)
roots = st.tuples(st.none() | texts, st.none() | texts)
pieces = st.builds(BlockTokens, st.lists(small, max_size=3), st.binary(max_size=5))
block = st.builds(
    DecodeBlock,
    hash=names,
    parent=st.none() | names,
    root=roots,
    tokens=pieces,
    block_size=small,
    depth=st.none() | small,
    session=st.none() | texts,
    state=st.sampled_from(DecodeBlockState),
    copies=small,
    media=st.lists(texts, max_size=2),
)
counted = st.lists(st.builds(Counted, texts, names, small), max_size=3).map(tuple)
parts = st.one_of(
    st.builds(Begin, texts, names, st.binary(max_size=64), st.none() | small),
    st.builds(
        Content,
        number=small,
        parent=small,
        at=st.integers(-1, 63),
        root=roots,
        block_size=small,
        hashes=st.lists(names, max_size=4).map(tuple),
        sizes=st.lists(small, max_size=4).map(tuple),
        text=st.binary(max_size=9),
    ),
    st.builds(
        Holding,
        content=small,
        reach=st.integers(1, 64),
        media=st.lists(st.tuples(texts, names), max_size=3).map(tuple),
        names=st.none() | st.lists(names, min_size=1, max_size=4).map(tuple),
    ),
    st.builds(Extra, counted, counted, st.lists(block, max_size=2).map(tuple)),
    st.builds(End, names, names),
)


def packed(row: Sequence[Part]) -> list[bytes]:
    """Return the chunks of a sequence of parts."""
    writer = ChunkWriter()
    return [chunk for part in row if (chunk := writer.add(part))] + [writer.finish()]


def unpacked(chunks: Sequence[bytes]) -> list[Part]:
    """Return the parts of these chunks."""
    reader = ChunkReader()
    return [part for chunk in chunks for part in reader.parts(chunk)]


@settings(max_examples=200)
@given(st.lists(parts, max_size=2 * CHUNK_PARTS))
def test_parts_are_read_as_they_were_written(row: list[Part]) -> None:
    """Parts of every kind survive encoding and decoding, in order, over any number of chunks."""
    found = unpacked(packed(row))

    assert list(map(repr, found)) == list(map(repr, row))


def filled() -> Index:
    """Return an index of three publishers: common prompts, a slower tier, a hole, copies and media."""
    index = Index()
    for number, pod in enumerate(PODS):
        publisher = index.publisher(pod)
        for chain in range(8):
            shared = chain % 2
            start = 1 + 1000 * chain + (0 if shared else 100_000 * number)
            hashes = list(range(start, start + 90))
            blocks = [b"%d/%d " % (chain if shared else start, at) for at in range(90)]
            index.stored(publisher, ROOT, None, hashes, blocks, block_size=16)
            index.held(publisher, hashes[:20], "CPU")
            index.removed(publisher, hashes[5:6])
            index.stored(publisher, ROOT, hashes[9], hashes[10:12], blocks[10:12], block_size=16)
            index.opaque(publisher, hashes[20], [start + 500, start + 501])
    return index


def publishers(index: Index) -> list[dict[str, int]]:
    """Return what each publisher holds."""
    return [index.blocks(index.publisher(pod)) for pod in PODS]


FULL = filled()
PARTS = list(told(FULL, PODS))
CHUNKS = packed(PARTS)


def taken(chunks: Sequence[bytes]) -> tuple[Index, list[str], str]:
    """Apply these chunks to an index; return the index, the publishers that were complete, and the error."""
    index, complete = Index(), list[str]()
    for pod in PODS:
        index.publisher(pod)
    try:
        found = unpacked(chunks)
    except SnapshotError as error:
        found, wrong = _before(chunks), str(error)
    else:
        wrong = ""
    try:
        complete += heard(index, found)
    except SnapshotError as error:
        return index, [], str(error)
    return index, complete, wrong


def _before(chunks: Sequence[bytes]) -> list[Part]:
    reader, found = ChunkReader(), list[Part]()
    for chunk in chunks:
        try:
            found += list(reader.parts(chunk))
        except SnapshotError:
            break
    return found


def test_a_snapshot_of_several_chunks_gives_the_same_index() -> None:
    """Holes, tiers, copies and media are included."""
    index, complete, wrong = taken(CHUNKS)

    assert len(CHUNKS) > 1
    assert (complete, wrong, publishers(index)) == (list(PODS), "", publishers(FULL))
    assert index.stats() | {"segments": 0} == FULL.stats() | {"segments": 0}
    check(index)


@pytest.mark.parametrize("length", range(len(CHUNKS) + 1))
def test_a_snapshot_cut_after_any_chunk_leaves_whole_publishers_or_none(length: int) -> None:
    """A publisher that was complete is right, any other one is empty."""
    index, complete, _ = taken(CHUNKS[:length])

    for pod, found, full in zip(PODS, publishers(index), publishers(FULL), strict=True):
        assert found == (full if pod in complete else {})
    while index.sweep(100):
        pass
    check(index)


@given(st.integers(0, len(PARTS)))
def test_a_snapshot_cut_after_any_part_leaves_whole_publishers_or_none(length: int) -> None:
    """The cut may be in the middle of a chunk; publishers that are not wanted are skipped."""
    index, other = Index(), Index()
    for pod in PODS:
        index.publisher(pod), other.publisher(pod)
    complete = heard(index, PARTS[:length])
    heard(other, PARTS[:length], wanted=lambda pod: pod == PODS[1])

    for pod, found, full in zip(PODS, publishers(index), publishers(FULL), strict=True):
        assert found == (full if pod in complete else {})
    assert [bool(blocks) for blocks in publishers(other)] == [False, PODS[1] in complete, False]
    check(index)


@settings(max_examples=150)
@given(st.integers(0, len(CHUNKS) - 1), st.data())
def test_corrupt_bytes_are_refused(at: int, data: st.DataObject) -> None:
    """Any changed byte is detected by the checksum, by the order, or by the parts themselves."""
    chunk = CHUNKS[at]
    place = data.draw(st.integers(0, len(chunk) - 1))
    changed = bytes([chunk[place] ^ data.draw(st.integers(1, 255))])
    corrupt = [*CHUNKS[:at], chunk[:place] + changed + chunk[place + 1 :], *CHUNKS[at + 1 :]]
    index, complete, wrong = taken(corrupt)

    if not wrong:  # an unknown field was added: the parts are the same
        assert list(map(repr, unpacked(corrupt))) == list(map(repr, unpacked(CHUNKS)))
    for pod, found, full in zip(PODS, publishers(index), publishers(FULL), strict=True):
        assert found in ({}, full) or pod not in complete


@settings(max_examples=200)
@given(st.permutations(range(len(CHUNKS))))
def test_chunks_out_of_order_are_refused(order: list[int]) -> None:
    """Chunks carry numbers, so that only the right order is accepted."""
    _, _, wrong = taken([CHUNKS[at] for at in order])

    assert bool(wrong) == (order != sorted(order))


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PARTS), max_size=60))
def test_parts_in_any_order_leave_a_consistent_index(row: list[Part]) -> None:
    """If another replica sends nonsense, no publisher holds blocks unless its section was complete."""
    index = Index()
    for pod in PODS:
        index.publisher(pod)
    try:
        complete = heard(index, row)
    except SnapshotError:
        complete = []
    while index.sweep(100):
        pass
    check(index)

    assert all(not blocks for pod, blocks in zip(PODS, publishers(index), strict=True) if pod not in complete)
