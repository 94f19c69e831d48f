"""Promises of an index: one suite for the byte index and for its naive implementation.

Many tests name a weakness that users of other indexes reported; such a test fails in an index that has it.
"""

import pytest
from tests.oracle import NaiveIndex

from kvist_epp.index.byte_index import Index, Root
from kvist_epp.index.tree.matches import Hit

PLAIN: Root = (None, None)
AnyIndex = Index | NaiveIndex


@pytest.fixture(params=[Index, NaiveIndex])
def index(request: pytest.FixtureRequest) -> AnyIndex:
    """Three publishers, 0 to 2."""
    made: AnyIndex = request.param()
    assert [made.publisher(f"pod/{number}") for number in range(3)] == [0, 1, 2]
    return made


def store(
    index: AnyIndex,
    who: int,
    text: str,
    *,
    after: int | None = None,
    root: Root = PLAIN,
    medium: str = "GPU",
    size: int = 4,
    first: int | None = None,
) -> list[int]:
    """Store words as blocks; hashes are those of the words so far, or count from ``first``."""
    blocks = [word.encode() for word in text.split("|")]
    hashes = [hash((after, root, size, *blocks[: n + 1])) % 2**64 for n in range(len(blocks))]
    if first is not None:
        hashes = list(range(first, first + len(blocks)))
    assert index.stored(who, root, after, hashes, blocks, block_size=size, medium=medium)
    return hashes


def tokens(index: AnyIndex, text: str, root: Root = PLAIN) -> list[int]:
    """Matched tokens of the three publishers."""
    matches = index.match(root, text.encode())
    return [matches.of(number).tokens for number in range(3)]


def test_a_prefix_is_found_as_far_as_it_is_held(index: AnyIndex) -> None:
    """Tokens and bytes of the longest held prefix, for each publisher its own."""
    store(index, 0, "once |upon |a time")
    store(index, 1, "once |upon |no time")
    matches = index.match(PLAIN, b"once upon a time in")

    assert [matches.of(number) for number in range(3)] == [Hit(12, 16), Hit(8, 10), Hit()]


def test_nothing_matches_nothing(index: AnyIndex) -> None:
    """An empty index and an empty prompt give no hits."""
    assert tokens(index, "once") == [0, 0, 0]
    store(index, 0, "once |upon")
    assert tokens(index, "") == [0, 0, 0]
    assert tokens(index, "twice upon") == [0, 0, 0]


def test_a_prompt_cached_to_its_last_byte_gives_one_block_less(index: AnyIndex) -> None:
    """vLLM always computes the last token, so the block it is in is not reused."""
    store(index, 0, "once |upon |a time")

    assert tokens(index, "once upon a time") == [8, 0, 0]
    assert tokens(index, "once upon a time!") == [12, 0, 0]


def test_a_chain_grows_event_by_event(index: AnyIndex) -> None:
    """Chunks of a prefill and blocks of a decode are joined by their parents' hashes."""
    last = None
    for number in range(200):
        assert index.stored(0, PLAIN, last, [number], [b"%03d" % number], block_size=4)
        last = number
    prompt = b"".join(b"%03d" % number for number in range(200))

    assert index.match(PLAIN, prompt + b".").of(0) == Hit(800, 600)


def test_depth_and_tail_say_where_a_block_ends(index: AnyIndex) -> None:
    """The tokens before a block's end, and the last bytes of the text there."""
    hashes = store(index, 0, "|".join(f"{number:03d}" for number in range(200)))

    assert [index.depth(hashes[at], 0) for at in (0, 63, 64, 199)] == [4, 256, 260, 800]
    assert index.tail(hashes[64], 7, 0) == b"2063064"
    assert index.tail(hashes[1], 100, 0) == b"000001"
    assert (index.depth(7, 0), index.tail(7, 3, 0)) == (None, None)


# The traps of DESIGN section 1


def test_trap_several_token_splits_of_the_same_bytes(index: AnyIndex) -> None:
    """A prompt follows every split of its bytes into blocks, and the best one counts."""
    store(index, 0, "ab|cd|x")
    store(index, 0, "abc|de|fg")
    store(index, 1, "a|bcde|fg|h")

    assert tokens(index, "abcdefgh!") == [12, 16, 0]


