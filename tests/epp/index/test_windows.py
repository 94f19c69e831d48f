"""Hits of engines whose models have layers with a window end where vLLM's rule says."""

from collections.abc import Sequence
from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.copying import copied

from kvist_epp.index.byte_index import Index
from kvist_epp.index.tree.windows import WindowGroup

ROOT = (None, None)
SIZE = 4
"""Tokens a block; a block's text has as many bytes."""
WINDOW, STATE = 1, 2
"""Numbers of groups."""

prompts = st.text("ab", min_size=1, max_size=12)


def name(letters: str) -> int:
    """Return the hash of the block that ends a chain."""
    return int.from_bytes(blake2b(letters.encode(), digest_size=8).digest(), "big")


def text(letters: str) -> bytes:
    """Return the text of a chain."""
    return "".join(letter * SIZE for letter in letters).encode()


def names(letters: str) -> list[int]:
    """Return the hashes of a chain's blocks."""
    return [name(letters[: end + 1]) for end in range(len(letters))]


class Engine:
    """An index with one publisher."""

    def __init__(self) -> None:
        self.index = Index()
        self.number = self.index.publisher("e")

    def store(self, letters: str) -> None:
        """Store a prompt in the group with the whole prefix."""
        blocks = [text(letter) for letter in letters]
        self.index.stored(self.number, ROOT, None, names(letters), blocks, block_size=SIZE)

    def keep(self, group: int, blocks: Sequence[int], need: int, size: int = SIZE) -> None:
        """Store blocks in a group with a window."""
        self.index.window_stored(self.number, group, blocks, needed=need, block_size=size)

    def hit(self, letters: str) -> int:
        """Return the blocks of a prompt's hit, after checking that its bytes agree."""
        hit = self.index.match(ROOT, text(letters) + b"?").of(self.number)
        assert hit.bytes == hit.tokens
        return hit.tokens // SIZE


def by_the_rule(held: Sequence[bool], need: int) -> int:
    """Return the blocks of a hit by the rule of vLLM's ``SlidingWindowManager``: from the right, the first
    ``need`` cached blocks in a row; if there are none, as many as there are at the beginning."""
    run = 0
    for at in reversed(range(len(held))):
        run = run + 1 if held[at] else 0
        if run >= need:
            return at + run
    return run


@settings(max_examples=500)
@given(
    stored=st.lists(prompts, min_size=1, max_size=5),
    lacking=st.lists(st.sets(st.integers(0, 60), max_size=25), min_size=2, max_size=2),
    needs=st.lists(st.integers(1, 5), min_size=2, max_size=2),
    asked=prompts,
)
def test_hits_end_where_the_rule_says(
    stored: list[str], lacking: list[set[int]], needs: list[int], asked: str
) -> None:
    """With any blocks missing in two groups, a hit is the longest prefix that the rule allows in both."""
    engine = Engine()
    kept = []
    for letters in stored:
        engine.store(letters)
    blocks = list(dict.fromkeys(block for letters in stored for block in names(letters)))
    for group, (missing, need) in enumerate(zip(lacking, needs, strict=True), 1):
        kept.append({block for number, block in enumerate(blocks) if number not in missing})
        engine.keep(group, list(kept[-1]), need)
    length = next((at for at, block in enumerate(names(asked)) if block not in blocks), len(asked))
    before = -1
    while before != length:
        before = length
        for held, need in zip(kept, needs, strict=True):
            length = by_the_rule([block in held for block in names(asked)[:length]], need)

    assert engine.hit(asked) == length


def test_hits_across_segments_have_the_bytes_of_their_blocks() -> None:
    """A hit that ends in a segment before the one where the match ended is as long as its blocks."""
    engine = Engine()
    stem = "a" * 100
    engine.store(stem + "ab")
    engine.store(stem + "bb")
    engine.keep(WINDOW, names(stem)[:70], 3)

    assert engine.hit(stem + "bb") == 70


def test_copies_are_counted() -> None:
    """A block that a window group stored twice is there until it is removed twice; one that it does not have
    is removed without a trace."""
    window = WindowGroup(1, SIZE)
    window.add([7, 7, 8])
    window.remove([7, 8, 9])
    after_one = list(window.names())
    window.remove([7])

    assert (after_one, list(window.names())) == ([7], [])


def test_groups_with_blocks_of_another_size_do_not_count() -> None:
    """Hashes of larger blocks are others, so that they say nothing of these."""
    engine = Engine()
    engine.store("abab")
    engine.keep(STATE, [1, 2], 1, size=4 * SIZE)

    assert engine.hit("abab") == 4


def test_other_publishers_are_not_shortened() -> None:
    """An engine whose window lacks a prompt has no hit, and another one without windows has all of it."""
    engine = Engine()
    engine.store("abab")
    other = engine.index.publisher("other")
    engine.index.stored(other, ROOT, None, names("abab"), [text(one) for one in "abab"], block_size=SIZE)
    engine.keep(WINDOW, [], 2)
    matches = engine.index.match(ROOT, text("abab") + b"?")

    assert [matches.of(number).tokens for number in (engine.number, other)] == [0, 4 * SIZE]
    assert matches.publishers() == [other]


