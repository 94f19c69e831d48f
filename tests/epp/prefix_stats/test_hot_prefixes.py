"""Tests of hot prefixes: which are returned, and which never are."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.index.byte_index import Index, Root
from kvist_epp.index.media_marks import item_mark
from kvist_epp.index.tree.segment import Segment
from kvist_epp.prefix_stats.hot_prefixes import PLACES, HotPrefix, HotPrefixes, Place

SIZE = 4
"""Tokens a block."""
PLAIN: Root = (None, None)
words = st.text("ab", min_size=1, max_size=5)


class Pool:
    """An index in which one engine holds words, one block per letter, and the recorded matches."""

    def __init__(self) -> None:
        self.index, self.hot = Index(), HotPrefixes()
        self.who = self.index.publisher("pod/0")

    def hold(self, word: str, root: Root = PLAIN) -> None:
        """Store a word in the engine's cache."""
        hashes = [hash((root, word[: end + 1])) % 2**64 for end in range(len(word))]
        self.index.stored(self.who, root, None, hashes, [c.encode() for c in word], block_size=SIZE)

    def ask(self, word: str | bytes, tenant: str, now: float = 0.0, root: Root = PLAIN) -> int:
        """Match and record a prompt; return the number of its blocks that matched."""
        prompt = word.encode() if isinstance(word, str) else word
        groups = self.index.match(root, prompt + b"?").groups
        if not groups:
            return 0
        segment, blocks = groups[0][4], groups[0][1] // SIZE
        self.hot.record((segment, blocks - segment.base), tenant, now)
        return blocks

    def texts(self, budget_blocks: int, now: float = 0.0) -> list[str]:
        """Return the texts of the hot prefixes."""
        return [one.text.decode() for one in self.hot.hottest(budget_blocks * SIZE, now)]


def test_a_prefix_that_two_tenants_request_is_returned_whole() -> None:
    """The shared part of two prompts is one prefix, with its text, tokens and matches."""
    pool = Pool()
    pool.hold("sharedA")
    pool.hold("sharedB")
    for tenant, word in (("one", "sharedA"), ("two", "sharedB")):
        pool.ask(word, tenant)
    assert pool.hot.hottest(1_000, 0.0) == [HotPrefix(PLAIN, b"shared", 6 * SIZE, 2, (1,) * 6)]


def test_a_prefix_that_one_tenant_requests_is_never_returned() -> None:
    """A prefix of a single tenant is private, however often it is requested."""
    pool = Pool()
    pool.hold("secret")
    for _ in range(100):
        pool.ask("secret", "one")
    assert pool.texts(1_000) == []


def test_a_salted_prefix_is_never_returned() -> None:
    """A cache salt makes a prefix private, even if several tenants request it."""
    pool = Pool()
    pool.hold("secret", (None, "salt"))
    for tenant in ("one", "two", "three"):
        assert pool.ask("secret", tenant, root=(None, "salt")) == 6
    assert pool.texts(1_000) == []


def test_a_prefix_ends_before_its_first_medium() -> None:
    """A picture cannot be sent again as text: what precedes it can, and nothing is left of some prefixes."""
    pool = Pool()
    mark = item_mark("cat")
    for before in ("text", ""):
        blocks = [*(c.encode() for c in before), mark, b"c"]
        prompt = b"".join(blocks)
        hashes = [hash(prompt[: at + 1]) % 2**64 for at in range(len(blocks))]
        pool.index.stored(pool.who, PLAIN, None, hashes, blocks, block_size=SIZE)
        for tenant in ("one", "two"):
            pool.ask(prompt, tenant)
    assert [(one.text, one.tokens, one.sizes) for one in pool.hot.hottest(1_000, 0.0)] == [
        (b"text", 4 * SIZE, (1,) * 4)
    ]


def test_adapters_have_prefixes_of_their_own() -> None:
    """Equal texts under two adapters are two prefixes."""
    pool = Pool()
    for root in (PLAIN, ("lora", None)):
        pool.hold("text", root)
        for tenant in ("one", "two"):
            pool.ask("text", tenant, root=root)
    roots = [one.root for one in pool.hot.hottest(1_000, 0.0)]
    assert sorted(roots, key=str) == [("lora", None), PLAIN]


def test_the_hottest_come_first_within_the_budget() -> None:
    """A budget of ten blocks holds all six of the hotter prefix and the first four of the other."""
    pool = Pool()
    for word, times in (("colder", 2), ("hotter", 5)):
        pool.hold(word)
        for turn in range(times):
            pool.ask(word, f"tenant {turn}")
    assert pool.texts(10) == ["hotter", "cold"]
    assert pool.texts(3) == ["hot"]
    assert pool.texts(0) == []


def test_masks_select_blocks() -> None:
    """With masks, prefixes end in masked blocks, and only those count against the budget."""
    pool = Pool()
    for word in ("abcd", "wxyz"):
        pool.hold(word)
        for tenant in ("one", "two"):
            pool.ask(word, tenant)
    segment = pool.index.match(PLAIN, b"abcd?").groups[0][4]
    texts = [one.text for one in pool.hot.hottest(2 * SIZE, 0.0, {segment: 0b0110})]
    assert texts == [b"abc"]
    assert pool.hot.hottest(10 * SIZE, 0.0, {}) == []