def test_trap_a_split_that_goes_on_inside_a_segment(index: AnyIndex) -> None:
    """A chain that leaves another in its middle is tried although the other matches further."""
    stem = store(index, 0, "ab|cd|ef|zz")
    store(index, 1, "ab")
    store(index, 1, "c|de|f|gh|ij", after=stem[0])

    assert tokens(index, "abcdefghij!") == [12, 24, 0]


def test_trap_same_bytes_of_other_tokens_are_two_blocks(index: AnyIndex) -> None:
    """If one of two blocks of equal text is removed, the other still matches."""
    assert index.stored(0, PLAIN, None, [1, 2], [b"ab", b"cd"], block_size=4)
    assert index.stored(0, PLAIN, None, [8, 9], [b"ab", b"ef"], block_size=4)
    assert index.blocks(0) == {"GPU": 4}
    assert [tokens(index, text)[0] for text in ("abcd!", "abef!")] == [8, 8]
    assert index.removed(0, [2, 1]) == 2
    assert tokens(index, "abef!") == [8, 0, 0]
    assert index.removed(0, [9, 8]) == 2
    assert tokens(index, "abef!") == [0, 0, 0]


def test_trap_a_block_stored_twice_is_there_until_removed_twice(index: AnyIndex) -> None:
    """Presence is counted per hash and medium: two requests may have computed the same block."""
    names = store(index, 0, "ab|cd")
    store(index, 0, "ab|cd")
    assert index.blocks(0) == {"GPU": 2}
    assert index.removed(0, names[::-1]) == 2
    assert tokens(index, "abcd!") == [8, 0, 0]
    assert index.removed(0, names[::-1]) == 2
    assert tokens(index, "abcd!") == [0, 0, 0]
    assert index.removed(0, names[::-1]) == 0


def test_trap_blocks_with_media_never_match_nor_do_those_after_them(index: AnyIndex) -> None:
    """A prompt with an image matches up to it; what follows it is known as a parent, and no more."""
    names = store(index, 0, "look: ")
    index.opaque(0, names[0], [77])
    assert index.stored(0, PLAIN, 77, [78, 79], [b"what|", b"else|"], block_size=4)
    assert tokens(index, "look: what|else|!") == [4, 0, 0]
    assert tokens(index, "what|else|!") == [0, 0, 0]
    assert index.blocks(0) == {"GPU": 4}
    assert index.stored(0, PLAIN, 79, [80], [b"more"], block_size=4)
    assert index.removed(0, [80, 79, 78, 77]) == 4
    assert not index.stored(0, PLAIN, 79, [80], [b"more"], block_size=4)


def test_trap_a_restarted_engine_holds_nothing(index: AnyIndex) -> None:
    """``forget`` is effective at once, before any memory is released, and the publisher starts empty."""
    names = store(index, 0, "ab|cd")
    store(index, 1, "ab|cd")
    index.forget(0)
    assert tokens(index, "abcd!") == [0, 8, 0]
    assert index.blocks(0) == {}
    assert not index.stored(0, PLAIN, names[0], [5], [b"zz"], block_size=4)
    store(index, 0, "ab")
    index.sweep(100)
    assert tokens(index, "abcd!") == [4, 8, 0]


# What users report of other indexes


@pytest.mark.parametrize("medium", ["GPU", "gpu", None])
def test_03_04_all_blocks_cleared_is_acted_on(index: AnyIndex, medium: str | None) -> None:
    """A cleared cache matches nothing, and only that publisher's (3, 4)."""
    store(index, 0, "ab|cd")
    store(index, 1, "ab|cd")
    index.cleared(0, medium=medium)

    assert tokens(index, "abcd!") == [0, 8, 0]
    assert index.blocks(0) == {}


def test_03_04_clearing_the_gpu_leaves_what_is_on_slower_media(index: AnyIndex) -> None:
    """Blocks offloaded to the CPU survive a reset of the GPU's prefix cache, and the reverse (3, 4)."""
    names = store(index, 0, "ab|cd|ef")
    assert index.held(0, names[:2], "CPU") == 2
    index.cleared(0)
    assert index.match(PLAIN, b"abcdef!").of(0) == Hit(8, 4, {"CPU": 8})
    assert index.blocks(0) == {"CPU": 2}
    store(index, 0, "ab|cd|ef")
    index.cleared(0, medium="cpu")
    assert index.match(PLAIN, b"abcdef!").of(0) == Hit(12, 6)


