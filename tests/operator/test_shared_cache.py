"""Data-parallel attention and decode context parallelism of MLA models."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.pools import plan, plan_made, reason

from kvist_operator.errors import SpecError

MLA = ("deepseek-ai/DeepSeek-R1", "moonshotai/Kimi-K2.5")


@pytest.mark.parametrize("model", MLA)
def test_a_wide_workload_gets_data_parallel_attention(model: str) -> None:
    """With requests for every rank the ranks get caches of their own, which hold three times as much."""
    narrow, wide = plan(model, "H200"), plan(model, "H200", workload={"concurrency": 64})

    assert (narrow.layout.tensor, narrow.layout.data) == (8, 1)
    assert (wide.layout.tensor, wide.layout.data, wide.layout.expert_size) == (1, 8, 8)
    assert wide.memory.kv_tokens > 3 * narrow.memory.kv_tokens
    assert f"{wide.memory.kv_tokens:,} tokens instead of" in reason(wide, "dataParallelSize")
    assert "--data-parallel-size" in wide.argv
    assert "--enable-expert-parallel" in wide.argv


def test_a_narrow_workload_is_told_of_data_parallel_attention() -> None:
    """The plan names the tokens that it would hold and the concurrency that it needs."""
    narrow = plan("deepseek-ai/DeepSeek-R1", "H200")

    said = reason(narrow, "dataParallelSize")
    assert "8 ranks would hold" in said
    assert "set spec.workload.concurrency to 32" in said


def test_context_parallelism_comes_before_less_context() -> None:
    """Kimi-K2.5 on one node of H100 keeps its context, and several requests at once instead of one."""
    divided = plan("moonshotai/Kimi-K2.5", "H100")
    kept = plan("moonshotai/Kimi-K2.5", "H100", engine={"decodeContextParallelSize": 1})

    assert divided.layout.context == 8
    assert divided.argv[divided.argv.index("--decode-context-parallel-size") + 1] == "8"
    assert divided.settings.max_len > kept.settings.max_len
    assert divided.memory.kv_tokens > 7 * kept.memory.kv_tokens
    assert "a decode step waits for all of them" in reason(divided, "decodeContextParallelSize")


def test_no_more_ranks_divide_the_tokens_than_needed() -> None:
    """Two ranks are enough for eight sequences of 160k, so the plan does not take eight."""
    found = plan("deepseek-ai/DeepSeek-R1", "H200", engine={"maxModelLen": 163_840})

    assert found.layout.context == 2
    assert found.memory.concurrency(163_840) >= 8


@pytest.mark.parametrize("engine", [{"tensorParallelSize": 8}, {"dataParallelSize": 1}])
def test_sizes_of_the_user_stay(engine: dict[str, int]) -> None:
    """A size that the user sets is neither changed nor commented on."""
    found = plan("deepseek-ai/DeepSeek-R1", "H200", engine=engine, workload={"concurrency": 64})

    assert (found.layout.tensor, found.layout.data, found.layout.context) == (8, 1, 1)


def test_models_with_heads_are_left_alone() -> None:
    """Tensor parallelism splits the KV heads of GQA, so nothing is repeated."""
    found = plan("meta-llama/Llama-3.3-70B-Instruct", "A100-80GB", workload={"concurrency": 64})

    assert found.layout.tensor > 1
    assert (found.layout.data, found.layout.context) == (1, 1)


def test_more_ranks_than_kv_heads_may_divide_the_tokens() -> None:
    """GQA with two KV heads on eight GPUs keeps four copies of each; four ranks divide the tokens."""
    config = {"num_attention_heads": 32, "num_key_value_heads": 2}
    fixed = {"tensorParallelSize": 8}
    whole = plan_made(config, "H100", engine=fixed)
    divided = plan_made(config, "H100", engine={**fixed, "decodeContextParallelSize": 4})

    assert divided.memory.kv_tokens == 4 * whole.memory.kv_tokens


@pytest.mark.parametrize(
    ("config", "context", "said"),
    [
        ({}, 2, "is more than the 1 copies of each KV head that 8 ranks hold"),
        ({"num_key_value_heads": 2}, 3, "does not divide the tensor parallelism of 8"),
        ({"num_attention_heads": 24, "num_key_value_heads": 1}, 16, "does not divide the tensor parallelism"),
        ({"num_attention_heads": 24, "num_key_value_heads": 2}, 8, "is more than the 4 copies"),
        (
            {"num_key_value_heads": 2, "layer_types": ["sliding_attention"] * 32, "sliding_window": 512},
            2,
            "is not for models with sliding windows",
        ),
    ],
)
def test_context_parallelism_that_vllm_refuses_is_refused(
    config: dict[str, object], context: int, said: str
) -> None:
    """The error names the field and the reason that vLLM would give at its start."""
    engine = {"tensorParallelSize": 8, "decodeContextParallelSize": context}
    with pytest.raises(SpecError, match=said) as refused:
        plan_made(config, "H100", engine=engine)

    assert str(refused.value).startswith("spec.engine.decodeContextParallelSize: ")


@given(
    st.sampled_from(MLA),
    st.sampled_from(["H100", "H200", "B200", "MI300X"]),
    st.integers(1, 300),
    st.sampled_from([8192, 32_768, 131_072]),
)
def test_no_other_layout_on_as_many_gpus_loses_tokens(
    model: str, gpu: str, concurrency: int, length: int
) -> None:
    """Whatever is chosen holds at least the tokens of tensor parallelism with the same arguments."""
    engine = {"maxModelLen": length}
    workload = {"concurrency": concurrency}
    chosen = plan(model, gpu, engine=engine, workload=workload)
    layout = {"tensorParallelSize": chosen.layout.tensor * chosen.layout.data}
    plain = plan(model, gpu, engine={**engine, **layout}, workload=workload)

    assert not plain.argv or chosen.memory.kv_tokens >= plain.memory.kv_tokens
