"""Tests of the parser of an engine's pages, and of the rates derived from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.engines.vllm.engine_metrics import (
    EngineRates,
    EngineSample,
    ServedModels,
    needed_lines,
    page_digest,
    parse_metrics,
    parse_models,
)

PAGE = r"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-32B"} 3.0
vllm:num_requests_running{engine="1",model_name="Qwen/Qwen3-32B"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",engine="0",note="a } \"b\" {",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="50"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 600.0
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e+09
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 5.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1010.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 400.0
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 10.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 600.0
vllm:generation_tokens_total{engine="0"} 77.0
vllm:request_prefill_time_seconds_bucket{engine="0",le="0.3"} 5.0
vllm:request_prefill_time_seconds_count{engine="0"} 5.0
vllm:request_prefill_time_seconds_sum{engine="0"} 0.5
vllm:request_prefill_kv_computed_tokens_sum{engine="0"} 390.0
vllm:request_decode_time_seconds_sum{engine="0"} 10.0
vllm:request_decode_time_seconds_count{engine="0"} 5.0
vllm:request_time_per_output_token_seconds_sum{engine="0"} 0.1
vllm:request_time_per_output_token_seconds_count{engine="0"} 5.0 1700000000000
"""


def test_all_metrics_of_a_page_are_parsed() -> None:
    """Ranks are summed, the fullest cache counts, and metrics with similar names are ignored."""
    expected = EngineSample(
        running=7,
        waiting=2,
        cache_usage=0.75,
        block_size=16,
        blocks=150,
        queries=1000.0,
        hits=600.0,
        prompt_tokens=1010.0,
        computed_tokens=410.0,
        generation_tokens=77.0,
        prefills=5.0,
        prefill_seconds=0.5,
        prefill_tokens=390.0,
        decodes=5.0,
        decode_seconds=10.0,
        token_times=5.0,
        token_seconds=0.1,
    )

    assert parse_metrics(PAGE) == expected
    assert parse_metrics(needed_lines(PAGE.encode()).decode()) == expected
    assert expected.cache_tokens == 2400


def test_an_engines_own_count_of_its_tokens_comes_first() -> None:
    """The size that the engine reports counts, summed over ranks; the size computed from blocks serves where
    there is none. Preemptions are parsed too."""
    page = "".join(
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="{size}",'
        f'engine="{rank}"}} 1.0\nvllm:num_preemptions_total{{engine="{rank}"}} 2.0\n'
        for rank, size in enumerate((700, 800))
    )
    assert (parse_metrics(page).reported_tokens, parse_metrics(page).preemptions) == (1500, 4.0)
    assert parse_metrics(page.replace("kv_cache_size", "other")).reported_tokens == 3200
    assert parse_metrics(page.replace('="700"', '="None"')).reported_tokens == 800
    assert parse_metrics("").reported_tokens is None


def test_computed_tokens_of_older_engines_are_a_difference() -> None:
    """Without the counter by source, tokens that were not hits were computed."""
    page = "vllm:prompt_tokens_total 50\nvllm:prefix_cache_hits_total 20\n"

    assert parse_metrics(page).computed_tokens == 30.0


@given(st.text(alphabet='vllm:num_requests_running{}"\\=,. \n0123e+-NaInf_total', max_size=200))
def test_no_page_raises(page: str) -> None:
    """Garbage gives a sample within bounds, never an exception, and the needed lines give the same."""
    text = PAGE[:300] + page
    sample = parse_metrics(text)

    assert sample.running >= 0
    assert parse_metrics(needed_lines(text.encode()).decode()) == sample


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "x", "1e400"])
def test_invalid_values_are_skipped(value: str) -> None:
    """A gauge whose value is no number of requests counts as absent."""
    assert parse_metrics(f"vllm:num_requests_running {value}\n") == EngineSample()


def test_the_digest_of_a_page_is_that_of_vllms_part() -> None:
    """The digest stays while only the process's own metrics change, and changes with any of vLLM's."""
    idle = [page_digest(b"process_cpu_seconds_total %d\n" % n + PAGE.encode()) for n in (1, 2)]
    assert idle[0] == idle[1]
    assert page_digest(PAGE.replace("} 2.0", "} 3.0").encode()) != idle[0]