def test_08_a_large_block_on_the_cpu_counts_whole_or_not_at_all(index: AnyIndex) -> None:
    """Half a 64-token CPU block is no hit, however many 16-token blocks would fit in the half (8)."""
    store(index, 0, "sixteen tokens |and many more", size=64, medium="CPU")

    assert tokens(index, "sixteen tokens and many") == [64, 0, 0]
    assert tokens(index, "sixteen tok") == [0, 0, 0]


@pytest.mark.parametrize("other", [(None, "salt B"), ("adapter", None), ("adapter", "salt A"), PLAIN])
def test_09_10_salts_and_adapters_are_apart(index: AnyIndex, other: Root) -> None:
    """A tenant's salt and a LoRA adapter are part of the key, on both sides (9, 10)."""
    mine: Root = (None, "salt A")
    store(index, 0, "ab|cd", root=mine)

    assert tokens(index, "abcd!", mine) == [8, 0, 0]
    assert tokens(index, "abcd!", other) == [0, 0, 0]


def test_10_a_name_is_not_a_salt(index: AnyIndex) -> None:
    """A string as adapter and the same string as salt give two roots."""
    store(index, 0, "ab|cd", root=("x", None))

    assert tokens(index, "abcd!", (None, "x")) == [0, 0, 0]
    assert index.adapters() == {"x"}


def test_12_13_each_publisher_has_its_own_block_size(index: AnyIndex) -> None:
    """Block sizes are read from the events; engines of different ones are matched side by side (12, 13)."""
    store(index, 0, "abcd|efgh|ijkl", size=16)
    store(index, 1, "abcdefgh|ijklmnop", size=32)

    assert tokens(index, "abcdefghijklmnop!") == [48, 64, 0]


def test_18_prompts_of_equal_length_are_different(index: AnyIndex) -> None:
    """Content decides, not lengths (18)."""
    store(index, 0, "abcd|efgh")

    assert tokens(index, "abcdefgi!") == [4, 0, 0]
    assert tokens(index, "xbcdefgh!") == [0, 0, 0]


def test_a_thousand_pods_may_hold_one_block(index: AnyIndex) -> None:
    """There is no limit on holders: llm-d keeps ten to a block and forgets the eleventh."""
    everybody = [index.publisher(f"many/{number}") for number in range(1000)]
    for who in everybody:
        store(index, who, "system |prompt |question")
    matches = index.match(PLAIN, b"system prompt question?")

    assert {matches.of(who).tokens for who in everybody} == {12}
    assert matches.of(0) == Hit()


def test_an_unknown_parent_is_no_root(index: AnyIndex) -> None:
    """A chain is refused and changes nothing if its parent is unknown, or known to other publishers only."""
    names = store(index, 1, "ab|cd")
    for parent in (names[0], 12345):
        assert not index.stored(0, PLAIN, parent, [5, 6], [b"ab", b"cd"], block_size=4)

    assert tokens(index, "abcd!") == [0, 8, 0]
    assert (index.blocks(0), index.depth(5, 0)) == ({}, None)


def test_a_block_removed_by_one_pod_stays_with_the_others(index: AnyIndex) -> None:
    """A removal counts for its publisher alone."""
    names = store(index, 0, "ab|cd")
    store(index, 1, "ab|cd")
    assert index.removed(0, names) == 2

    assert tokens(index, "abcd!") == [0, 8, 0]
    assert index.removed(2, names) == 0


def test_a_hash_may_mean_other_bytes_to_another_pod(index: AnyIndex) -> None:
    """A hash counts only where the bytes agree: a publisher that numbers its blocks affects no other."""
    store(index, 0, "ab|cd|ef", first=1)
    store(index, 1, "xy|cd|zz", first=1)
    store(index, 2, "ab|xy", first=2)
    assert [tokens(index, text) for text in ("abcdef!", "xycdzz!", "abxy!")] == [
        [12, 0, 4],
        [0, 12, 0],
        [4, 0, 8],
    ]
    assert [index.tail(2, 9, who) for who in range(3)] == [b"abcd", b"xycd", b"ab"]
    assert index.removed(1, [3]) == 1
    assert index.removed(0, [1, 2, 3]) == 3
    assert [tokens(index, text) for text in ("abcdef!", "xycdzz!", "abxy!")] == [
        [0, 0, 4],
        [0, 8, 0],
        [0, 0, 8],
    ]


