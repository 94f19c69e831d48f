"""KV event messages in both encodings."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.engines.vllm.event_encoder import Form, encode
from kvist_epp.engines.vllm.extra_keys import Media, read_extra_keys
from kvist_epp.engines.vllm.kv_events import Batch, Cleared, Removed, Stored, decode, rank_of
from kvist_epp.errors import EventError

pack = msgspec.msgpack.encode

hashes = st.integers(0, 2**64 - 1)
media = st.sampled_from(["GPU", "CPU", "STORAGE", "SHARED", "FS"])
groups = st.none() | st.integers(0, 7)


@st.composite
def stored(draw: st.DrawFn) -> Stored:
    names = draw(st.lists(hashes, min_size=1, max_size=5))
    parent = draw(st.none() | hashes)
    lora = draw(st.none() | st.sampled_from(["adapter", "other"]))
    return Stored(
        hashes=names,
        parent=parent,
        token_ids=draw(st.lists(st.integers(0, 2**31), max_size=8)),
        block_size=draw(st.integers(0, 1024)),
        medium=draw(media),
        lora=lora,
        group=draw(groups),
        kind=draw(st.none() | st.sampled_from(["full_attention", "mamba"])),
        salt=draw(st.none() | st.text(min_size=1)) if parent is None else None,
        opaque_from=draw(st.none() | st.integers(0, len(names) - 1)),
        session=draw(st.none() | st.text()),
    )


events = st.lists(
    stored() | st.builds(Removed, hashes=st.lists(hashes), medium=media, group=groups) | st.just(Cleared()),
    max_size=6,
)
batches = st.builds(Batch, ts=st.floats(allow_nan=False), rank=st.none() | st.integers(0, 15), events=events)


@given(batches, st.sampled_from(["map", "array"]))
def test_decode_undoes_encode_in_both_forms(batch: Batch, form: Form) -> None:
    """Encoded batches of both generations of engines decode to the same batch."""

    assert decode(encode(batch, form)) == batch


@given(st.binary(max_size=80))
def test_any_bytes_are_a_batch_or_an_event_error(payload: bytes) -> None:
    """Garbage from a socket raises EventError and nothing else."""
    try:
        actual = type(decode(payload))
    except EventError:
        actual = Batch

    assert actual is Batch


@given(batches, st.data())
def test_a_cut_message_is_a_batch_or_an_event_error(batch: Batch, data: st.DataObject) -> None:
    """Half a msgpack is refused as a whole: it has no last byte, so it cannot be complete."""
    payload = encode(batch)
    cut = data.draw(st.integers(0, len(payload) - 1))

    with pytest.raises(EventError):
        decode(payload[:cut])


def stored_map(**fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [7, 8],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **fields,
    }


def only(event: Any) -> Any:
    return decode(pack([1.0, [event], 0])).events[0]


PLAIN = Stored(hashes=[1], parent=None, token_ids=[7, 8], block_size=2)


def test_map_encoded_events_are_read() -> None:
    """Events are maps since vLLM 0.26; a reader of arrays only would learn nothing (AIBrix)."""

    assert only(stored_map()) == PLAIN


def test_positional_events_are_read_at_every_age() -> None:
    """Old releases send fewer fields: without medium, without adapter name, with everything."""
    old = ["BlockStored", [1], None, [7, 8], 2]

    assert [only(old), only([*old, None]), only([*old, None, "GPU", None])] == [PLAIN] * 3


def test_unknown_keys_and_longer_arrays_are_ignored() -> None:
    """Unknown keys and additional elements, as newer engines may send, are ignored."""
    newer = stored_map(locality="LOCAL", ownership="x", brand_new={"a": 1})
    longer = ["BlockStored", [1], None, [7, 8], 2, None, "GPU", None, *[None] * 8, "more"]

    assert [only(newer), only(longer)] == [PLAIN, PLAIN]


BEHIND: dict[str, Any] = {
    "block_hashes": [1, 2],
    "token_ids": [1, 2, 3, 4, 5, 6],
    "block_size": 3,
    "lookahead_token_ids": [[4, 5], [7, 8]],
}
"""Two blocks whose hashes cover two tokens behind each, as engines with drafts have them."""


def test_blocks_are_the_tokens_that_their_hashes_cover_last() -> None:
    """With tokens behind blocks, each block is as much later; a prompt's first ones stand in front."""
    array = ["BlockStored", [1, 2], None, [1, 2, 3, 4, 5, 6], 3, None, "GPU", None, *[None] * 7]
    for event in (only(stored_map(**BEHIND)), only([*array, [[4, 5], [7, 8]]])):
        assert (event.head, event.token_ids, event.tokens) == ([1, 2], [3, 4, 5, 6, 7, 8], 6)
        first, second = event.slice(0, 1), event.slice(1, 2)
        assert (first.head, first.token_ids, first.parent) == ([1, 2], [3, 4, 5], None)
        assert (second.head, second.token_ids, second.parent) == ([], [6, 7, 8], 1)
    further = only(stored_map(**BEHIND, parent_block_hash=9))
    assert (further.head, further.token_ids) == ([], [3, 4, 5, 6, 7, 8])


