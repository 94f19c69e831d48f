"""Events into the index: which count, as what text, under which root."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.learning import PROMPT, SIZE, Learning, prompted, stored
from tests.fakes.vocabulary import Words, word

from kvist_epp.engines.vllm.kv_events import Batch, Cleared, Removed, Stored
from kvist_epp.index.media_marks import TOKEN, item_mark
from kvist_epp.kvevents.ingestion import MAX_BLOCKS
from kvist_epp.kvevents.observation import RecentSessions
from kvist_epp.kvevents.publisher_state import Quarantine

ABSENT = Words().pieces.index(b"")


def test_a_prompt_becomes_text() -> None:
    """Token ids are decoded to bytes, block by block."""
    engine = Learning()
    engine.send(stored([1, 2], None, [word(b" hello"), *b"abc", word(b"the "), *b"xyz"]))

    assert [engine.tokens(b" helloabc"), engine.tokens(b" helloabcthe xyz")] == [4, 8]


def test_two_requests_storing_one_block_hold_it_twice() -> None:
    """Trap 2: one removal of two leaves the block where it is."""
    engine = prompted()
    engine.send(stored([1, 2], None, PROMPT, session="t"), Removed(hashes=[2]), Removed(hashes=[1]))
    once = engine.tokens(PROMPT)
    engine.send(Removed(hashes=[2]), Removed(hashes=[1]))

    assert (once, engine.tokens(PROMPT)) == (8, 0)


def test_clearing_empties_the_gpu_only() -> None:
    """Weaknesses 3 and 4: AllBlocksCleared is acted on; offload tiers keep theirs."""
    engine = prompted()
    engine.send(Stored(hashes=[1], parent=None, token_ids=[], block_size=0, medium="CPU"), Cleared())

    assert engine.index.blocks(engine.index.publisher(engine.source)) == {"CPU": 1}


def test_forgetting_frees_everything_of_a_publisher_and_of_no_other() -> None:
    """Forgetting a restarted engine's rank frees everything of that rank and nothing of the other."""
    engine = prompted()
    engine.source = "ns/pod/1"
    engine.send(stored([1, 2], None, PROMPT))
    engine.ingestor.forget("ns/pod/0")

    ranks = [engine.index.match((None, None), PROMPT + b"?").of(n).tokens for n in (0, 1)]
    assert (ranks, engine.ingestor.needs_sweep) == ([0, 8], True)


def test_data_parallel_ranks_are_publishers_of_their_own() -> None:
    """DP rank ignored (llm-d-kv-cache#357): a block on rank 1 is none on rank 0, and removals do not mix."""
    engine = prompted()
    engine.source = "ns/pod/1"
    engine.send(stored([1, 2], None, PROMPT), Removed(hashes=[1, 2]))

    assert [engine.index.match((None, None), PROMPT + b"?").of(n).tokens for n in (0, 1)] == [8, 0]


def test_token_ids_that_span_skipped_blocks_are_not_learned() -> None:
    """If token ids and hashes do not fit together (vllm#44451), the event is not learned, because the blocks'
    texts are unknown."""
    engine = Learning()
    engine.send(stored([1, 3], None, b"aaaabbbbcccc"), stored([], None, b""))

    assert (engine.tokens(b"aaaabbbbcccc"), engine.counters.missized) == (0, 2)


@pytest.mark.parametrize("size", [1, 3, 16, 784])
def test_the_block_size_is_the_event_s(size: int) -> None:
    """Weaknesses 12 and 13: never assumed, never configured, never 16."""
    engine = Learning()
    text = b"abcd" * size
    engine.send(stored([1, 2, 3, 4], None, text, size=size))

    assert engine.tokens(text) == 4 * size


def test_two_engines_with_different_block_sizes_do_not_disturb_each_other() -> None:
    """A pool in the middle of a change has both."""
    engine = prompted()
    engine.source = "ns/big/0"
    engine.send(stored([7, 8], None, PROMPT + b"ccccdddd", size=8))

    hits = engine.index.match((None, None), PROMPT + b"ccccdddd?")
    assert [hits.of(0).tokens, hits.of(1).tokens] == [8, 16]