def test_what_slower_media_hold_is_left_as_it_is() -> None:
    """A hit with blocks to load is not shortened: their other groups are not known there."""
    engine = Engine()
    engine.store("abab")
    engine.index.held(engine.number, names("abab"), "CPU")
    engine.index.removed(engine.number, names("abab")[2:])
    engine.keep(WINDOW, [], 2)

    assert engine.hit("abab") == 4


def test_what_one_engine_loads_does_not_spare_another() -> None:
    """A hit on the GPU ends where its engine's window allows, also if another engine has to load the prompt
    from host memory."""
    engine = Engine()
    engine.store("abab")
    loading = engine.index.publisher("loading")
    engine.index.stored(loading, ROOT, None, names("abab"), [text(one) for one in "abab"], block_size=SIZE)
    engine.index.held(loading, names("abab"), "CPU")
    engine.index.removed(loading, names("abab"))
    engine.keep(WINDOW, names("ab"), 2)
    matches = engine.index.match(ROOT, text("abab") + b"?")

    assert [matches.of(number).tokens for number in (engine.number, loading)] == [2 * SIZE, 4 * SIZE]


@given(
    held=st.lists(st.integers(1, 12), min_size=2, max_size=6),
    kept=st.lists(st.sets(st.integers(0, 11)), min_size=6, max_size=6),
    need=st.integers(1, 4),
)
def test_each_of_many_engines_is_cut_back_by_its_own_windows(
    held: list[int], kept: list[set[int]], need: int
) -> None:
    """Engines that hold a prompt to different depths have the hits that each would have alone."""
    prompt = "abbabaabbaba"
    index, expected = Index(), []
    for number, length in enumerate(held):
        engine = index.publisher(f"e{number}")
        blocks = [text(one) for one in prompt[:length]]
        index.stored(engine, ROOT, None, names(prompt[:length]), blocks, block_size=SIZE)
        there = [name for at, name in enumerate(names(prompt)) if at in kept[number]]
        index.window_stored(engine, WINDOW, there, needed=need, block_size=SIZE)
        expected.append(by_the_rule([at in kept[number] for at in range(length)], need))
    matches = index.match(ROOT, text(prompt) + b"?")

    assert [matches.of(number).tokens // SIZE for number in range(len(held))] == expected


def test_a_group_with_events_of_two_block_sizes_is_followed_in_the_larger() -> None:
    """A part of a block, which comes first, neither limits hits nor hides the whole blocks that follow."""
    engine = Engine()
    engine.store("abab")
    engine.keep(STATE, [99], 1, size=1)
    before = engine.hit("abab")
    engine.keep(STATE, names("ab"), 1)
    engine.keep(STATE, names("abab"), 1, size=1)

    assert (before, engine.hit("abab")) == (4, 2)


def test_windows_are_complete_again_once_the_gpu_is_cleared() -> None:
    """Windows whose beginning an older replica has not sent are whole once the engine has cleared its GPU."""
    engine = Engine()
    engine.store("ab")
    copy = Engine()
    copy.index = copied(engine.index, ["e"])
    copy.index.held(copy.number, names("a"), "CPU")
    copy.keep(WINDOW, names("a"), 1)
    copy.index.cleared(copy.number)
    copy.store("ab")

    assert copy.hit("ab") == 0


def test_an_engine_that_is_forgotten_begins_anew() -> None:
    """Windows limit nothing after a restart until the engine's events have them again."""
    engine = Engine()
    engine.store("ab")
    engine.keep(WINDOW, [], 2)
    before = engine.hit("ab")
    engine.index.forget(engine.number)
    engine.store("ab")

    assert (before, engine.hit("ab")) == (0, 2)


def test_clearing_the_gpu_clears_windows() -> None:
    """An engine that cleared its GPU holds nothing in any group, whatever its host memory holds."""
    engine = Engine()
    engine.store("ab")
    engine.keep(WINDOW, names("ab"), 2)
    engine.index.held(engine.number, names("ab")[:1], "CPU")
    engine.index.cleared(engine.number)
    engine.store("ab")
    before = engine.hit("ab")
    engine.keep(WINDOW, names("ab"), 2)

    assert (before, engine.hit("ab")) == (0, 2)


def test_windows_are_in_snapshots() -> None:
    """A replica that copies the index ends hits where the first one does, and goes on from there."""
    engine = Engine()
    engine.store("ababab")
    engine.keep(WINDOW, [*names("abab"), name("abab")], 2)
    copy = Engine()
    copy.index = copied(engine.index, ["e"])
    found = [copy.hit("ababab")]
    for _ in range(2):
        copy.index.window_removed(copy.number, WINDOW, [name("abab")])
        found.append(copy.hit("ababab"))

    assert found == [4, 4, 3]


def test_windows_that_began_before_the_snapshot_of_an_older_replica_limit_nothing() -> None:
    """Windows whose beginning an older replica has not sent limit nothing."""
    engine = Engine()
    engine.store("abab")
    copy = Engine()
    copy.index = copied(engine.index, ["e"])
    copy.keep(WINDOW, [name("abab")], 2)

    assert copy.hit("abab") == 4
