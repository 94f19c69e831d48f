"""Blocks that are computed again after their eviction."""

import random

from tests.fakes.learning import SIZE, Learning, stored

from kvist_epp.engines.vllm.kv_events import Removed, Stored
from kvist_epp.index.byte_index import Index
from kvist_epp.kvevents.evicted_blocks import SAMPLE, EvictedBlocks

PROMPT = b"aaaabbbbccccdddd"
NAMES = [SAMPLE * name for name in (1, 2, 3, 4)]
"""Hashes of blocks that are all looked at."""
A, B, C, D = NAMES
TOKENS = SIZE * SAMPLE
"""What each of them counts for."""
OTHER = "ns/other/0"


def _engine(*sources: str) -> Learning:
    """Engines whose first replay has ended; all have stored the prompt."""
    engine = Learning()
    for source in sources or ("ns/pod/0",):
        engine.source = source
        engine.counters.warm = True
        engine.send(stored(NAMES, None, PROMPT, session=source))
    engine.source = "ns/pod/0"
    return engine


def _again(engine: Learning) -> int:
    return engine.ingestor.evicted.requested_tokens


def test_evicted_blocks_that_are_computed_again_count() -> None:
    """The end of a prompt is evicted and computed for the next request: exactly that part counts, once."""
    engine = _engine()
    engine.send(Removed(hashes=[D, C]))
    engine.send(stored([C, D], B, PROMPT[8:], session="again"))
    engine.send(stored([C, D], B, PROMPT[8:], session="a copy"))

    assert _again(engine) == 2 * TOKENS


def test_new_text_after_evicted_blocks_does_not_count() -> None:
    """A conversation that returns with more text was evicted as far as it had been."""
    engine = _engine()
    engine.send(Removed(hashes=[D, C, B, A]))
    engine.send(stored([*NAMES, 5 * SAMPLE, 6 * SAMPLE], None, PROMPT + b"eeeeffff", session="longer"))

    assert _again(engine) == 4 * TOKENS


def test_blocks_of_another_endpoint_are_a_copy() -> None:
    """Blocks that another endpoint still holds do not count: they are computed again because of routing."""
    engine = _engine("ns/pod/0", OTHER)
    engine.send(Removed(hashes=[D, C, B, A]))
    engine.source = OTHER
    engine.send(Removed(hashes=[D]))
    engine.source = "ns/pod/0"
    engine.send(stored(NAMES, None, PROMPT, session="again"))

    assert _again(engine) == TOKENS


def test_an_endpoint_that_computes_what_another_evicted_counts() -> None:
    """Blocks count whichever endpoint evicted them and whichever computes them."""
    engine = _engine()
    engine.send(Removed(hashes=[D, C, B, A]))
    engine.source = OTHER
    engine.counters.warm = True
    engine.send(stored(NAMES, None, PROMPT, session="again"))

    assert _again(engine) == 4 * TOKENS


def test_a_slower_tier_keeps_blocks() -> None:
    """A block that is loaded from an offload tier is not computed."""
    engine = _engine()
    engine.send(Stored(hashes=NAMES, parent=None, token_ids=[], block_size=0, medium="CPU"))
    engine.send(Removed(hashes=[D, C, B, A]))
    engine.send(stored(NAMES, None, PROMPT, session="again"))

    assert _again(engine) == 0


def test_what_happened_before_the_picker_started_does_not_count() -> None:
    """Events of the first replay do not count, because they happened earlier."""
    engine = _engine()
    engine.counters.warm = False
    engine.send(Removed(hashes=[D, C]), stored([C, D], B, PROMPT[8:], session="again"))

    assert _again(engine) == 0


def test_generated_blocks_are_no_request() -> None:
    """A block that decode fills one at a time is no prompt."""
    engine = _engine()
    engine.send(Removed(hashes=[D]))
    engine.send(stored([D], C, PROMPT[12:], session="again"))

    assert _again(engine) == 0


def test_memory_is_bounded_and_old_evictions_are_lost_first() -> None:
    """The table has a fixed size; a newer hash takes the slot of an older one, which then does not count."""
    index = Index()
    publisher = index.publisher("p")
    table = EvictedBlocks(index, slots=4)
    table.on_removed([A, B, C, A + 4 * SAMPLE])  # the last one takes the slot of A
    index.stored(publisher, (None, None), None, [A, B, C], [b"a", b"b", b"c"], block_size=SIZE)
    table.on_stored(publisher, [A, B, C], SIZE)

    assert table.requested_tokens == 2 * TOKENS


def test_a_long_new_prompt_costs_a_few_looks() -> None:
    """The chain is searched until it is clear that its blocks are new."""
    index = Index()
    publisher = index.publisher("p")
    table = EvictedBlocks(index, slots=1024)
    names = [SAMPLE * name for name in range(1, 101)]
    table.on_removed(names[50:])
    index.stored(publisher, (None, None), None, names, [b"x%d" % name for name in names], block_size=SIZE)
    table.on_stored(publisher, names, SIZE)

    assert table.requested_tokens == 0


def test_a_sample_of_the_blocks_counts_for_all() -> None:
    """The estimate is close to the number of evicted blocks, whatever their hashes are."""
    index, chance = Index(), random.Random(1)
    publisher = index.publisher("p")
    table = EvictedBlocks(index)
    for prompt in range(100):
        names = [chance.getrandbits(64) for _ in range(100)]
        texts = [b"%d %d" % (prompt, at) for at in range(100)]
        table.on_removed(names)
        index.stored(publisher, (None, None), None, names, texts, block_size=SIZE)
        table.on_stored(publisher, names, SIZE)

    assert abs(table.requested_tokens / (100 * 100 * SIZE) - 1) < 0.1