def test_another_servers_page_is_no_engine() -> None:
    """A /metrics page without vLLM's gauge is refused."""
    with pytest.raises(ValueError, match="not vLLM's"):
        needed_lines(b"node_cpu_seconds_total 1\n")


def test_models_and_adapters() -> None:
    """Entries with a parent are LoRA adapters; unknown keys do not matter."""
    body = b"""{"object": "list", "data": [
        {"id": "base", "object": "model", "root": "x", "parent": null, "max_model_len": 4096},
        {"id": "alias", "parent": null, "max_model_len": 2048},
        {"id": "sql", "parent": "base"}]}"""

    assert parse_models(body) == ServedModels(frozenset({"base", "alias"}), frozenset({"sql"}), 2048)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"data": [1]}', b'{"data": [{"id": 1}]}', b"\xff"])
def test_other_lists_are_refused(body: bytes) -> None:
    """A body that is not vLLM's list of models raises ValueError, which the scraper counts as a failure."""
    with pytest.raises(ValueError, match="not a list of models"):
        parse_models(body)


def sample(prefills: float, tokens: float, seconds: float, **more: float) -> EngineSample:
    return EngineSample(
        prefills=prefills,
        prefill_tokens=tokens,
        prefill_seconds=seconds,
        prompt_tokens=tokens,
        **more,  # type: ignore[arg-type]
    )


def test_rate_is_tokens_by_prefill_time() -> None:
    """The rate of prefills that did not overlap is their computed tokens divided by their time."""
    rates = EngineRates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(5, 10_000, 2.0), now=10.0)

    assert rates.prefill == 5000.0


@pytest.mark.parametrize("seconds", [40.0, 9.0, 3.1])
def test_overlapping_prefills_do_not_change_the_rate(seconds: float) -> None:
    """Requests that share a batch wait for each other, so their times do not show the engine's speed."""
    rates = EngineRates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(100, 200_000, seconds), now=10.0)

    assert rates.prefill is None


def test_a_batch_that_fills_up_does_not_change_the_rate() -> None:
    """While many prompts were computed and few requests have ended, those few do not show the overlap."""
    rates = EngineRates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(5, 10_000, 2.0, computed_tokens=13_000.0), now=10.0)

    assert rates.prefill is None


def test_short_prefills_do_not_change_the_rate() -> None:
    """Short prefills behind a warm cache are mostly a step's fixed cost, and do not lower the rate."""
    rates = EngineRates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(10, 20_000, 2.0), now=10.0)
    rates.observe(sample(1010, 40_000, 30.0), now=60.0)

    assert rates.prefill == 10_000.0


def test_one_window_changes_the_rate_by_a_part() -> None:
    """The rate is an exponential average over windows."""
    rates = EngineRates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(5, 10_000, 1.0), now=30.0)
    rates.observe(sample(10, 20_000, 3.0), now=60.0)

    assert rates.prefill == pytest.approx(10_000 + 0.3 * (5_000 - 10_000))


def test_a_restarted_engine_starts_a_new_window() -> None:
    """Counters that decrease start a new window; the rates stay."""
    rates = EngineRates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(5, 10_000, 1.0), now=10.0)
    rates.observe(sample(0, 0, 0), now=20.0)
    rates.observe(sample(5, 10_000, 1.0), now=30.0)

    assert rates.prefill == 10_000.0


def test_incredible_rates_are_ignored() -> None:
    """A rate that no accelerator reaches is ignored."""
    rates = EngineRates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(1, 1e9, 1e-3), now=20.0)

    assert rates.prefill is None


def test_decode_times_and_hits() -> None:
    """Mean decode time, mean time per token and the hit ratio come from the same window."""
    rates = EngineRates()
    rates.observe(EngineSample(), now=0.0)
    rates.observe(
        EngineSample(
            decodes=4, decode_seconds=8.0, token_times=4, token_seconds=0.08, queries=100.0, hits=75.0
        ),
        now=2.0,
    )

    assert (rates.decode_seconds, rates.token_seconds, rates.hit_ratio) == (2.0, 0.02, 0.75)
