"""Promises of the memory arithmetic: vLLM's figures, layer type by layer type."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.pools import known, made

from kvist_operator.hardware import known_accelerator
from kvist_operator.memory.kv_cache import Cache, caches, head_bytes
from kvist_operator.memory.layout import GIB, Draft, EngineSettings, Layout, stages
from kvist_operator.memory.memory_budget import budget, weight_bytes
from kvist_operator.memory.memory_profile import capture_sizes
from kvist_operator.models.shape import Facts

ALONE = Layout()


def cache(facts: Facts, layout: Layout = ALONE, capability: int = 90, **run: Any) -> Cache:
    """Return the KV cache of the fullest stage."""
    found = caches(facts.shape, layout, EngineSettings(**run), capability)
    return max(found, key=lambda c: c.block_bytes)


def token_bytes(facts: Facts, layout: Layout = ALONE, capability: int = 90, **run: Any) -> float:
    """Return the bytes per token of a model whose layers are all alike."""
    found = cache(facts, layout, capability, **run)
    return found.block_bytes / EngineSettings(**run).block


@pytest.mark.parametrize(
    ("name", "layout", "dtype", "expected"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", Layout(), "auto", 131_072),
        ("meta-llama/Llama-3.1-8B-Instruct", Layout(), "fp8", 65_536),
        ("meta-llama/Llama-3.1-70B-Instruct", Layout(tensor=4), "auto", 81_920),
        ("meta-llama/Llama-3.1-70B-Instruct", Layout(tensor=16), "auto", 40_960),
        ("meta-llama/Llama-3.1-70B-Instruct", Layout(pipeline=2), "auto", 163_840),
        ("deepseek-ai/DeepSeek-R1", Layout(tensor=8), "auto", 61 * 1152),
        ("deepseek-ai/DeepSeek-R1", Layout(), "auto", 61 * 1152),
        ("deepseek-ai/DeepSeek-R1", Layout(tensor=8), "fp8", 61 * 576),
        ("deepseek-ai/DeepSeek-V3.2", Layout(tensor=8), "auto", 61 * (1152 + 132)),
        ("zai-org/GLM-5.3-FP8", Layout(tensor=8), "fp8", 78 * 656 + 21 * 132),
    ],
)
def test_bytes_a_token_are_vllm_s(name: str, layout: Layout, dtype: str, expected: int) -> None:
    """GQA is sharded down to one head, MLA is whole on each rank; the last case was measured on 8 × H200."""
    assert token_bytes(known(name), layout, kv_dtype=dtype) == expected


def test_sparse_mla_is_packed_on_hopper_and_plain_on_blackwell() -> None:
    """A row has 656 bytes with FLASHMLA_SPARSE and one byte per element with FLASHINFER_MLA_SPARSE."""
    hopper, blackwell = (
        token_bytes(known("deepseek-ai/DeepSeek-V3.2"), capability=c, kv_dtype="fp8") for c in (90, 100)
    )

    assert (hopper, blackwell) == (61 * (656 + 132), 61 * (576 + 132))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", 512),
        ("fp8", 256),
        ("fp8_e5m2", 256),
        ("fp8_per_token_head", 264),
        ("int8_per_token_head", 264),
        ("int4_per_token_head", 136),
        ("nvfp4", 144),
    ],
)
def test_each_kv_dtype_has_its_bytes(dtype: str, expected: float) -> None:
    """Key and value of one head of 128 have these bytes, scales included."""
    assert head_bytes(256, dtype, "bfloat16") == expected


def test_windows_bound_what_a_long_request_takes() -> None:
    """Half the layers of gpt-oss keep the window and the tokens in flight, the others keep all tokens."""
    found = cache(known("openai/gpt-oss-120b"), batched_tokens=2048)

    assert found.request_blocks(131_072) == 131_072 // 16 + (128 - 1 + 2 * 2048) // 16 + 2
    assert found.block_bytes == 18 * 16 * 8 * 128 * 2


def test_a_recurrent_state_takes_a_page_and_enlarges_the_blocks() -> None:
    """Attention blocks of Qwen3.5 grow until a state fits, and a request keeps two states per layer group."""
    found = cache(known("Qwen/Qwen3.5-27B"))
    state = (10_240 * 3 * 2) + 48 * 128 * 128 * 4
    page = 16 * 2 * 4 * 256 * 2

    assert found.block_bytes == 16 * page * -(-state // page)
    assert found.request_blocks(1) == 1 + 3 * 2


def test_different_heads_share_pages() -> None:
    """Full layers of Gemma 4 have half the bytes per token, so their blocks hold twice the tokens."""
    found = cache(known("google/gemma-4-26B-A4B-it"))

    assert sorted(tokens for _, _, tokens in found.kinds) == [16, 32]


def test_layers_that_share_a_cache_have_none() -> None:
    """The last layers of Gemma's small models read an earlier layer's cache and have none of their own."""
    assert token_bytes(made(num_kv_shared_layers=12)) == 20 * 4096


def test_concurrency_is_what_vllm_reports() -> None:
    """The KV cache holds as many tokens as a log of vLLM 0.9 on 4 × H100 says: 8.11 GiB, 178,880 tokens."""
    found = cache(known("Qwen/Qwen3-235B-A22B-FP8"), Layout(tensor=4, expert=True))

    assert found.tokens(8.11 * GIB, 40_960) == pytest.approx(178_880, rel=0.02)


def test_speculative_drafts_cost_weights_and_cache() -> None:
    """A draft model costs weights and KV cache; n-grams cost nothing."""
    target, draft = known("Qwen/Qwen3-32B"), known("Qwen/Qwen3-0.6B")
    plain, run = EngineSettings(), Draft(method="draft_model", tokens=4, shape=draft.shape)
    extra = weight_bytes(target.shape, Layout(), replace(plain, draft=run)) - weight_bytes(
        target.shape, Layout(), plain
    )

    assert extra == pytest.approx(weight_bytes(draft.shape, Layout(), plain))
    assert token_bytes(target, draft=run) == 64 * 4096 + 28 * 4096
    assert token_bytes(target, draft=Draft(method="ngram", tokens=4)) == 64 * 4096


def test_multi_token_prediction_caches_its_layer() -> None:
    """MTP of DeepSeek adds one row of MLA to the cache and its experts to the weights."""
    facts = known("deepseek-ai/DeepSeek-R1")
    layout, draft = Layout(tensor=8, expert=True), Draft(method="mtp", tokens=1)

    assert token_bytes(facts, layout, draft=draft) == 62 * 1152
    assert weight_bytes(facts.shape, layout, EngineSettings(draft=draft)) > weight_bytes(
        facts.shape, layout, EngineSettings()
    )


def test_stages_are_cut_as_vllm_cuts_them() -> None:
    """A remainder of layers goes to the stages before the last: 61 over 4 stages are 15, 15, 16, 15."""
    shape = known("deepseek-ai/DeepSeek-R1").shape

    assert [stage.total() for stage in stages(shape.layers, 4)] == [15, 15, 16, 15]
    assert [stage.total() for stage in stages(shape.layers, 3)] == [20, 21, 20]


def test_the_smallest_stage_decides() -> None:
    """A pipeline holds as many tokens as the stage that holds the fewest."""
    memory = budget(
        known("deepseek-ai/DeepSeek-R1"),
        known_accelerator("H100"),
        Layout(tensor=8, pipeline=2),
        EngineSettings(),
    )

    assert memory.concurrency(32_768) == min(c.concurrency(memory.kv, 32_768) for c in memory.stages)
    assert len({c.block_bytes for c in memory.stages}) == 2


def test_graphs_are_counted_as_logs_count_them() -> None:
    """vLLM captures 51 graphs up to 512, 35 up to 256 and 19 up to 128, as its logs say."""
    assert [len(capture_sizes(n)) for n in (512, 256, 128)] == [51, 35, 19]


@pytest.mark.parametrize(
    ("gpu", "layout", "run", "gib"),
    [
        ("H200", Layout(), {}, 60.8),
        ("H100", Layout(), {"version": (0, 30)}, 60.8),
        ("H100", Layout(), {"version": (0, 29)}, 65.9),
        ("H100", Layout(), {"adapters": 2}, 65.9),
        ("H100", Layout(data=2, expert=True), {}, 34.9),
        ("A100-80GB", Layout(), {}, 65.9),
    ],
)
def test_gpt_oss_is_padded_less_where_triton_is_certain(
    gpu: str, layout: Layout, run: dict[str, Any], gib: float
) -> None:
    """Experts of gpt-oss take the memory of Triton's kernels on Hopper with vLLM 0.30 or newer, and of
    Marlin's elsewhere, with adapters and with experts of their own on each rank."""
    shape, size = known("openai/gpt-oss-120b").shape, EngineSettings(**run)

    assert weight_bytes(shape, layout, size, gpu=known_accelerator(gpu)) / GIB == pytest.approx(gib, rel=0.01)