def test_media_behind_a_block_are_in_it() -> None:
    """A medium that begins in the tokens behind a block is a part of its text, and of no other's."""
    keys = [[["late", 2], ["behind", 4]], [["behind", 1], ["last", 4]]]
    event = only(stored_map(**BEHIND, parent_block_hash=9, extra_keys=keys))
    assert (event.media, event.opaque_from) == (((0, "late"), (2, "behind"), (5, "last")), None)
    assert only(stored_map(**BEHIND, extra_keys=[[["early", 1]], None])).opaque_from == 0


@pytest.mark.parametrize("behind", [[[4, 5]], [[4, 5], [7]], [[4, 5, 6, 7], [7, 8, 9, 10]]])
def test_tokens_behind_blocks_that_do_not_match_them_are_refused(behind: list[list[int]]) -> None:
    """An event is refused if it is not known which text a hash names; others of the batch stand."""
    batch = decode(pack([1.0, [stored_map(**BEHIND | {"lookahead_token_ids": behind}), stored_map()], 0]))
    assert (batch.events, batch.malformed) == ([PLAIN], 1)


def test_tokens_behind_blocks_of_a_group_with_a_window_cost_no_event() -> None:
    """Such events leave blocks out, but their hashes count."""
    event = only(stored_map(**BEHIND | {"block_hashes": [2], "lookahead_token_ids": [[7, 8]]}))
    assert (event.hashes, event.token_ids, event.head) == ([2], [1, 2, 3, 4, 5, 6], [])


@pytest.mark.parametrize("batch", [[1.0, []], [1, [], None], [1.0, [], 3, "more"]])
def test_batches_of_two_three_and_more_elements(batch: list[Any]) -> None:
    """The rank may be missing, and more may follow."""

    assert decode(pack(batch)).events == []


def test_unknown_event_types_are_counted_and_the_rest_stands() -> None:
    """An event type of the future does not cost the events around it."""
    batch = decode(pack([1.0, [{"type": "BlockMoved", "x": 1}, stored_map(), ["Novel", 1]], 0]))

    assert (batch.events, batch.unknown, batch.malformed) == ([PLAIN], 2, 0)


@pytest.mark.parametrize(
    "bad",
    [
        stored_map(block_hashes=["text"]),
        stored_map(block_hashes=[b""]),
        stored_map(token_ids=[-1]),
        stored_map(token_ids="text"),
        {"type": "BlockStored"},
        ["BlockStored"],
        17,
        None,
        {},
        {"type": 3},
    ],
)
def test_a_bad_event_does_not_cost_the_others(bad: Any) -> None:
    """Hashes and ids of the wrong type spoil their own event only."""
    batch = decode(pack([1.0, [stored_map(), bad, ["AllBlocksCleared"]], 0]))

    assert (batch.events, batch.malformed) == ([PLAIN, Cleared()], 1)


def test_hashes_are_unsigned_64_bit_numbers_in_every_form() -> None:
    """Ints stay, negative ones of old releases are masked, bytes give their last 8, big endian."""
    event = only(stored_map(block_hashes=[5, -1, b"\x01" * 24 + b"\0\0\0\0\0\0\1\2", b"\x03"]))

    assert event.hashes == [5, 2**64 - 1, 258, 3]


def test_parents_and_removals_get_the_same_hashes() -> None:
    """A parent or a removal that were shortened otherwise would never meet their block."""
    long = b"\xff" * 24 + b"\0\0\0\0\0\0\0\7"

    assert only(stored_map(parent_block_hash=long)).parent == 7
    assert only({"type": "BlockRemoved", "block_hashes": [long, -2], "medium": None}) == Removed(
        hashes=[7, 2**64 - 2]
    )