def test_a_salted_prompt_is_matched_with_its_salt_only() -> None:
    """Weakness 9: tenants with other salts, or none, do not see it."""
    engine = Learning()
    engine.send(stored([1, 2], None, PROMPT, salt="tenant"), stored([3, 4], 2, b"ccccdddd"))
    text = PROMPT + b"ccccdddd"

    assert [engine.tokens(text, salt) for salt in ("tenant", "other", None)] == [16, 0, 0]


def test_an_adapter_s_prompt_is_matched_with_the_adapter_only() -> None:
    """Weakness 10: the same text under another adapter has other keys and values."""
    engine = Learning()
    engine.send(stored([1, 2], None, PROMPT, lora="ad"))

    assert [engine.tokens(PROMPT, lora=name) for name in ("ad", "other", None)] == [8, 0, 0]


def test_blocks_with_media_match_their_marks_only() -> None:
    """A block in which media begin has a mark before the first token of each; another medium of equal tokens
    does not match, nor does text without a mark, and what follows in later events has the block as parent."""
    engine = Learning()
    media = ((5, "cat"), (7, "dog"))
    engine.send(stored([1, 2, 3], None, b"aaaabbbbcccc", media=media), stored([4, 5], 3, b"ddddeeee"))
    rest = b"ccccddddeeee"

    assert engine.tokens(b"aaaab" + item_mark("cat") + b"bb" + item_mark("dog") + b"b" + rest) == 20
    assert engine.tokens(b"aaaab" + item_mark("cat") + b"bb" + item_mark("cat") + b"b" + rest) == 4
    assert engine.tokens(b"aaaabbbb" + rest) == 4
    assert engine.counters.opaque_blocks == 0


def test_a_single_block_of_placeholders_is_no_answer() -> None:
    """A chunk of a prompt may be one block of a picture: no model generates those, so it needs no check."""
    engine = Learning()
    picture = engine.words.picture
    engine.send(stored([1], None, [*b"aa", picture, picture], media=((2, "cat"),)))
    engine.send(stored([2], 1, [picture] * 4), stored([3, 4], 2, b"ccccdddd"))

    assert engine.tokens(b"aa" + item_mark("cat") + 6 * TOKEN + b"ccccdddd") == 16
    assert engine.stats == (0, 0, 0)


def test_an_answer_behind_a_picture_is_checked_without_it() -> None:
    """The tokenizer knows neither marks nor placeholders: the text before them does not matter."""
    engine = Learning()
    picture = engine.words.picture
    engine.send(stored([1, 2], None, [*b"aaaa", picture, picture, *b"bb"], media=((4, "cat"),)))
    engine.send(stored([3], 2, b"cccc"), stored([4], 3, b"dddd"))
    engine.settle()

    assert engine.tokens(b"aaaa" + item_mark("cat") + 2 * TOKEN + b"bbccccdddd") == 16
    assert engine.stats == (2, 0, 0)


def test_a_prompt_with_embeddings_is_matched_up_to_the_first() -> None:
    """Opaque blocks never match, nor does what follows them, in this event or a later one."""
    engine = Learning()
    engine.send(stored([1, 2, 3], None, b"aaaabbbbcccc", opaque_from=1), stored([4, 5], 3, b"ddddeeee"))
    engine.send(stored([6], 5, b"ffff"))
    engine.settle()

    assert engine.tokens(b"aaaabbbbccccddddeeeeffff") == 4
    assert (engine.counters.opaque_blocks, engine.counters.orphans) == (2, 0)


@pytest.mark.parametrize("token", [ABSENT, ABSENT + 2, 2**31])
def test_ids_the_model_does_not_have_make_blocks_that_never_match(token: int) -> None:
    """A wrong vocabulary must not produce text with holes."""
    engine = Learning()
    engine.send(stored([1, 2, 3], None, [*b"aaaab", token, *b"bbcccc"]))

    assert [engine.tokens(text) for text in (b"aaaabbbcccc", b"aaaabbbbcccc")] == [4, 4]
    assert (engine.counters.unknown_ids, engine.counters.opaque_blocks) == (1, 2)