def test_a_checkpoint_of_known_size_scales_the_weights() -> None:
    """A checkpoint that is ten per cent larger takes ten per cent more on each GPU."""
    shape = known("Qwen/Qwen3-8B").shape
    computed = weight_bytes(shape, Layout(), EngineSettings())

    assert weight_bytes(shape, Layout(), EngineSettings(), 1.1 * 16_381_443_072) == pytest.approx(
        1.1 * computed, rel=1e-3
    )


def test_adapters_take_memory_beside_each_matrix() -> None:
    """Adapters of twice the rank take twice the memory."""
    shape = known("Qwen/Qwen3-8B").shape
    plain, low, high = (
        weight_bytes(shape, Layout(), EngineSettings(adapters=n, adapter_rank=r))
        for n, r in ((0, 16), (2, 16), (2, 32))
    )

    assert high - plain == pytest.approx(2 * (low - plain))


def test_a_picture_counts_only_beyond_a_text_step() -> None:
    """Tower and decoder do not run at once, so only the excess and the cache of encoded images count."""
    model = known("Qwen/Qwen3-VL-8B-Instruct")
    small, large = (
        budget(model, known_accelerator("H100"), Layout(), EngineSettings(batched_tokens=n)).encoder
        for n in (2048, 16_384)
    )

    assert small > large > 0