@pytest.mark.parametrize(
    ("sent", "read"), [(None, "GPU"), ("cpu", "CPU"), ("Storage", "STORAGE"), ("disk", "DISK")]
)
def test_media_are_upper_case_and_gpu_when_absent(sent: str | None, read: str) -> None:
    """Connectors spell media as they like."""

    assert only(stored_map(medium=sent)).medium == read


@pytest.mark.parametrize(
    ("locality", "read"), [("REMOTE", "SHARED"), ("LOCAL", "STORAGE"), (None, "STORAGE"), ("new", "STORAGE")]
)
def test_storage_of_others_is_a_medium_of_its_own(locality: str | None, read: str) -> None:
    """Storage that other engines read, too, differs from an engine's own disk, in stores and removals."""
    removal = {"type": "BlockRemoved", "block_hashes": [1], "medium": "STORAGE", "locality": locality}

    assert only(stored_map(medium="STORAGE", locality=locality)).medium == read
    assert only(removal).medium == read
    assert only(stored_map(medium="CPU", locality=locality)).medium == "CPU"


def test_an_adapter_without_a_name_is_not_the_base_model() -> None:
    """An engine that sends only ``lora_id`` must not have its blocks credited to the base model."""

    assert only(stored_map(lora_id=3)).lora == "lora_id=3"


@pytest.mark.parametrize(
    ("keys", "lora", "at_root", "expected"),
    [
        ([["salt"], None], None, True, ("salt", None, ())),
        ([["ad"], ["ad"]], "ad", True, (None, None, ())),
        ([["ad", "salt"], ["ad"]], "ad", True, ("salt", None, ())),
        ([["ad", "ad"], ["ad"]], "ad", True, ("ad", None, ())),
        ([None, [["image", 3]], None], None, True, (None, None, ((7, "image"),))),
        ([[["image", 3], "salt"]], None, True, ("salt", None, ((3, "image"),))),
        (
            [[["image", 3]], [["image", -1], ["b", 0], ["b", 2]]],
            None,
            True,
            (None, None, ((3, "image"), (4, "b"), (6, "b"))),
        ),
        ([[["image", -9]]], None, False, (None, None, ())),
        ([[["image", 3]], [b"digest"]], None, False, (None, 1, ((3, "image"),))),
        ([[["image", True]]], None, True, (None, 0, ())),
        ([None, [b"digest"]], None, False, (None, 1, ())),
        ([["salt"]], None, False, (None, 0, ())),
        ([None, ["salt"]], None, True, (None, 1, ())),
        ([["one", "two"]], None, True, (None, 0, ())),
        ([[7]], None, True, (None, 0, ())),
        ([[["lora", "ad", "/path"], ["cache_salt", "salt"]]], "ad", True, ("salt", None, ())),
        ([[["mm", "image", 3]]], None, True, (None, None, ((3, "image"),))),
        ([[["prompt_embeds", b"digest"]]], None, True, (None, 0, ())),
        ([[["cache_salt", 5]]], None, True, (None, None, ())),
        ([], None, True, (None, None, ())),
    ],
)
def test_extra_keys_are_taken_apart_safely(
    keys: list[Any], lora: str | None, at_root: bool, expected: tuple[str | None, int | None, Media]
) -> None:
    """Untagged and tagged: adapter, salt, media, embeddings; what is unclear makes a block opaque."""

    assert read_extra_keys(keys, lora, 4, at_root=at_root) == expected


def test_salt_and_media_of_an_event() -> None:
    """A salted block belongs to its tenant's root; dropping the extra keys would share it (SMG, llm-d)."""
    event = only(stored_map(extra_keys=[["tenant"]]))

    assert (event.salt, event.opaque_from) == ("tenant", None)


def test_the_rank_is_known_without_reading_the_events() -> None:
    """In bind mode, ranks share a topic."""

    assert [rank_of(pack([1.0, [17], 3])), rank_of(pack([1.0, []])), rank_of(b"\xc1")] == [3, None, None]


def test_deep_nesting_is_an_event_error() -> None:
    """A message that nests without end neither recurses without end nor kills the reader."""
    with pytest.raises(EventError):
        decode(b"\x91" * 100_000)