def test_heat_fades() -> None:
    """Nothing is hot ten minutes after the last request."""
    pool = Pool()
    pool.hold("text")
    for tenant in ("one", "two"):
        pool.ask("text", tenant, 0.0)
    assert pool.texts(10, 500.0) == ["text"]
    assert pool.texts(10, 700.0) == []


def test_an_evicted_prefix_is_not_returned() -> None:
    """The text of an evicted prefix is removed with its blocks."""
    pool = Pool()
    pool.hold("text")
    for tenant in ("one", "two"):
        pool.ask("text", tenant)
    pool.index.cleared(pool.who)
    assert pool.index.sweep(100) == 0
    assert pool.texts(10) == []


def cold(count: int, index: Index) -> list[Place]:
    """Return ``count`` places of one block each."""
    index.publisher("pod/0")
    places = []
    for number in range(count):
        text = number.to_bytes(4)
        index.stored(0, PLAIN, None, [number], [text], block_size=SIZE)
        places.append((index.match(PLAIN, text + b"?").groups[0][4], 1))
    return places


def test_counts_are_bounded() -> None:
    """Among more places than are counted, one at which half of the prompts end keeps its name and count."""
    hot = HotPrefixes()
    first, *rest = cold(20 * PLACES, Index())
    for number, place in enumerate(rest):
        hot.record(first, f"tenant {number % 2}", 0.0)
        hot.record(place, "one", 0.0)
    [found] = hot.hottest(100, 0.0)
    assert found.text == bytes(4)
    assert len(rest) <= found.matches < 1.1 * len(rest)
    assert [len(slot.counts) for slot in hot._window.all()] == [PLACES]


def test_a_rarely_requested_prefix_is_returned_among_many_others() -> None:
    """Two requests of two tenants are enough, after 200 requests for twenty other prefixes."""
    hot = HotPrefixes()
    *others, last = cold(21, Index())
    for number in range(200):
        hot.record(others[number % 20], "", 0.0)
    for tenant in ("one", "two"):
        hot.record(last, tenant, 0.0)
    assert [(one.text, one.matches) for one in hot.hottest(100, 0.0)] == [((20).to_bytes(4), 2)]


def test_every_match_is_counted_somewhere() -> None:
    """The counts of a slot add up to the recorded matches, however many places there are, and parts are right
    in the mean: over 100 runs, the half of the places that got a third of the matches has about a third."""
    parts = []
    places = cold(4 * PLACES, Index())
    for run in range(100):
        hot = HotPrefixes()
        hot._random.seed(run)
        for number in range(3_000):
            half = places[: 2 * PLACES] if number % 3 == 0 else places[2 * PLACES :]
            hot.record(half[number // 3 % len(half)], "one", 0.0)
        [slot] = hot._window.all()
        assert sum(count.matches for count in slot.counts.values()) == 3_000
        low = set(places[: 2 * PLACES])
        parts.append(sum(count.matches for place, count in slot.counts.items() if place in low))
    assert 950 < sum(parts) / len(parts) < 1_050


@given(st.lists(words, max_size=6), st.lists(st.tuples(words, st.sampled_from("xyz")), max_size=12))
def test_heat_is_what_ends_at_a_block_or_behind_it(held: list[str], asked: list[tuple[str, str]]) -> None:
    """With budget for all, the prefixes returned cover exactly the blocks that two tenants matched, and their
    matches are those of the last block."""
    pool, through, tenants = Pool(), Counter[str](), dict[str, set[str]]()
    for word in held:
        pool.hold(word)
    for word, tenant in asked:
        for end in range(1, pool.ask(word, tenant) + 1):
            through[word[:end]] += 1
            tenants.setdefault(word[:end], set()).add(tenant)
    shared = {text for text, who in tenants.items() if len(who) > 1}
    hottest = pool.hot.hottest(1_000, 0.0)
    texts = [one.text.decode() for one in hottest]
    assert {text[:end] for text in texts for end in range(1, len(text) + 1)} == shared
    assert [one.matches for one in hottest] == [through[text] for text in texts]
    assert not any(a != b and b.startswith(a) for a in texts for b in texts)


@given(
    st.lists(words, max_size=6),
    st.lists(st.tuples(words, st.sampled_from("xyz")), max_size=12),
    st.integers(0, 9),
)
def test_a_budget_is_kept_and_spent_on_the_hottest(
    held: list[str], asked: list[tuple[str, str]], budget: int
) -> None:
    """The distinct blocks returned use the whole budget or are all there are, and no block left out is hotter
    than one returned."""
    pool, through, tenants = Pool(), Counter[str](), dict[str, set[str]]()
    for word in held:
        pool.hold(word)
    for word, tenant in asked:
        for end in range(1, pool.ask(word, tenant) + 1):
            through[word[:end]] += 1
            tenants.setdefault(word[:end], set()).add(tenant)
    shared = {text for text, who in tenants.items() if len(who) > 1}
    inside = {text[: end + 1] for text in pool.texts(budget) for end in range(len(text))}
    assert len(inside) == min(budget, len(shared))
    assert all(through[a] >= through[b] for a in inside for b in shared - inside)


def test_a_segment_that_was_cut_is_left_out() -> None:
    """A recorded match of more blocks than the segment has now returns nothing."""
    pool = Pool()
    pool.hold("abcdef")
    for tenant in ("one", "two"):
        pool.ask("abcdef", tenant)
    segment: Segment = pool.index.match(PLAIN, b"abcdef?").groups[0][4]
    segment.cut(3)
    assert pool.texts(10) == []
