"""Engines that compute the last block of each hit again are recognised by their hits."""

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.index.last_block import LEAST, WINDOW, LastBlock

BLOCK = 32


def after(*truths: tuple[int, int], times: int = 1) -> LastBlock:
    """Return what is known after these predicted and true tokens, several times over."""
    engine = LastBlock()
    for predicted, true in truths * times:
        tell(engine, predicted, true)
    return engine


def tell(engine: LastBlock, predicted: int, true: int) -> bool:
    """Note a hit of an engine that nothing else shortens."""
    return engine.on_cache_truth(predicted, true, engine.otherwise(predicted, BLOCK))


def test_hits_that_are_one_block_short_are_recognised() -> None:
    """Five requests are enough, however long their hits; the figure of the fifth says so."""
    engine, hits = LastBlock(), (32, 320, 64, 96, 1280)

    assert [tell(engine, hit, hit - BLOCK) for hit in hits] == [False] * (LEAST - 1) + [True]
    assert engine.dropped


def test_requests_without_a_hit_say_nothing() -> None:
    """Most requests of a new pool hit nothing, whatever the engine does."""
    assert not after((0, 0), times=100).dropped
    assert after((0, 0), (64, 32), times=5).dropped


def test_errors_of_other_sizes_are_errors() -> None:
    """Lost events make hits shorter by any number of blocks: that is no habit of the engine."""
    assert not after((320, 320), (320, 256), (320, 0), (320, 288), times=20).dropped
    assert not after((320, 256), times=20).dropped


def test_a_few_exact_hits_among_many_short_ones_change_nothing() -> None:
    """A fifth of the requests may have another reason to be right or wrong."""
    assert after((320, 288), (320, 288), (320, 288), (320, 288), (320, 320)).dropped


def test_an_engine_without_drafts_is_recognised_after_its_restart() -> None:
    """Hits that are longer by a block than predicted undo what was known of the engine."""
    engine = after((320, 288), times=LEAST)
    changed = [tell(engine, 288, 320) for _ in range(LEAST)]

    assert changed == [False] * (LEAST - 1) + [True]
    assert not engine.dropped
    assert str(engine).startswith("no longer computes")


def test_an_engine_that_never_has_anything_is_not_one_of_them() -> None:
    """An index that is wrong is wrong by one block, too, where prompts share just one."""
    assert not after((32, 0), times=50).dropped
    assert after((32, 0), (32, 0), (32, 0), (32, 0), (64, 32)).dropped


@given(st.lists(st.just(0) | st.integers(2, 40), min_size=60), st.booleans())
def test_it_settles_on_what_the_engine_does(held: list[int], drops: bool) -> None:
    """Whatever the hits are, the answer is right after some requests with hits, and stays right."""
    engine, hits = LastBlock(), 0
    for blocks in held:
        predicted = max(0, blocks - engine.dropped) * BLOCK
        true = max(0, blocks - drops) * BLOCK
        hits += bool(predicted or true)
        tell(engine, predicted, true)
        assert engine.dropped is (drops and hits >= LEAST)


def test_memory_is_bounded() -> None:
    """A hundred requests leave as many numbers as a few."""
    assert len(after((320, 320), times=100)._seen) == WINDOW


def test_hits_that_other_groups_end_are_explained_by_what_they_would_be() -> None:
    """A hit with the last block left out may be shorter by any number of blocks where windows or states end
    hits; those that both habits explain say nothing."""
    engine = LastBlock()
    assert not any(engine.on_cache_truth(320, 320, 320) for _ in range(50))
    assert [engine.on_cache_truth(320, 64, 64) for _ in range(LEAST)] == [False] * (LEAST - 1) + [True]
    assert engine.dropped
