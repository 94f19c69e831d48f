"""Servers of LMCache as publishers: what they hold, by the events of the engines that use them."""

import pytest
from tests.epp.kvevents.test_shared_storage import Sharing
from tests.epp.kvevents.test_tier_blocks import aged
from tests.fakes.learning import SIZE, stored

from kvist_epp.engines.vllm.kv_events import Removed, Stored
from kvist_epp.kvevents import lmcache_blocks

A, B, C = "ns/a", "ns/b", "ns/c"
SERVER, OTHER = "lmcache/n1", "lmcache/n2"
CHUNK = 2 * SIZE
TEXT = b"aaaabbbbccccddddeeee"
BLOCKS = [1, 2, 3, 4, 5]


def engines() -> Sharing:
    """Return two engines on one server and one on another; the first one is sending."""
    found = Sharing({A: SERVER, B: SERVER, C: OTHER})
    found.lookup.chunks = found.ingestor.tiers.chunks
    found.source = f"{A}/0"
    return found


def kept(*hashes: int, text: bytes = TEXT, parent: int | None = None) -> list[Stored]:
    """Return an engine's reports of what it has sent to the server, under the server's own hashes."""
    events = []
    for at, name in enumerate(hashes):
        ids = text[at * CHUNK : (at + 1) * CHUNK]
        events.append(stored([name], parent, ids, session=None, medium="CPU", size=CHUNK))
        parent = name
    return events


def swept(shared: Sharing) -> None:
    """Remove what is believed no longer, as the picker does in the background."""
    shared.ingestor.expire()
    while shared.ingestor.needs_sweep:
        shared.ingestor.sweep()


def test_what_an_engine_has_sent_to_a_server_is_there_for_all_its_engines() -> None:
    """The report names tokens under a hash of its own; what left the first engine's GPU is loaded by both,
    and only in whole blocks of the server."""
    shared = engines()
    shared.send(stored(BLOCKS, None, TEXT), *kept(91, 92), Removed(hashes=BLOCKS))

    assert shared.held(TEXT) == {A: (16, {"LMCACHE": 16}), B: (16, {"LMCACHE": 16})}
    assert shared.held(TEXT[:12]) == {A: (8, {"LMCACHE": 8}), B: (8, {"LMCACHE": 8})}


def test_what_is_not_reported_is_not_there() -> None:
    """An engine that reports has not sent what it does not report: the server was down, or full."""
    shared = engines()
    shared.send(stored(BLOCKS, None, TEXT), *kept(91), Removed(hashes=BLOCKS))
    other = TEXT.swapcase()
    shared.send(stored([11, 12, 13, 14], None, other[:16]), Removed(hashes=[11, 12, 13, 14]))
    swept(shared)

    assert shared.held(TEXT)[A] == (8, {"LMCACHE": 8})
    assert shared.held(other) == {}


def test_without_reports_what_engines_compute_is_there() -> None:
    """Servers with an event log whose engines send their blocks let nothing be reported at all; then what was
    computed counts, in whole blocks of LMCache's default size, until the first report."""
    shared = engines()
    text = bytes(97 + at % 7 for at in range(300))
    names = list(range(100, 175))
    shared.send(stored(names, None, text), Removed(hashes=names))

    assert lmcache_blocks.DEFAULT_CHUNK == 256
    assert shared.held(text)[B] == (256, {"LMCACHE": 256})
    assert shared.held(text[:200]) == {}
    shared.send(stored(BLOCKS, None, TEXT), *kept(91, 92))
    swept(shared)
    assert shared.held(text) == {}


def test_generated_text_is_not_taken_for_stored() -> None:
    """Blocks of answers are stored only if a setting says so, and then the engine reports them."""
    shared = engines()
    shared.lookup.chunks = {SERVER: SIZE}
    shared.send(stored([1, 2], None, TEXT[:8]), stored([3], 2, TEXT[8:12]))
    shared.settle()
    shared.send(Removed(hashes=[3, 2, 1]))

    assert shared.held(TEXT)[A] == (8, {"LMCACHE": 8})


def test_salted_prompts_are_apart_though_the_server_s_hashes_are_equal() -> None:
    """The server's hashes cover no salt, so that reports of a plain and a salted prompt are alike; each is
    credited to what the GPU has computed."""
    shared = engines()
    shared.send(stored(BLOCKS, None, TEXT, salt="tenant"), *kept(91, 92), Removed(hashes=BLOCKS))

    assert shared.held(TEXT) == {}
    found = shared.lookup.look((None, "tenant"), [TEXT + b"?"], learn=False)
    assert found.hits[B].lower == {"LMCACHE": 16}


