"""The index's benchmark measures what it says, at any scale."""

import pytest

from kvist_epp.engines.vllm.kv_events import Removed, Stored, decode
from kvist_epp.index.byte_index import Index
from kvist_sim.bench.index import command as index
from kvist_sim.bench.index.data import EVENT_BLOCKS, ROOT, chain
from kvist_sim.bench.index.publisher import payloads


def test_chains_are_stored_as_prefill_announces_them() -> None:
    """A chain of several events matches whole, and with other names has the same text."""
    filled = Index()
    chain(1, 200).store(filled, filled.publisher("a"))
    chain(1, 200, names="other").store(filled, filled.publisher("b"))
    matches = filled.match(ROOT, chain(1, 200).prompt)

    assert [matches.of(number).tokens for number in range(2)] == [3200, 3200]
    assert set(chain(1, 200).hashes).isdisjoint(chain(1, 200, names="other").hashes)


def test_the_publisher_evicts_as_much_as_it_stores() -> None:
    """Once the cache is full each message removes the oldest chain, block by block from its end."""
    batches = [decode(payload) for payload in payloads(3, 5, keep=2)]
    stored = [event for batch in batches for event in batch.events if isinstance(event, Stored)]
    removed = [event for batch in batches for event in batch.events if isinstance(event, Removed)]

    assert [len(batch.events) for batch in batches] == [
        1,
        1,
        1 + EVENT_BLOCKS,
        1 + EVENT_BLOCKS,
        1 + EVENT_BLOCKS,
    ]
    assert [event.hashes[0] for event in removed[:EVENT_BLOCKS]] == stored[0].hashes[::-1]
    assert len({tuple(event.token_ids[:3]) for event in stored}) == 5


@pytest.mark.parametrize("publishers", [1, 3])
def test_memory_is_measured_in_a_process_of_its_own(publishers: int) -> None:
    """Memory of other tests does not count; the text alone takes 64 bytes a block."""
    figures = index.measure_memory(100_000, publishers)

    assert 64 < figures["bytes_per_distinct_block"] < 400
    assert figures["bytes_per_held_block"] == figures["bytes_per_distinct_block"] / publishers


def test_rates_and_times_are_measured_at_any_scale() -> None:
    """Each measurement works on little and gives positive figures."""
    figures = [
        index.measure_ingest(EVENT_BLOCKS * 4),
        index.measure_removal(EVENT_BLOCKS * 4),
        index.measure_forget(EVENT_BLOCKS * 4),
        index.measure_match(5, prompts=2, holders=20),
        index.measure_fork(50),
        index.measure_history(5),
    ]

    assert [list(part) for part in figures] == [
        ["distinct", "shared", "foreign"],
        ["batched", "single"],
        ["forget_us", "swept_per_second"],
        ["blocks", "us"],
        ["known_us", "new_us"],
        ["note_us", "match_us"],
    ]
    assert all(value > 0 for part in figures for value in part.values())


def test_picks_and_ingest_go_through_sockets() -> None:
    """A picker is asked while engines publish; every pick is timed."""
    figures = index.measure_zmq("picks", 20_000, seconds=0.3)

    assert figures["picks"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]


def test_the_table_shows_the_aims() -> None:
    """Every figure of the issue has a row with its aim beside it."""
    rates = dict.fromkeys(("distinct", "shared", "foreign", "batched", "single", "swept_per_second"), 1e6)
    memory = {"bytes_per_distinct_block": 180.0, "bytes_per_held_block": 12.0}
    ingest, picks = {"blocks_per_second": 6e5}, {"p99_ms": 1.5}
    rows = index._rows(
        {
            "ingest": rates,
            "removal": rates,
            "forget": {**rates, "forget_us": 9.0},
            "match": {"45": {"us": 5.0}, "450": {"us": 28.0}},
            "holders": {"10": 5.0, "1000": 6.0},
            "fork": {"known_us": 4.0, "new_us": 2.0},
            "history": {"note_us": 18.0, "match_us": 8.0},
            "answers": {"chunks": 38_000.0, "whole_check": 15_000.0},
            "memory": {"distinct": [memory], "shared": memory, "foreign": memory},
            "zmq": {
                "stored": ingest,
                "stored_and_evicted": ingest,
                "picks_idle": picks,
                "picks_during_ingest": picks,
            },
        }
    )

    assert {(measured, aim) for _, measured, aim in rows if aim} == {
        ("1.00 M/s", "1.00 M/s"),
        ("28 us", "200 us"),
        ("5 and 6 us", "the same"),
        ("18 us", "150 us"),
        ("180 B", "220 B"),
        ("12 B", "45 B"),
        ("0.60 M/s", "0.50 M/s"),
        ("1.50 ms", "5 ms"),
    }
