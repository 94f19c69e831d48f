"""Counters of engines with slower KV tiers, read from their pages."""

import pytest
from tests.epp.kvevents.recorded_tiers import recorded

from kvist_epp.engines.vllm.engine_metrics import needed_lines, parse_metrics
from kvist_epp.engines.vllm.tier_metrics import NO_TIERS, TierCounters, TierSpeedEstimator, source_of


def test_a_real_engine_s_counters_are_read() -> None:
    """vLLM 0.32 with a host tier and a disk tier: tokens by source, bytes and seconds of loads and reads."""
    lines = recorded("self-describing").steps[-1].metrics
    page = f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n{lines}\n".encode()
    tiers = parse_metrics(needed_lines(page).decode()).tiers

    assert tiers.cached == {
        "device": 640.0,
        "host": 640.0,
        "disk": 640.0,
        "p2p": 0.0,
        "external_unspecified": 0.0,
    }
    assert (tiers.load_bytes, tiers.read_bytes) == (1280 * 1024.0, 640 * 1024.0)
    assert 0 < tiers.load_seconds < tiers.read_seconds


def test_older_engines_count_both_directions_under_one_name() -> None:
    """Before 0.31 the direction of a transfer was a label: what was stored does not count as loaded."""
    page = "\n".join(
        f'vllm:kv_offload_total_{what}_total{{engine="{rank}",transfer_type="{kind}"}} {value}'
        for what, value in (("bytes", 1000.0), ("time", 2.0))
        for kind in ("CPU_to_GPU", "GPU_to_CPU")
        for rank in (0, 1)
    )

    assert parse_metrics(page).tiers == TierCounters(load_bytes=2000.0, load_seconds=4.0)


def test_reads_from_other_engines_are_not_reads_of_storage() -> None:
    """A tier that copies from another engine has a speed of its own."""
    page = "\n".join(
        f'vllm:kv_offload_tiering_read_bytes_total{{tier="{tier}"}} {value}'
        for tier, value in (("1:fs", 10.0), ("2:p2p", 1000.0), ("3:obj", 5.0))
    )

    assert parse_metrics(page).tiers.read_bytes == 15.0


def test_engines_without_tiers_have_none() -> None:
    """No connector, or an engine too old to count."""
    assert parse_metrics('vllm:num_requests_running{engine="0"} 1.0').tiers is NO_TIERS


def test_media_of_events_are_sources_of_metrics() -> None:
    """Storage of any owner and media of new names are the source disk."""
    media = ("GPU", "CPU", "STORAGE", "SHARED", "NEW")

    assert [source_of(medium) for medium in media] == ["device", "host", "disk", "disk", "disk"]


def counters(
    loaded: float, load_seconds: float, read: float = 0.0, read_seconds: float = 0.0
) -> TierCounters:
    """Return the counters of an engine with 1 KiB of KV cache a token, that has loaded so many tokens."""
    cached = {"device": 10.0 * loaded, "host": loaded - read, "disk": read}
    return TierCounters(cached, 1024 * loaded, load_seconds, 1024 * read, read_seconds)


def test_the_speed_of_tiers_is_measured() -> None:
    """Bytes of a token are those loaded by the tokens that came from tiers; storage passes through host
    memory, one after the other."""
    estimator = TierSpeedEstimator()
    estimator.observe(counters(5000, 1.0), 0.0)
    assert estimator.rates == {}
    estimator.observe(counters(15_000, 1.1, 5000, 1.0), 2.0)

    assert estimator.speed.bytes_per_token == pytest.approx(1024.0)
    assert estimator.rates["CPU"] == pytest.approx(100_000.0)
    assert estimator.rates["SHARED"] == estimator.rates["STORAGE"] == pytest.approx(1 / (1e-5 + 2e-4))


def test_a_real_engine_s_speed_is_measured() -> None:
    """The recorded engine has 1,024 bytes of KV cache for a token, and its host memory is quicker than its
    disk."""
    estimator = TierSpeedEstimator()
    estimator.observe(TierCounters(), 0.0)
    estimator.observe(parse_metrics(recorded("self-describing").steps[-1].metrics).tiers, 2.0)

    assert estimator.speed.bytes_per_token == 1024.0
    assert estimator.rates["CPU"] > 10_000


def test_a_few_tokens_and_restarts_say_nothing() -> None:
    """Short loads are mostly fixed time; counters that fell are of another life of the engine."""
    estimator = TierSpeedEstimator()
    for at, found in enumerate(
        (counters(0, 0.0), counters(500, 1.0), counters(100, 0.5), counters(300, 1.0))
    ):
        estimator.observe(found, float(at))

    assert estimator.rates == {}


def test_loads_of_one_short_prompt_a_scrape_are_measured() -> None:
    """Small loads add up, at a speed that follows a disk which becomes slower within a few more of them."""
    estimator = TierSpeedEstimator()
    for at in range(8):
        estimator.observe(counters(192.0 * at, 0.001 * at, 192.0 * at, 0.1 * at), float(at))
    quick = estimator.rates["SHARED"]
    for at in range(8, 13):
        late = 192.0 * at
        estimator.observe(counters(late, 0.001 * at, late, 0.7 + (at - 7.0)), float(at))

    assert quick == pytest.approx(192 / 0.101)
    assert estimator.skipped(1000.0, 13.0) == {"STORAGE", "SHARED"}


def test_engines_without_these_metrics_have_no_speed() -> None:
    """No connector, or no counters of tokens by source: the defaults count."""
    estimator = TierSpeedEstimator()
    for at in range(3):
        estimator.observe(NO_TIERS, float(at))
        estimator.observe(TierCounters(load_bytes=1e9 * at, load_seconds=0.1 * at), float(at))

    assert estimator.rates == {}
    assert estimator.skipped(1e9, 3.0) == frozenset()


def test_a_tier_slower_than_computing_is_skipped_for_a_minute() -> None:
    """Then it may be tried again: it may have become quicker, which nothing else would show."""
    estimator = TierSpeedEstimator()
    estimator.observe(counters(0, 0.0), 0.0)
    estimator.observe(counters(20_000, 0.1, 10_000, 10.0), 2.0)
    slow = frozenset({"STORAGE", "SHARED"})

    assert [estimator.skipped(15_000.0, at) for at in (2.0, 60.0, 62.0)] == [slow, slow, frozenset()]
    assert estimator.skipped(500.0, 2.0) == frozenset()