def test_evictions_that_are_reported_are_obeyed() -> None:
    """A server that is the source of events tells what it has evicted."""
    shared = engines()
    shared.send(stored(BLOCKS, None, TEXT), *kept(91, 92), Removed(hashes=BLOCKS))
    shared.send(Removed(hashes=[92], medium="CPU"))

    assert shared.held(TEXT) == {A: (8, {"LMCACHE": 8}), B: (8, {"LMCACHE": 8})}


def test_a_server_that_withdraws_everything_has_restarted() -> None:
    """Nothing is believed to be there, and what is stored anew counts."""
    shared = engines()
    shared.send(stored(BLOCKS, None, TEXT), *kept(91, 92))
    shared.send(Removed(hashes=[91, 92], medium="CPU"), Removed(hashes=BLOCKS))
    assert shared.held(TEXT) == {}

    shared.send(stored(BLOCKS, None, TEXT), *kept(91, 92), Removed(hashes=BLOCKS))
    assert shared.held(TEXT)[B] == (16, {"LMCACHE": 16})


def test_a_lost_server_s_blocks_are_forgotten_for_all() -> None:
    """Blocks that one engine does not find there are not expected by the others; a block reported again is
    there again, although the GPU has held it all the time."""
    shared = engines()
    shared.send(stored(BLOCKS, None, TEXT), *kept(91, 92))
    shared.ingestor.forget_tier(shared.source, "LMCACHE")
    swept(shared)
    assert shared.held(TEXT) == {A: (20, {})}

    shared.send(*kept(91, 92))
    assert shared.held(TEXT)[B] == (16, {"LMCACHE": 16})
    swept(shared)
    assert shared.held(TEXT)[B] == (16, {"LMCACHE": 16})


def test_no_more_is_believed_than_fits_the_server() -> None:
    """Older blocks go when newer ones fill four fifths of a server of 40 tokens, two blocks of it each."""
    shared = engines()
    shared.ingestor.add_publisher(f"{A}/0", A, SERVER, 40)
    texts = [bytes([97 + number]) * CHUNK for number in range(9)]
    for number, text in enumerate(texts):
        names = [100 + 2 * number, 101 + 2 * number]
        shared.send(stored(names, None, text), *kept(91 + number, text=text), Removed(hashes=names))
        swept(shared)
    counts = [bool(shared.held(text)) for text in texts]

    assert counts == sorted(counts)  # the newest ones
    assert 2 <= sum(counts) <= 4


def test_leases_end_and_loads_renew_them() -> None:
    """Evictions are not reported: a block is believed for an hour after an engine has stored or loaded it."""
    shared = engines()
    shared.send(stored(BLOCKS, None, TEXT), *kept(91, 92), Removed(hashes=BLOCKS))
    aged(shared, 1800.0)
    shared.source = f"{B}/0"
    shared.send(stored(BLOCKS[:4], None, TEXT[:16]))  # a load: no report follows
    shared.send(Removed(hashes=BLOCKS[:4]))
    aged(shared, 1800.0)
    assert shared.held(TEXT)[A] == (16, {"LMCACHE": 16})

    aged(shared, 5400.0)
    assert shared.held(TEXT) == {}


def test_loaded_blocks_are_not_taken_for_computed() -> None:
    """Blocks of a GPU's event that the server had are no progress of prefill."""
    shared = engines()
    shared.send(stored(BLOCKS, None, TEXT), *kept(91, 92), Removed(hashes=BLOCKS))
    swept(shared)
    shared.source = f"{B}/0"
    [seen] = shared.send(stored(BLOCKS, None, TEXT, session="t"))

    assert (seen.loaded, seen.prefilled) == (16, 4)


@pytest.mark.parametrize("size", [SIZE, 3])
def test_reports_that_fit_no_block_are_counted(size: int) -> None:
    """Reports of blocks that no GPU event has named, or whose size is no multiple of the engine's blocks, are
    not believed, and harm nothing."""
    shared = engines()
    shared.send(stored(BLOCKS, None, TEXT))
    odd = stored([91], None, b"xyzxyzxyzxyz"[: 3 * size], session=None, medium="CPU", size=3 * size)
    shared.send(odd, Removed(hashes=BLOCKS), Removed(hashes=[91, 92], medium="CPU"))
    swept(shared)

    assert shared.held(TEXT) == {}
    assert shared.counters.held_unknown == 1
