"""What engines with slower KV tiers count, read from their pages."""

from tests.epp.kvevents.recorded_tiers import recorded

from kvist_epp.engines.vllm.engine_metrics import needed_lines, parse_metrics
from kvist_epp.engines.vllm.tier_metrics import NO_TIERS, TierCounters, source_of


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
    """Whoever owns the storage, and whatever a new medium is called."""
    media = ("GPU", "CPU", "STORAGE", "SHARED", "NEW")

    assert [source_of(medium) for medium in media] == ["device", "host", "disk", "disk", "disk"]
