"""Endpoints that hold the same are found at once, and as if each was looked at."""

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.parts import BLOCK

from kvist_epp.index import lookup
from kvist_epp.index.alike_endpoints import AlikeEndpoints
from kvist_epp.index.byte_index import Index
from kvist_epp.index.cached_part import CachedPart, Member
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory

ROOT = (None, None)
TEXT = bytes(range(32, 96)) * 40
PIECE = 4 * BLOCK
ENDPOINTS = st.fixed_dictionaries(
    {
        "blocks": st.sampled_from([0, 3, 3, 3, 7]),
        "ranks": st.sampled_from([1, 1, 1, 2, 0]),
        "precise": st.sampled_from([True, True, True, False]),
        "tier": st.sampled_from(["", "", "", "CPU"]),
        "splits": st.sampled_from([(7,), (7,), (8,), (7, 8)]),
        "routed": st.sampled_from([0, 0, 0, 2, 9]),
        "shares": st.booleans(),
    }
)


@pytest.fixture(autouse=True)
def two_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two endpoints are many here."""
    monkeypatch.setattr(lookup, "MANY", 2)


def pool(drawn: list[dict[str, Any]]) -> Lookup:
    """Return the look-up of these endpoints, which hold beginnings of one text."""
    index = Index()
    found = Lookup(index, RoutingHistory())
    for number, one in enumerate(drawn):
        publishers = tuple(index.publisher(f"e{number}/{rank}") for rank in range(one["ranks"]))
        member = Member(
            publishers, precise=one["precise"], block_size=BLOCK, storage="s" if one["shares"] else None
        )
        found.join(f"e{number}", member)
        for publisher in publishers[-1:]:
            for split in one["splits"]:
                store(index, publisher, one["blocks"], split)
            if one["tier"]:
                store(index, publisher, 9, 7, medium=one["tier"])
        if one["routed"]:
            found._history.note(f"e{number}", ROOT, TEXT[: one["routed"] * PIECE])
    return found


def store(index: Index, publisher: int, count: int, split: int, medium: str = "GPU") -> None:
    """Store so many blocks; those of split 8 have as many tokens in half as many bytes."""
    size = PIECE if split == 7 else PIECE // 2
    texts = [TEXT[at : at + size] for at in range(0, count * size, size)]
    hashes = [1000 * split + at for at in range(count)]
    index.stored(publisher, ROOT, None, hashes, texts, block_size=BLOCK, medium=medium)


@settings(max_examples=300, deadline=None)
@given(drawn=st.lists(ENDPOINTS, min_size=1, max_size=12), flips=st.lists(st.integers(0, 11), max_size=3))
def test_many_endpoints_are_found_as_one_by_one(drawn: list[dict[str, Any]], flips: list[int]) -> None:
    """Ranks, tiers, storage, other token splits, requests on their way and trust that changes included."""
    some = pool(drawn)
    store(some._index, some._index.publisher("storage"), 8, 7, medium="SHARED")
    some.storages = {"s": some._index.publisher("storage")}
    for number in [None, *flips]:
        if number is not None and (key := f"e{number}") in some.members:
            some.set_precise(key, precise=not some.members[key].precise)
        found = some.look(ROOT, [TEXT], learn=False).hits
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lookup, "MANY", sys.maxsize)
            expected = some.look(ROOT, [TEXT], learn=False).hits
        assert found == expected


def test_an_endpoint_that_leaves_or_forgets_is_found_no_longer() -> None:
    """The table of endpoints follows those that join, leave, and lose their blocks."""
    one = {"blocks": 3, "ranks": 1, "precise": True, "tier": "", "splits": (7,), "routed": 0}
    some = pool([{**one, "shares": False}] * 4)
    whole = CachedPart(3 * BLOCK, 3 * PIECE, {}, 3 * BLOCK)
    assert some.look(ROOT, [TEXT]).hits == dict.fromkeys(["e0", "e1", "e2", "e3"], whole)
    some.leave("e1")
    some._index.forget(some.members["e2"].publishers[0])
    assert some.look(ROOT, [TEXT]).hits == dict.fromkeys(["e0", "e3"], whole)
    publisher = some._index.publisher("e4/0")
    some.join("e4", Member((publisher,), block_size=BLOCK))
    store(some._index, publisher, 3, 7)
    assert some.look(ROOT, [TEXT]).hits == dict.fromkeys(["e0", "e3", "e4"], whole)


def test_bits_become_endpoints_wherever_they_are() -> None:
    """Bit sets of a thousand publishers name their endpoints, in order of the bits."""
    table = AlikeEndpoints()
    bits = {number: 1 << (3 * number) for number in range(1000)}
    table.update([(number, f"e{number}") for number in range(0, 1000, 2)], bits)
    assert table.bits == sum(bits[number] for number in range(0, 1000, 2))
    assert table.keys(0) == []
    assert table.keys(table.bits) == [f"e{number}" for number in range(0, 1000, 2)]
    assert table.keys(bits[998] | bits[4]) == ["e4", "e998"]


def test_a_system_prompt_in_host_memory_of_all_is_one_group() -> None:
    """However many engines have copied it there, and though one holds more, what is found stays small."""
    some = pool([])
    index = some._index
    for number in range(50):
        publisher = index.publisher(f"e{number}/0")
        some.join(f"e{number}", Member((publisher,), block_size=BLOCK))
        store(index, publisher, 3, 7, medium="CPU")
        if number % 2:
            store(index, publisher, 2, 7)
    store(index, some.members["e0"].publishers[0], 9, 7)
    found = some.look(ROOT, [TEXT])
    assert len(found.matches[0].groups) == 3
    assert found.hits["e0"] == CachedPart(9 * BLOCK, 9 * PIECE, {}, 9 * BLOCK)
    for number in range(1, 50):
        lower = {"CPU": BLOCK if number % 2 else 3 * BLOCK}
        assert found.hits[f"e{number}"] == CachedPart(3 * BLOCK, 3 * PIECE, lower, 3 * BLOCK)
