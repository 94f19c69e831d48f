import pytest
from tests.epp.parts import BLOCK

from kvist_epp.index.byte_index import Index
from kvist_epp.index.cached_part import CachedPart, Member, without_end
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.index.tree.matches import Hit

ROOT = (None, None)
TEXT = bytes(range(32, 96)) * 40
PIECE = 4 * BLOCK
"""Bytes of a block: four a token."""


def blocks(count: int) -> list[bytes]:
    """The first blocks of the text."""
    return [TEXT[at : at + PIECE] for at in range(0, count * PIECE, PIECE)]


def lookup(*held: int, precise: bool = True) -> Lookup:
    """Endpoints e0, e1, … that hold so many blocks of the text."""
    index = Index()
    found = Lookup(index, RoutingHistory())
    for number, count in enumerate(held):
        publisher = index.publisher(f"e{number}/0")
        hashes = [1000 * number + at for at in range(count)]
        index.stored(publisher, ROOT, None, hashes, blocks(count), block_size=BLOCK)
        found.join(f"e{number}", Member((publisher,), precise=precise, block_size=BLOCK))
    return found


def test_precise_members_answer_from_their_events() -> None:
    """A trusted endpoint caches what its events reported, to the token."""
    found = lookup(3, 5, 0).look(ROOT, [TEXT])
    assert {key: hit.tokens for key, hit in found.hits.items()} == {"e0": 3 * BLOCK, "e1": 5 * BLOCK}
    assert found.size == len(TEXT)


def test_unknown_members_hold_nothing() -> None:
    """An endpoint that left is absent, though its blocks may still be in the index."""
    some = lookup(3, 5)
    some.leave("e1")
    assert list(some.look(ROOT, [TEXT]).hits) == ["e0"]


def test_credit_on_the_way_extends_the_index() -> None:
    """A prompt just routed counts as far as it agrees, in whole blocks, where events say less."""
    some = lookup(3, 0)
    some._history.note("e0", ROOT, TEXT[: 10 * PIECE + 7])
    some._history.note("e1", ROOT, TEXT[: 2 * PIECE])
    hits = some.look(ROOT, [TEXT]).hits

    assert (hits["e0"].tokens, hits["e0"].indexed) == (10 * BLOCK, 3 * BLOCK)
    assert (hits["e1"].tokens, hits["e1"].indexed) == (2 * BLOCK, 0)


def test_a_repeated_prompt_is_never_wholly_credited() -> None:
    """The engine computes the last token again, so the last block of an identical prompt does not count."""
    some = lookup(0)
    prompt = TEXT[: 8 * PIECE]
    some._history.note("e0", ROOT, prompt)
    assert some.look(ROOT, [prompt]).hits["e0"].tokens == 7 * BLOCK


def test_approximate_members_answer_from_the_history_alone() -> None:
    """An endpoint whose events are not trusted caches what was routed to it; the index's answer is kept for
    comparison."""
    some = lookup(9, precise=False)
    some._history.note("e0", ROOT, TEXT[: 4 * PIECE])
    hit = some.look(ROOT, [TEXT]).hits["e0"]
    assert (hit.tokens, hit.indexed) == (4 * BLOCK, 9 * BLOCK)


def test_the_last_block_of_a_hit_does_not_count_where_it_is_computed_again() -> None:
    """Blocks that events have named, prompts on their way, and approximate mode are alike in this."""
    some = lookup(3, 1, 0, 9)
    some.drops_last_block = True
    for member in some.members.values():
        member.drops_last_block = True
    some.members["e3"].precise = False
    for key in ("e2", "e3"):
        some._history.note(key, ROOT, TEXT[: 5 * PIECE])
    hits = some.look(ROOT, [TEXT]).hits

    assert {key: (hit.tokens, hit.indexed) for key, hit in hits.items()} == {
        "e0": (2 * BLOCK, 2 * BLOCK),
        "e2": (4 * BLOCK, 0),
        "e3": (4 * BLOCK, 8 * BLOCK),
    }


