"""Events of models with several KV cache groups: which group is indexed, and what windows leave of hits."""

import pytest
from tests.fakes.learning import PROMPT, SIZE, Learning, prompted, stored

from kvist_epp.engines.vllm.kv_events import Removed


@pytest.mark.parametrize(
    ("kind", "ignored"),
    [("sliding_window", 1), ("mamba", 0), ("chunked_local_attention", 1), ("encoder_only_attention", 1)],
)
def test_groups_that_forget_are_not_learned(kind: str, ignored: int) -> None:
    """Trap 9: sliding-window and mamba groups are sparse: the blocks say nothing about the prefix."""
    engine = Learning()
    engine.send(stored([1, 2], None, PROMPT, group=1, kind=kind))

    assert (engine.tokens(PROMPT), engine.counters.other_groups) == (0, ignored)


@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local_attention", "encoder_only_attention"])
def test_groups_that_are_not_understood_are_counted(kind: str) -> None:
    """A window whose length the engine does not say, and kinds without a rule, change no hit and are
    counted, their removals, too."""
    engine = prompted()
    engine.send(stored([1, 2], None, PROMPT, group=1, kind=kind))
    engine.send(stored([1, 2], None, PROMPT, group=0, kind="full_attention"), Removed(hashes=[1], group=1))

    assert (engine.tokens(PROMPT), engine.counters.other_groups) == (8, 2)


def test_a_window_that_lost_its_blocks_shortens_the_hit() -> None:
    """A hit ends where a group with a window has nothing left, whatever the group with the whole prefix
    holds."""
    engine = Learning()
    window = stored([1, 2], None, PROMPT, group=1, kind="sliding_window", window=SIZE + 1)
    engine.send(window, stored([1, 2], None, PROMPT, group=0, kind="full_attention"))
    found = [engine.tokens(PROMPT)]
    for block in (2, 1):
        engine.send(Removed(hashes=[block], group=1))
        found.append(engine.tokens(PROMPT))

    assert found == [8, 4, 0]
    assert engine.counters.other_groups == 0


def test_the_first_event_of_a_request_is_noted_before_it_counts() -> None:
    """A request is compared with the index as it was when its engine began, also if its first event is of a
    group with a window: what it stores there is no hit of its own."""
    engine = Learning()
    full = stored([1, 2], None, PROMPT, group=0, kind="full_attention")
    window = stored([1, 2], None, PROMPT, group=1, kind="sliding_window", window=SIZE + 1)
    engine.send(window, full)
    engine.send(Removed(hashes=[2], group=1), Removed(hashes=[1], group=1))
    seen: list[int] = []
    ingestor = engine.ingestor
    ingestor._on_prefill_started = lambda *_: seen.append(engine.tokens(PROMPT))
    again = stored([1, 2], None, PROMPT, "t", group=1, kind="sliding_window", window=SIZE + 1)
    engine.send(again, stored([1, 2], None, PROMPT, "t", group=0, kind="full_attention"))

    assert seen[0] == 0
    assert engine.tokens(PROMPT) == 8


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention", "sink_full_attention", "unknown"])
def test_groups_that_keep_the_whole_prefix_are_learned(kind: str | None) -> None:
    """Full attention and MLA; and engines that do not say."""
    engine = Learning()
    engine.send(stored([1, 2], None, PROMPT, group=0, kind=kind))

    assert engine.tokens(PROMPT) == 8


def test_a_removal_in_another_group_does_not_remove() -> None:
    """A removal in another group does not remove the block: each group has the same hashes, and a removal
    names only hash and group."""
    engine = Learning()
    engine.send(
        stored([1, 2], None, PROMPT, group=0, kind="sliding_window"),
        stored([1, 2], None, PROMPT, group=1, kind="full_attention"),
        Removed(hashes=[2, 1], group=0),
    )
    before = engine.tokens(PROMPT)
    engine.send(Removed(hashes=[2, 1], group=1))

    assert (before, engine.tokens(PROMPT)) == (8, 0)


def test_only_one_of_several_full_groups_is_counted() -> None:
    """A hybrid model may have several: the block is not there twice."""
    engine = Learning()
    engine.send(
        stored([1, 2], None, PROMPT, group=0, kind="full_attention"),
        stored([1, 2], None, PROMPT, group=2, kind="full_attention"),
        Removed(hashes=[2, 1], group=0),
    )

    assert engine.tokens(PROMPT) == 0
