"""Sequences in a step, by the memory that a plan leaves for the KV cache."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.pools import plan, plan_made, reason

from kvist_operator.hardware import find_accelerator
from kvist_operator.plan.size import default_sequences

QWEN = "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("gpu", "sequences"), [("L4", 256), ("A100-80GB", 256), ("H100", 512), ("H200", 1024), ("MI300X", 1024)]
)
def test_sequences_follow_the_memory(gpu: str, sequences: int) -> None:
    """A GPU whose cache holds more short requests runs more of them at once, up to vLLM's default."""
    found = plan(QWEN, gpu)

    assert found.settings.sequences == sequences
    assert found.argv[found.argv.index("--max-num-seqs") + 1] == str(sequences)


def test_the_reason_names_what_the_cache_holds() -> None:
    """The reason has the requests that fit, their length, and vLLM's default."""
    assert "holds 777 requests of 1,024 tokens; vLLM's default on this GPU is 1024" in reason(
        plan(QWEN, "H100"), "maxNumSeqs"
    )


def test_the_length_of_requests_is_that_of_the_workload() -> None:
    """Long requests fill the cache with fewer sequences, so the number stays low."""
    found = plan(QWEN, "H200", workload={"promptTokens": 16_000, "outputTokens": 384})

    assert found.settings.sequences == 256
    assert "requests of 16,384 tokens" in reason(found, "maxNumSeqs")


def test_data_parallel_ranks_have_their_own_sequences() -> None:
    """The number is one rank's, so the cache of one rank decides."""
    found = plan("deepseek-ai/DeepSeek-R1", "H200", workload={"concurrency": 64})

    assert found.layout.data == 8
    assert "the KV cache of each rank holds" in reason(found, "maxNumSeqs")


@pytest.mark.parametrize("number", [16, 2048])
def test_a_number_of_the_user_stays(number: int) -> None:
    """A number in the spec is neither raised nor lowered."""
    assert plan(QWEN, "H200", engine={"maxNumSeqs": number}).settings.sequences == number


def test_a_tpot_target_keeps_the_number_low() -> None:
    """More sequences in a step make each token slower, so a target for it leaves the number alone."""
    assert plan(QWEN, "H200", workload={"tpotMilliseconds": 40}).settings.sequences <= 256


def test_a_gpu_with_much_memory_and_little_compute_has_the_small_default() -> None:
    """vLLM keeps A100 and GB10 on its small defaults, whatever their memory."""
    a100, h100 = find_accelerator("A100-80GB"), find_accelerator("H100-80GB")
    assert a100
    assert h100
    assert default_sequences(h100) == 1024
    assert default_sequences(a100) == default_sequences(replace(h100, capability=121)) == 256


@given(
    concurrency=st.integers(1, 64),
    gpu=st.sampled_from(["L4", "L40S", "A100-40GB", "H100", "H200", "B200"]),
    layers=st.integers(8, 80),
    context=st.sampled_from([8192, 32_768, 131_072]),
)
def test_more_sequences_never_cost_the_wish(concurrency: int, gpu: str, layers: int, context: int) -> None:
    """The plan holds as much of the wish as the same plan with 256 sequences, and nearly as many tokens."""
    config = {"num_hidden_layers": layers}
    wish = {"workload": {"concurrency": concurrency}}
    free = plan_made(config, gpu, engine={"maxModelLen": context}, **wish)
    if free.settings.sequences <= 256:
        return
    fixed = plan_made(config, gpu, engine={"maxModelLen": context, "maxNumSeqs": 256}, **wish)

    assert free.layout == fixed.layout
    assert free.memory.fits(context, concurrency)
    assert free.memory.kv_tokens >= 0.95 * fixed.memory.kv_tokens
    assert free.settings.sequences <= min(1024, free.settings.batched_tokens)