def test_engines_that_compute_last_blocks_again_change_nothing_for_others() -> None:
    """Endpoints that were sent the same prompt are alike otherwise, in whatever order they come."""
    for drops in ("e0", "e1"):
        some = lookup(0, 0)
        some.drops_last_block = some.members[drops].drops_last_block = True
        for key in some.members:
            some._history.note(key, ROOT, TEXT[: 10 * PIECE])
        hits = some.look(ROOT, [TEXT]).hits
        assert {key: hit.tokens // BLOCK for key, hit in hits.items()} == {"e0": 10, "e1": 10} | {drops: 9}


def test_a_hit_is_shortened_by_a_block_of_its_events() -> None:
    """The engine's metrics may name another size: that of other groups, or of one rank."""
    some = lookup(3)
    member, matches = some.members["e0"], some.look(ROOT, [TEXT]).matches[0]
    some.drops_last_block = member.drops_last_block = True
    member.block_size = BLOCK // 2
    raw = matches.of(member.publishers[0])

    assert some.usable("e0", matches, raw) == Hit(2 * BLOCK, 2 * PIECE)
    assert some.look(ROOT, [TEXT]).hits["e0"].tokens == 2 * BLOCK
    assert some.usable("unknown", matches, raw) == raw


def test_the_last_block_in_shared_storage_does_not_count_either() -> None:
    """A hit that goes on in storage ends a block earlier there, whether it is asked for one endpoint or all;
    so does that of the best of several ranks."""
    some = lookup(1, 5)
    some.drops_last_block = some.members["e0"].drops_last_block = True
    some.storages = {"disk": some.members["e1"].publishers[0]}
    some.join_storage("e0", "disk")
    found = some.look(ROOT, [TEXT])
    part, raw = found.hits["e0"], found.matches[0].of(some.members["e0"].publishers[0])

    assert (part.tokens, part.indexed, part.lower) == (4 * BLOCK, 4 * BLOCK, {"SHARED": 4 * BLOCK})
    assert some.usable("e0", found.matches[0], raw) == Hit(4 * BLOCK, 4 * PIECE, {"SHARED": 4 * BLOCK})
    some.part_from_storage("e0")
    some.members["e0"].publishers += some.members["e1"].publishers
    part = some.look(ROOT, [TEXT]).hits["e0"]
    assert (part.tokens, part.rank) == (4 * BLOCK, 1)


@pytest.mark.parametrize(
    ("held", "left"),
    [
        ({"CPU": 64, "SHARED": 32}, {"CPU": 64, "SHARED": 32}),  # the GPU's part is a block shorter
        ({"CPU": 128, "SHARED": 32}, {"CPU": 128, "SHARED": 16}),
        ({"SHARED": 160}, {"SHARED": 144}),
        ({"CPU": 152, "SHARED": 8}, {"CPU": 144}),
    ],
)
def test_slower_tiers_still_follow_a_hit_without_its_last_block(
    held: dict[str, int], left: dict[str, int]
) -> None:
    """The GPU's last block is loaded again; a hit that is all loaded ends a block earlier, in storage
    first."""
    part = CachedPart(160, 640, held, 160)

    assert without_end(part, 16) == CachedPart(144, 576, left, 144)


def test_nothing_is_left_of_a_hit_of_one_block() -> None:
    """An endpoint that would compute all of it holds nothing of the prompt."""
    assert without_end(CachedPart(16, 64, {}, 16), 16) is None
    assert without_end(CachedPart(0, 64, {}, 32), 16) == CachedPart(0, 0, {}, 16)


def test_several_prompts_add_up() -> None:
    """A completion with a list of prompts holds the sum of what each one holds."""
    found = lookup(3).look(ROOT, [TEXT, TEXT, b"something else entirely"])
    assert found.hits["e0"].tokens == 6 * BLOCK
    assert found.size == 2 * len(TEXT) + 23


def test_tokens_are_counted_by_blocks_and_estimated_beyond() -> None:
    """A prompt's tokens: those of the longest match, the rest by its own bytes per token."""
    some = lookup(10)
    assert some.look(ROOT, [TEXT]).tokens == len(TEXT) // 4
    assert some.bytes_per_token == 4.0