def test_an_offload_tier_s_placeholders_are_resolved_by_hash() -> None:
    """Without token ids: the GPU's events said what the hashes mean."""
    engine = prompted()
    engine.send(
        Stored(hashes=[1, 2, 99], parent=None, token_ids=[], block_size=0, medium="CPU"),
        Removed(hashes=[1, 2]),
    )

    engine.now = 31.0
    engine.ingestor.expire()

    assert (engine.tokens(PROMPT), engine.tokens(PROMPT, medium="CPU")) == (8, 8)
    assert engine.counters.held_unknown == 1


def test_a_tier_s_placeholder_does_not_decide_which_group_is_learned() -> None:
    """The placeholder of a tier has no kind and does not decide which group is learned."""
    engine = Learning()
    engine.send(Stored(hashes=[1], parent=None, token_ids=[], block_size=0, medium="CPU", group=3))
    engine.send(stored([1, 2], None, PROMPT, group=1, kind="full_attention"))

    assert engine.tokens(PROMPT) == 8


def test_a_tier_that_reports_its_tokens_is_learned() -> None:
    """Self-describing events that no event of the GPU follows, so that only they tell the text: learned once
    the GPU's events have not said that the blocks have a salt."""
    engine = Learning()
    engine.send(stored([1, 2], None, PROMPT, medium="STORAGE"))
    before = engine.tokens(PROMPT, medium="STORAGE")
    engine.now = 31.0
    engine.ingestor.expire()
    engine.settle()

    assert (before, engine.tokens(PROMPT, medium="STORAGE")) == (0, 8)


def test_an_unknown_parent_waits_and_is_learned_when_the_parent_comes() -> None:
    """Never a root, never dropped at once: a chain of orphans is learned whole, in any order."""
    engine = Learning()
    engine.send(stored([5, 6], 4, b"eeeeffff"), stored([3, 4], 2, b"ccccdddd"))
    before = [engine.tokens(b"ccccdddd"), engine.tokens(b"eeeeffff"), engine.counters.orphans]
    engine.send(stored([1, 2], None, PROMPT))

    assert before == [0, 0, 2]
    assert engine.tokens(PROMPT + b"ccccddddeeeeffff") == 24


def test_a_thousand_orphans_in_a_chain_do_not_recurse() -> None:
    """The chain is as long as an answer: it must not end in a RecursionError."""
    engine = Learning()
    for name in range(1200, 1, -2):
        engine.send(stored([name, name + 1], name - 1, PROMPT))
    engine.send(stored([0, 1], None, PROMPT))

    assert engine.tokens(PROMPT * 601) == 601 * 8


def test_orphans_are_tried_again_after_a_replay() -> None:
    """A replay may have brought what they wait for."""
    engine = Learning()
    engine.send(stored([3, 4], 2, b"ccccdddd"))
    number = engine.index.publisher(engine.source)
    engine.index.stored(number, (None, None), None, [1, 2], [b"aaaa", b"bbbb"], block_size=SIZE)
    seen = [one for one in engine.ingestor.retry_quarantined(engine.source) if one]

    assert (engine.tokens(PROMPT + b"ccccdddd"), len(seen)) == (16, 1)


def test_orphans_are_dropped_when_they_waited_too_long_or_are_too_many() -> None:
    """Bounded by age and by number; counted."""
    engine = Learning()
    engine.send(stored([3, 4], 2, b"ccccdddd"))
    engine.now = 31.0
    engine.ingestor.expire()
    quarantine = Quarantine(limit=2)
    dropped = [quarantine.add(stored([name], name - 1, b"cccc"), 0.0) for name in (10, 20, 30)]

    assert (engine.counters.orphans_dropped, dropped, len(quarantine)) == (1, [0, 0, 1], 2)