def test_blocks_are_compared_not_only_hashes_and_joined_bytes(index: AnyIndex) -> None:
    """Equal hashes for blocks that join to the same bytes but part at other places are other blocks."""
    store(index, 0, "a|ab|c", first=1)
    store(index, 1, "aa|b|c", first=1)
    assert tokens(index, "aabc!") == [12, 12, 0]
    assert index.removed(0, [3, 2]) == index.removed(1, [3, 2]) == 2
    assert [index.match(PLAIN, b"aabc!").of(who) for who in (0, 1)] == [Hit(4, 1), Hit(4, 2)]


def test_an_opaque_hash_may_come_to_mean_text_and_text_to_be_opaque(index: AnyIndex) -> None:
    """The last that was said of a hash holds."""
    index.opaque(0, None, [1])
    store(index, 0, "ab|cd", first=1)
    assert (tokens(index, "abcd!"), index.blocks(0)) == ([8, 0, 0], {"GPU": 2})
    index.opaque(0, 1, [2])
    assert (tokens(index, "abcd!"), index.blocks(0)) == ([4, 0, 0], {"GPU": 2})
    assert index.removed(0, [1, 2]) == 2
    assert index.blocks(0) == {}


def test_engines_with_other_seeds_share_the_text(index: AnyIndex) -> None:
    """Names that differ from pod to pod (older vLLM seeds its hashes at random) change nothing."""
    text = "|".join(f"{number:04d}" for number in range(150))
    prompt = text.replace("|", "") + "!"
    for who in range(3):
        store(index, who, text, first=1000 * who)
    assert tokens(index, prompt) == [600, 600, 600]
    assert index.removed(1, range(1149, 1074, -1)) == 75
    store(index, 1, "|".join(f"{number:04d}" for number in range(75, 80)), after=1074, first=1075)
    assert tokens(index, prompt) == [600, 320, 600]
    assert index.removed(1, range(1000, 1150)) == 80
    assert index.removed(0, range(150)) == 150
    assert tokens(index, prompt) == [0, 0, 600]


def test_a_hash_that_is_stored_with_another_meaning_means_the_last(index: AnyIndex) -> None:
    """If a removal was lost and its hash is used again, the hash means the new block alone."""
    store(index, 0, "ab|cd", first=1)
    store(index, 0, "xy", first=2)

    assert [tokens(index, text) for text in ("abcd!", "xy!")] == [[4, 0, 0], [4, 0, 0]]
    assert index.blocks(0) == {"GPU": 2}


def test_a_hole_ends_the_match_until_it_is_filled(index: AnyIndex) -> None:
    """Blocks after an evicted one are of no use; they are again when it comes back."""
    names = store(index, 0, "ab|cd|ef")
    index.removed(0, names[1:2])
    assert tokens(index, "abcdef!") == [4, 0, 0]
    assert index.stored(0, PLAIN, names[0], names[1:2], [b"cd"], block_size=4)
    assert tokens(index, "abcdef!") == [12, 0, 0]


def test_slower_media_carry_on_where_the_gpu_ends(index: AnyIndex) -> None:
    """The blocks on the GPU and on slower media count as one run; blocks to be loaded are reported by
    medium."""
    names = store(index, 0, "a|b|c|d|e|f")
    assert index.held(0, names[2:5], "cpu") == 3
    assert index.held(0, names[4:], "STORAGE") == 2
    index.removed(0, names[3:])
    assert index.match(PLAIN, b"abcdef!").of(0) == Hit(24, 6, {"CPU": 8, "STORAGE": 4})
    assert index.removed(0, names[3:4], medium="CPU") == 1
    assert index.match(PLAIN, b"abcdef!").of(0) == Hit(12, 3)


def test_an_unknown_medium_is_a_slower_one(index: AnyIndex) -> None:
    """Connectors invent names for their tiers; they are kept apart and compared without case."""
    store(index, 0, "a|b", medium="Mooncake")

    assert index.match(PLAIN, b"ab!").of(0) == Hit(8, 2, {"MOONCAKE": 8})
    assert index.blocks(0) == {"MOONCAKE": 2}


def test_what_is_held_by_hash_alone_must_be_known(index: AnyIndex) -> None:
    """Offload tiers name blocks without their tokens: known ones count, others are reported as unknown."""
    names = store(index, 0, "a|b")

    assert index.held(0, [*names, 99], "CPU") == 2
    assert index.held(1, names, "CPU") == 0
