"""What is read from an engine's pages, and the rates learned from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.engines.vllm.engine_metrics import (
    EngineSample,
    Rates,
    Served,
    parse,
    parse_models,
    require_engine,
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


def test_a_page_is_read_whole() -> None:
    """Ranks are summed, the fullest cache counts, and names that only look alike are left alone."""
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

    assert parse(PAGE) == expected
    assert expected.cache_tokens == 2400


def test_an_engines_own_count_of_its_tokens_comes_first() -> None:
    """Where layers keep different things, blocks are not tokens: the engine says how many it holds; ranks
    add up, and an older engine's blocks do where it says nothing. Preemptions are read too."""
    told = "".join(
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="{size}",'
        f'engine="{rank}"}} 1.0\nvllm:num_preemptions_total{{engine="{rank}"}} 2.0\n'
        for rank, size in enumerate((700, 800))
    )
    assert (parse(told).reported_tokens, parse(told).preemptions) == (1500, 4.0)
    assert parse(told.replace("kv_cache_size", "other")).reported_tokens == 3200
    assert parse(told.replace('="700"', '="None"')).reported_tokens == 800
    assert parse("").reported_tokens is None


def test_older_engines_tell_computed_tokens_by_difference() -> None:
    """Without the counter by source, what was not a hit was computed."""
    page = "vllm:prompt_tokens_total 50\nvllm:prefix_cache_hits_total 20\n"

    assert parse(page).computed_tokens == 30.0


@given(st.text(alphabet='vllm:num_requests_running{}"\\=,. \n0123e+-NaInf_total', max_size=200))
def test_no_page_raises(page: str) -> None:
    """Garbage gives a sample without sense but within bounds, never an exception."""
    sample = parse(PAGE[:300] + page)

    assert sample.running >= 0


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "x", "1e400"])
def test_odd_values_are_passed_over(value: str) -> None:
    """A gauge that is no count of requests is no request."""
    assert parse(f"vllm:num_requests_running {value}\n") == EngineSample()


def test_another_servers_page_is_no_engine() -> None:
    """A /metrics page without vLLM's gauge is refused."""
    with pytest.raises(ValueError, match="not vLLM's"):
        require_engine("node_cpu_seconds_total 1\n")


def test_models_and_adapters() -> None:
    """Entries with a parent are LoRA adapters; unknown keys do not matter."""
    body = b"""{"object": "list", "data": [
        {"id": "base", "object": "model", "root": "x", "parent": null, "max_model_len": 4096},
        {"id": "alias", "parent": null, "max_model_len": 2048},
        {"id": "sql", "parent": "base"}]}"""

    assert parse_models(body) == Served(frozenset({"base", "alias"}), frozenset({"sql"}), 2048)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"data": [1]}', b'{"data": [{"id": 1}]}', b"\xff"])
def test_other_lists_are_refused(body: bytes) -> None:
    """What is not vLLM's list of models is a ValueError, which the scraper takes as a failed scrape."""
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
    """Prefills that did not overlap: computed tokens divided by their time."""
    rates = Rates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(5, 10_000, 2.0), now=10.0)

    assert rates.prefill == 5000.0


@pytest.mark.parametrize("seconds", [40.0, 9.0, 3.1])
def test_overlapping_prefills_teach_nothing(seconds: float) -> None:
    """Requests that share a batch wait for each other: their times say nothing of the engine's speed."""
    rates = Rates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(100, 200_000, seconds), now=10.0)

    assert rates.prefill is None


def test_a_batch_that_fills_up_teaches_nothing() -> None:
    """Many prompts were computed and few requests have ended: these few say nothing of the overlap."""
    rates = Rates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(5, 10_000, 2.0, computed_tokens=13_000.0), now=10.0)

    assert rates.prefill is None


def test_short_prefills_teach_nothing() -> None:
    """A warm cache leaves short prefills, mostly a step's fixed cost: they do not make a pod look slow."""
    rates = Rates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(10, 20_000, 2.0), now=10.0)
    rates.observe(sample(1010, 40_000, 30.0), now=60.0)

    assert rates.prefill == 10_000.0


def test_an_odd_window_moves_the_rate_a_little() -> None:
    """The rate follows smoothly."""
    rates = Rates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(5, 10_000, 1.0), now=30.0)
    rates.observe(sample(10, 20_000, 3.0), now=60.0)

    assert rates.prefill == pytest.approx(10_000 + 0.3 * (5_000 - 10_000))


def test_a_restarted_engine_begins_anew() -> None:
    """Counters that fall back start a new window; what was learned stays."""
    rates = Rates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(5, 10_000, 1.0), now=10.0)
    rates.observe(sample(0, 0, 0), now=20.0)
    rates.observe(sample(5, 10_000, 1.0), now=30.0)

    assert rates.prefill == 10_000.0


def test_counters_that_lie_are_not_believed() -> None:
    """A rate no machine has is left out."""
    rates = Rates()
    rates.observe(sample(0, 0, 0), now=0.0)
    rates.observe(sample(1, 1e9, 1e-3), now=20.0)

    assert rates.prefill is None


def test_decode_times_and_hits() -> None:
    """Mean decode time, mean time per token and the hit ratio come from the same window."""
    rates = Rates()
    rates.observe(EngineSample(), now=0.0)
    rates.observe(
        EngineSample(
            decodes=4, decode_seconds=8.0, token_times=4, token_seconds=0.08, queries=100.0, hits=75.0
        ),
        now=2.0,
    )

    assert (rates.decode_seconds, rates.token_seconds, rates.hit_ratio) == (2.0, 0.02, 0.75)