def test_an_orphan_that_was_removed_meanwhile_is_not_learned() -> None:
    """A block that was removed while it waited for its parent is not learned when the parent arrives."""
    engine = Learning()
    engine.send(stored([3, 4], 2, b"ccccdddd"), Removed(hashes=[4]), stored([1, 2], None, PROMPT))
    engine.settle()

    assert engine.tokens(PROMPT + b"ccccdddd") == 12


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3), st.none() | st.integers(1, 3), st.sampled_from(["s", "t"]), st.booleans()
        ),
        max_size=8,
    )
)
def test_blocks_that_are_their_own_ancestors_do_no_harm(
    events: list[tuple[int, int | None, str, bool]],
) -> None:
    """An engine that gives the same hash to several blocks, also to a block and its parent, ends nothing."""
    engine = Learning()
    for name, parent, session, removes in events:
        engine.send(stored([name], parent, b"%c" % (96 + name) * SIZE, session))
        if removes:
            engine.send(Removed(hashes=[name]))
        else:
            engine.settle()
    engine.settle()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_the_quarantine_gives_back_what_it_took_once(moves: list[tuple[int, int]]) -> None:
    """Whatever comes and goes, every orphan leaves once, by its parent, which may be named twice, or at the
    end."""
    quarantine = Quarantine()
    taken = given_back = 0
    for name, parent in moves:
        taken += 1
        quarantine.add(stored([name], parent, b"cccc"), 0.0)
        given_back += len(quarantine.take_children([name, name]))
    given_back += len(quarantine.take_children(quarantine.parents()))

    assert (given_back, len(quarantine)) == (taken, 0)


def test_a_long_event_is_ingested_in_slices_without_looking_like_decode() -> None:
    """A 128k-token prompt does not hold up a pick; its 513 blocks are not taken for 512 and a decode
    block."""
    engine = Learning()
    text = PROMPT * 257
    steps = list(
        engine.ingestor.apply_in_steps(
            engine.source, Batch(ts=0.0, events=[stored(list(range(1, 514)), None, text[: 513 * SIZE])])
        )
    )

    assert (len(steps), engine.tokens(text[: 513 * SIZE])) == (2, 513 * SIZE)


def test_what_is_no_text_in_a_long_event_stays_where_it_is() -> None:
    """Slicing keeps the places of media, and that of the first opaque block."""
    engine = Learning()
    text = PROMPT * 300
    engine.send(
        stored(list(range(1, 601)), None, text, opaque_from=500, media=((9, "cat"), (4 * 400 + 3, "dog")))
    )

    marked = text[:9] + item_mark("cat") + text[9:1603] + item_mark("dog") + text[1603:]
    assert engine.tokens(marked) == 500 * SIZE


def test_the_first_event_of_a_request_shows_what_was_cached() -> None:
    """The parent of the first block it stores is where its hit really ended."""
    engine = prompted()
    seen = engine.send(stored([3, 4], 2, b"ccccdddd", session="t"), stored([5, 6], 4, PROMPT, session="t"))

    assert [(one.session, one.cached, one.tokens, one.depth, one.phase) for one in seen] == [
        ("t", 8, 8, 16, "prefill"),
        ("t", None, 8, 24, "prefill"),
    ]
    assert (seen[0].publisher, seen[0].endpoint) == ("ns/pod/0", "ns/pod")


def test_a_miss_is_cached_0_and_an_unknown_parent_says_nothing() -> None:
    """0 is a truth, None is none."""
    engine = Learning()
    first = engine.send(stored([1, 2], None, PROMPT, session="a"))
    engine.send(stored([9, 10], 8, PROMPT, session="b"))

    assert [one.cached for one in first] == [0]


def test_a_hit_that_ends_in_blocks_not_credited_yet_is_known_all_the_same() -> None:
    """The truth does not depend on our credit."""
    engine = prompted()
    engine.send(stored([3], 2, b"cccc"))
    seen = engine.send(stored([4, 5], 3, PROMPT, session="t"))

    assert [one.cached for one in seen] == [12]


def test_decode_shows_as_such() -> None:
    """A block at a time: the request still generates."""
    engine = prompted()
    seen = engine.send(stored([3], 2, b"cccc"))

    assert [(one.phase, one.cached, one.depth) for one in seen] == [("decode", None, 12)]


