from tests.epp.parts import BLOCK

from kvist_epp.index.byte_index import Index
from kvist_epp.index.lookup import Lookup, Member, without_end
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
    """Of blocks that events have named, of prompts on their way, and in approximate mode."""
    some = lookup(3, 1, 0, 9)
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


def test_slower_tiers_still_follow_a_hit_without_its_last_block() -> None:
    """The GPU's last block is computed or loaded again; a hit that is all loaded is loaded but for its last
    block."""
    both, loaded = Hit(160, 640, {"CPU": 64, "SHARED": 32}), Hit(64, 256, {"CPU": 64})

    assert without_end(both, BLOCK) == Hit(160 - BLOCK, 640 - PIECE, {"CPU": 64, "SHARED": 32})
    assert without_end(loaded, BLOCK) == Hit(64 - BLOCK, 256 - PIECE, {"CPU": 64 - BLOCK})
    assert without_end(Hit(BLOCK, PIECE), BLOCK) == without_end(Hit(), BLOCK) == Hit()


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