def test_a_session_id_used_again_is_a_new_request_when_it_was_announced() -> None:
    """Clients may send their own id with every turn."""
    engine = prompted()
    engine.ingestor.expect("s", engine.source)
    seen = engine.send(stored([3, 4], 2, b"ccccdddd"))

    assert [one.cached for one in seen] == [8]


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(2, 12))
def test_sessions_are_bounded(names: list[int], limit: int) -> None:
    """There are never more sessions than the limit; a session seen within the last half of it is not a first
    event again."""
    sessions = RecentSessions(limit=limit)
    for at, name in enumerate(names):
        lately = dict.fromkeys(reversed(names[:at]))
        first = sessions.add("pod/0", str(name), single=False)

        assert len(sessions) <= limit
        assert first or name in names[:at]
        assert not first or name not in list(lately)[: limit // 2 - 1]


def test_a_session_that_is_silent_for_two_generations_is_forgotten() -> None:
    """Memory is bounded by the requests of a few minutes; a session that is seen now and then stays."""
    sessions = RecentSessions(seconds=120.0)
    for name in ("silent", "lively"):
        sessions.add("pod/0", name, single=True)
    for now in (100.0, 130.0, 200.0, 260.0, 400.0):
        sessions.age(now)
        sessions.add("pod/0", "lively", single=False)

    assert not sessions.known("pod/0", "silent")
    assert sessions.decoding("pod/0", "lively")
    assert len(sessions) == 1


def test_the_endpoint_of_a_publisher_named_by_uid_is_reported() -> None:
    """The index names pods by UID, all other endpoints by namespace and name."""
    engine = Learning()
    engine.source = "uid-1/0"
    engine.ingestor.add_publisher("uid-1/0", "ns/pod")

    assert [one.endpoint for one in engine.send(stored([1, 2], None, PROMPT))] == ["ns/pod"]


def test_a_publisher_that_left_is_gone() -> None:
    """Weakness 2: nothing of it stays in the index."""
    engine = prompted()
    engine.ingestor.remove_publisher(engine.source)
    while engine.ingestor.sweep():
        pass

    assert (engine.index.stats()["hashes"], engine.index.stats()["publishers"]) == (0, 0)


def test_ignored_events_are_counted() -> None:
    """Nothing is silent: unknown and malformed events are counted for their publisher."""
    engine = Learning()
    engine.ingestor.apply(engine.source, Batch(ts=0.0, events=[Cleared()], unknown=2, malformed=3))
    counters = engine.counters

    assert (counters.unknown, counters.malformed, counters.cleared) == (2, 3, 1)


texts = st.lists(st.sampled_from([b"aaaa", b"bbbb"]), min_size=2, max_size=5)


@given(st.lists(texts, min_size=1, max_size=6), st.randoms())
def test_orphans_in_any_order_end_as_the_ordered_history_would(
    prompts: list[list[bytes]], random: object
) -> None:
    """One publisher's events, cut into single blocks and shuffled: the same is known in the end."""
    pairs = {}
    for prompt in prompts:
        names = [hash(tuple(prompt[: end + 1])) & (2**64 - 1) for end in range(len(prompt))]
        for parent, (first, text) in zip([None, *names], zip(names, prompt, strict=True), strict=False):
            pairs[first] = (parent, text)
    ordered, shuffled = Learning(), Learning()
    events = [Stored(hashes=[n], parent=p, token_ids=list(t), block_size=SIZE) for n, (p, t) in pairs.items()]
    ordered.send(*events)
    random.shuffle(events)  # type: ignore[attr-defined]
    shuffled.send(*events)
    ordered.settle()
    shuffled.settle()

    assert [shuffled.tokens(b"".join(p)) for p in prompts] == [ordered.tokens(b"".join(p)) for p in prompts]


def test_many_removals_come_in_steps() -> None:
    """A pool that is emptied block by block is forgotten in pieces, so that a pick gets its turn."""
    engine = Learning()
    removed = Removed(hashes=list(range(2 * MAX_BLOCKS + 1)), events=2 * MAX_BLOCKS + 1)
    steps = list(engine.ingestor.apply_in_steps(engine.source, Batch(ts=0.0, events=[removed])))

    assert (len(steps), engine.counters.removed) == (3, 2 * MAX_BLOCKS + 1)
