"""Promises of the plan: the sizing rule on real models, every other decision, and the comparison of plans."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator import golden, pools
from tests.operator.pools import DENSE, chosen, known, plan, plan_made, reason, resource

from kvist_operator.errors import HardwareError, SpecError
from kvist_operator.memory.layout import GIB
from kvist_operator.models.source import model_facts
from kvist_operator.node_labels import node_kinds
from kvist_operator.plan import PlanVerdict, make_plan
from kvist_operator.plan.plan import differences, override
from kvist_operator.spec import read_pool
from kvist_operator.spec.pool import ModelRef, Shape, Source


@pytest.mark.parametrize("case", sorted(golden.CASES))
def test_whole_plans_are_as_they_were_reviewed(case: str) -> None:
    """Twelve plans equal the reviewed files, which ``python -m tests.operator.golden`` writes."""
    assert golden.made(case).to_dict() == golden.kept(case)


@pytest.mark.parametrize(
    ("name", "gpus", "tensor", "pipeline"),
    [
        ("Qwen/Qwen3-32B-FP8", 1, 1, 1),
        ("meta-llama/Llama-3.3-70B-Instruct", 4, 4, 1),
        ("moonshotai/Kimi-K2.5", 8, 8, 1),
        ("zai-org/GLM-5-FP8", 16, 8, 2),
    ],
)
def test_known_models_on_h100_take_what_they_need(name: str, gpus: int, tensor: int, pipeline: int) -> None:
    """The sizing rule chooses one GPU, four, a whole node or two nodes for these models."""
    found = plan(name, "NVIDIA-H100-80GB-HBM3")

    assert found.verdict is PlanVerdict.FITS
    assert (found.layout.gpus, found.layout.tensor, found.layout.pipeline) == (gpus, tensor, pipeline)


def test_a_tight_fit_says_what_is_left_and_what_gave_way() -> None:
    """Kimi K2.5 on one node keeps experts whole; the plan states GiB, tokens and each lowered setting."""
    found = plan("moonshotai/Kimi-K2.5", "H100-80GB", engine={"decodeContextParallelSize": 1})

    assert found.layout.expert_size == 8
    assert 8192 <= found.settings.max_len < 32_768
    assert f"{found.memory.kv / GIB:.2f} GiB are left" in reason(found, "maxModelLen")
    assert str(found.memory.kv_tokens) in reason(found, "maxModelLen")
    assert "raised from 92" in reason(found, "gpuMemoryUtilizationPercent")
    assert "lowered from 8192" in reason(found, "maxNumBatchedTokens")
    assert "lowered from 8" in reason(found, "concurrency")


@pytest.mark.parametrize(("dtype", "gib"), [("Model", 40.0), ("FP8", 20.0)])
def test_llama_70b_needs_40_gib_for_a_sequence_of_128k(dtype: str, gib: float) -> None:
    """The plan states the size of one sequence's KV cache on all GPUs, in both dtypes."""
    found = plan(
        "meta-llama/Llama-3.1-70B-Instruct",
        "H200",
        engine={"kvCacheDtype": dtype, "maxModelLen": 131_072},
    )

    assert found.to_dict()["memory"]["kv_gib_per_sequence"] == gib


def test_more_gpus_of_a_node_come_before_less_context() -> None:
    """Two L40S hold the weights of a 32B FP8 model, but the plan takes four for the required context."""
    found = plan("Qwen/Qwen3-32B-FP8", "L40S", engine={"kvCacheDtype": "Model"})

    assert found.settings.max_len == 32_768
    assert found.memory.max_concurrency >= 8
    assert "would lack" in reason(found, "tensorParallelSize")


def test_fewer_requests_at_once_come_before_a_second_node() -> None:
    """A 32B model stays on one node of four L4 with its whole context, for fewer requests at once."""
    found = plan("Qwen/Qwen3-32B", "L4", accelerator={"perNode": 4})

    assert found.layout.gpus == 4
    assert found.settings.max_len == 32_768
    assert 1 <= chosen(found, "concurrency") < 8
    assert "comes before a second node" in reason(found, "tensorParallelSize")


@pytest.mark.parametrize(
    ("model", "length"), [("Qwen/Qwen3-8B", 32_768), ("Qwen/Qwen3-VL-8B-Instruct", 8192)]
)
def test_concurrency_gives_way_before_context(model: str, length: int) -> None:
    """A node with a single L4 keeps the context as long as one request of it fits, then as long as it can."""
    found = plan(model, "L4", accelerator={"perNode": 1})

    assert found.settings.max_len >= length
    assert found.settings.max_len == 32_768 or chosen(found, "concurrency") == 1
    assert found.memory.fits(found.settings.max_len)
    assert "lowered from 8" in reason(found, "concurrency")


@pytest.mark.parametrize("field", ["gpuMemoryUtilizationPercent", "maxNumBatchedTokens", "maxNumSeqs"])
def test_settings_give_way_before_another_gpu_unless_the_user_sets_them(field: str) -> None:
    """A higher memory share and smaller steps keep Qwen3-VL-8B on two L4; a value of the user stays."""
    auto = plan("Qwen/Qwen3-VL-8B-Instruct", "L4")
    value = {"gpuMemoryUtilizationPercent": 90, "maxNumBatchedTokens": 2048, "maxNumSeqs": 256}[field]
    fixed = plan("Qwen/Qwen3-VL-8B-Instruct", "L4", engine={field: value})

    assert auto.layout.gpus == 2
    assert "raised from 92" in reason(auto, "gpuMemoryUtilizationPercent")
    assert chosen(fixed, field) == value
    assert reason(fixed, field) == "as requested"


def test_twice_the_gpus_are_not_taken_for_a_few_per_cent() -> None:
    """One GPU that holds nearly the whole wish is enough; otherwise the plan shows what it would hold."""
    one = plan("Qwen/Qwen3-32B-FP8", "H100", accelerator={"perNode": 1}, workload={"concurrency": 64})
    held = int(one.memory.concurrency(32_768))
    nearly = plan("Qwen/Qwen3-32B-FP8", "H100", workload={"concurrency": held + 1})
    far = plan("Qwen/Qwen3-32B-FP8", "H100", workload={"concurrency": 2 * held})

    share = one.memory.concurrency(32_768) / (held + 1)
    assert nearly.layout.gpus == (1 if share > 0.95 else 2)
    assert far.layout.gpus > 1
    assert f"1 × H100-80GB holds {math.floor(10 * far.neighbours[0].sequences) / 10:g} of {2 * held}" in str(
        far.neighbours[0]
    )


def test_a_count_is_kept_to() -> None:
    """``spec.accelerator.count`` is the number of GPUs, even if the sizing rule would choose another."""
    found = plan("Qwen/Qwen3-8B", "H100", accelerator={"count": 4})

    assert found.layout.tensor == 4
    assert "spec.accelerator.count is 4" in reason(found, "tensorParallelSize")


def test_what_does_not_fit_is_refused_with_the_nearest_that_would() -> None:
    """A refusal states the bytes that the fullest GPU lacks, and names another accelerator."""
    found = plan("meta-llama/Llama-3.3-70B-Instruct", "A10", accelerator={"count": 4})

    assert found.verdict is PlanVerdict.REFUSED
    assert found.shortfall_bytes > GIB
    assert found.argv == ()
    assert "leave count and parallel sizes to the plan" in found.nearest
    assert f"lack {found.shortfall_bytes / GIB:.1f} GiB" in reason(found, "verdict")


def test_a_refused_16_bit_model_is_offered_fp8() -> None:
    """A refusal suggests online quantization before other hardware."""
    found = plan("Qwen/Qwen3-32B", "L40S", accelerator={"perNode": 1, "count": 1})

    assert found.verdict is PlanVerdict.REFUSED
    assert found.nearest == "spec.engine.quantization: FP8 on 1 × L40S would fit"


@pytest.mark.parametrize(
    ("gpu", "flag", "said"),
    [
        ("A100-80GB", None, "does not compute in FP8"),
        ("A10", None, "does not compute in FP8"),
        ("L40S", "fp8", "FLASHINFER"),
        ("H100", "fp8", "FLASH_ATTN"),
        ("B200", "fp8", "FLASHINFER"),
        ("RTX-PRO-6000", "fp8", "FLASHINFER"),
        ("MI300X", "fp8", "ROCM_ATTN"),
        ("TPU", None, "is not known"),
    ],
)
def test_fp8_kv_is_taken_where_gpu_and_backend_do(gpu: str, flag: str | None, said: str) -> None:
    """The reason for the dtype that Auto chooses names the attention backend or the obstacle."""
    found = plan("Qwen/Qwen3-8B", gpu)

    assert ("--kv-cache-dtype" in found.argv) == (flag is not None)
    assert said in reason(found, "kvCacheDtype")


UNMEASURED = "fp8 KV cache: accuracy not measured for this model"


@pytest.mark.parametrize(
    ("model", "gpu", "dtype", "said", "note"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "H100", "fp8", "measured on Llama-3.3-70B", ""),
        ("Qwen/Qwen3-8B", "H100", "fp8", "not calibrated", UNMEASURED),
        ("nvidia/Llama-3.1-70B-Instruct-FP8", "H100", "fp8", "the scales of the checkpoint", ""),
        ("moonshotai/Kimi-K2.5", "H200", "bfloat16", "FLASHMLA lost accuracy in FP8", ""),
        ("deepseek-ai/DeepSeek-R1", "B200", "fp8", "FLASHINFER_MLA", UNMEASURED),
        ("deepseek-ai/DeepSeek-V3.2", "H200", "fp8", "scales in every row", ""),
        ("Qwen/Qwen3.5-27B", "H100", "bfloat16", "prefill with heads of 256", ""),
        ("Qwen/Qwen3.5-27B", "B200", "fp8", "measured on Qwen3.5-27B", ""),
    ],
)
def test_auto_takes_fp8_only_where_it_is_right_for_the_family(
    model: str, gpu: str, dtype: str, said: str, note: str
) -> None:
    """Auto follows calibrated scales, MLA kernels and head sizes, and says where accuracy is not measured."""
    found = plan(model, gpu)

    assert next(choice.value for choice in found.choices if choice.field == "kvCacheDtype") == dtype
    assert said in reason(found, "kvCacheDtype")
    assert "; ".join(found.notes) == note


@pytest.mark.parametrize(
    ("config", "biased"),
    [
        ({"model_type": "qwen2"}, True),
        ({"model_type": "qwen2_5_vl"}, True),
        ({"model_type": "llama", "attention_bias": True}, True),
        ({"model_type": "llama", "attention_bias": False}, False),
        ({"model_type": "glm4", "attention_bias": True, "use_qk_norm": True}, False),
        ({"model_type": "qwen3", "attention_bias": True}, False),
    ],
)
def test_keys_with_a_bias_are_not_cached_in_fp8(config: dict[str, object], biased: bool) -> None:
    """A family whose keys have a bias and no normalization keeps its dtype; FP8 on request is warned of."""
    auto = plan_made(config, "H100")
    asked = plan_made(config, "H100", engine={"kvCacheDtype": "FP8"})

    assert ("--kv-cache-dtype" not in auto.argv) == biased
    assert "--kv-cache-dtype" in asked.argv
    assert any("known to break" in note for note in asked.notes) == biased


def test_small_sliding_windows_are_left_out_of_fp8() -> None:
    """Layers with a window of 128 tokens keep 16 bits in arguments and arithmetic, those of 512 do not."""
    config = {"layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 128}
    small = plan_made(config, "H100")
    large = plan_made({**config, "sliding_window": 512}, "H100")
    given = plan_made(config, "H100", engine={"extraArgs": ["--kv-cache-dtype-skip-layers", "0"]})

    at = small.argv.index("--kv-cache-dtype-skip-layers")
    assert small.argv[at + 1] == "sliding_window"
    assert "128" in reason(small, "kvCacheDtypeSkipLayers")
    assert "--kv-cache-dtype-skip-layers" not in large.argv
    assert given.argv.count("--kv-cache-dtype-skip-layers") == 1
    # 16 sliding blocks of 16 bits are as large as 32 full ones of 8 bits: both kinds share one page
    wide = {tokens for kind, _, tokens in small.memory.stages[0].kinds if not kind.window}
    assert wide == {32}


def test_a_checkpoint_s_own_kv_scheme_does_not_override_the_user() -> None:
    """``Model`` sets the dtype explicitly where vLLM's auto would follow the checkpoint into FP8."""
    found = plan("nvidia/Llama-3.1-70B-Instruct-FP8", "H100", engine={"kvCacheDtype": "Model"})

    assert found.argv[found.argv.index("--kv-cache-dtype") + 1] == "bfloat16"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"engine": {"tensorParallelSize": 3}}, "does not divide the 32 heads: use one of 1, 2, 4, 8"),
        ({"engine": {"tensorParallelSize": 16}}, "more than the 8 of a node"),
        ({"engine": {"dataParallelSize": 2}}, "for a dense model, increase spec.replicas instead"),
        ({"engine": {"maxModelLen": 2_000_000}}, "YaRN is useful up to 8"),
        ({"engine": {"speculative": {"method": "MTP"}}}, "has no layers for it"),
        (
            {"engine": {"kvCacheDtype": "FP8", "attentionBackend": "FLEX_ATTENTION"}},
            "FLEX_ATTENTION does not",
        ),
        ({"workload": {"promptTokens": 40_000, "outputTokens": 4000}}, "set spec.engine.maxModelLen"),
    ],
)
def test_what_cannot_be_is_refused_by_field(spec: dict[str, object], said: str) -> None:
    """The error names the field and what to write instead."""
    with pytest.raises(SpecError, match=said) as refused:
        plan("Qwen/Qwen3-8B", "H100", **spec)

    assert str(refused.value).startswith("spec.")


def test_mla_models_refuse_what_their_backends_do_not_take() -> None:
    """MLA models refuse per-token-head quantization, because their cache has no heads."""
    with pytest.raises(SpecError, match="not for MLA models"):
        plan("deepseek-ai/DeepSeek-R1", "H200", engine={"kvCacheDtype": "Int8PerTokenHead"})


def test_quantising_twice_is_refused() -> None:
    """A checkpoint in FP8 cannot be quantized again while loading."""
    with pytest.raises(SpecError, match=r"already FP8 \(blocks of 128\)"):
        plan("Qwen/Qwen3-32B-FP8", "H100", engine={"quantization": "FP8"})


def test_online_fp8_halves_the_linear_weights() -> None:
    """Online FP8 halves the weights except embedding and head, which stay in 16 bits."""
    plain, half = (plan("Qwen/Qwen3-32B", "H100", engine=e) for e in ({}, {"quantization": "FP8"}))
    whole = plain.memory.weights * plain.layout.tensor

    assert 0.5 < half.memory.weights * half.layout.tensor / whole < 0.53
    assert half.argv[half.argv.index("--quantization") + 1] == "fp8"


@pytest.mark.parametrize(
    ("spec", "doubt"),
    [
        ({"engine": {"image": "vllm/vllm-openai:v0.21.0"}}, "vLLM 0.21 is not one of 0.30 to 0.33"),
        ({"engine": {"image": "vllm/vllm-openai:nightly"}}, "set spec.engine.version"),
        ({"engine": {"extraArgs": ["--block-size", "32"]}}, "--block-size"),
    ],
)
def test_what_is_not_known_makes_a_plan_unverified(spec: dict[str, object], doubt: str) -> None:
    """A plan with unknown parts is made and lists what could not be verified."""
    found = plan("Qwen/Qwen3-8B", "H100", **spec)

    assert found.verdict is PlanVerdict.UNVERIFIED
    assert any(doubt in said for said in found.doubts)
    assert found.argv


def test_an_unknown_product_is_planned_from_its_memory() -> None:
    """A plan for an unknown product is unverified and has a 16-bit cache."""
    found = make_plan(
        pools.pool(accelerator={"product": "NVIDIA-X1", "memory": "48Gi", "perNode": 2}),
        pools.known("Qwen/Qwen3-8B"),
    )

    assert found.verdict is PlanVerdict.UNVERIFIED
    assert found.to_dict()["accelerator"]["product"] == "NVIDIA-X1"


def test_node_labels_are_read_where_the_spec_is_silent() -> None:
    """Without a product the plan uses the kind of node that the cluster has, with its number of GPUs."""
    labels = {"nvidia.com/gpu.product": "NVIDIA-L40S", "nvidia.com/gpu.count": "4"}
    found = make_plan(pools.pool(), pools.known("Qwen/Qwen3-8B"), nodes=node_kinds([labels, labels, {}]))

    assert (found.hardware.accelerator.name, found.hardware.per_node) == ("L40S", 4)
    assert chosen(found, "accelerator") == "L40S"


def test_without_information_on_hardware_the_remedy_is_named() -> None:
    """A pool without a product, on a cluster without labels, is an error."""
    with pytest.raises(HardwareError, match=r"spec\.accelerator\.product: is not set"):
        make_plan(pools.pool(), pools.known("Qwen/Qwen3-8B"))


def test_fp8_blocks_that_cannot_be_cut_keep_experts_whole() -> None:
    """Experts of 1,536 columns in blocks of 128 cannot be split by eight, so expert parallelism is used."""
    found = plan("Qwen/Qwen3-235B-A22B-FP8", "H100", accelerator={"count": 8})

    assert found.layout.expert_size == 8
    assert "cannot be split by 8" in reason(found, "expertParallel")


def test_prefix_caching_off_turns_events_off() -> None:
    """Without prefix caching there are no KV events, and vLLM gets the flag that disables the cache."""
    found = plan("Qwen/Qwen3-8B", "H100", engine={"prefixCaching": "Disabled"})

    assert "--no-enable-prefix-caching" in found.argv
    assert "--kv-events-config" not in found.argv


def test_offload_raises_shared_memory_and_the_limit() -> None:
    """Offloaded blocks are in /dev/shm, which counts as memory of the container."""
    without, with_it = (plan("Qwen/Qwen3-8B", "H100", offload=o) for o in ({}, {"cpu": "32Gi"}))

    assert with_it.pod.shm_bytes - without.pod.shm_bytes == 32 * GIB
    assert with_it.pod.memory_bytes - without.pod.memory_bytes == 32 * GIB
    config = json.loads(with_it.argv[with_it.argv.index("--kv-transfer-config") + 1])
    assert config["kv_connector_extra_config"]["cpu_bytes_to_use"] == 32 * GIB


def test_a_target_between_tokens_bounds_the_step() -> None:
    """A step keeps the TPOT target by the plan's own rates, decoding included; without one it is vLLM's."""
    bounded, free = (
        plan("meta-llama/Llama-3.1-70B-Instruct", "H100", workload=w) for w in ({"tpotMilliseconds": 50}, {})
    )

    assert free.settings.batched_tokens == 8192
    assert chosen(bounded, "tpotMilliseconds") <= 50
    assert chosen(bounded, "maxNumBatchedTokens") == bounded.settings.batched_tokens < 512
    assert "the target of 50 ms is kept" in reason(bounded, "tpotMilliseconds")
    assert bounded.settings.sequences <= bounded.settings.batched_tokens


def test_a_target_that_no_step_keeps_is_said_plainly() -> None:
    """The verdict line says so where decoding alone takes longer than the target; steps stay useful."""
    found = plan("Qwen/Qwen3-8B", "L4", workload={"tpotMilliseconds": 20})

    assert any("the TPOT target of 20 ms cannot be kept: a step takes about" in note for note in found.notes)
    assert "it needs more GPUs" in reason(found, "tpotMilliseconds")
    assert found.settings.batched_tokens == 512


def test_a_step_of_the_user_stays_and_is_judged_by_the_target() -> None:
    """The plan keeps maxNumBatchedTokens as requested and names the step that would keep the target."""
    workload, engine = {"tpotMilliseconds": 50}, {"maxNumBatchedTokens": 8192}
    given = plan("meta-llama/Llama-3.1-70B-Instruct", "H100", workload=workload, engine=engine)

    assert given.settings.batched_tokens == 8192
    assert "set spec.engine.maxNumBatchedTokens to " in reason(given, "tpotMilliseconds")


@given(
    st.sampled_from(["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-R1"]),
    st.sampled_from(["L40S", "H100", "H200", "B200", "MI300X"]),
    st.integers(5, 500),
    st.integers(1, 200),
)
def test_a_plan_says_of_every_target_whether_it_is_kept(
    model: str, gpu: str, target: int, concurrency: int
) -> None:
    """Whatever the target, the estimate is at most the target or the verdict line has a note."""
    workload = {"tpotMilliseconds": target, "concurrency": concurrency}
    found = plan(model, gpu, workload=workload)
    missed = any("cannot be kept" in note for note in found.notes)

    assert not found.argv or missed == (chosen(found, "tpotMilliseconds") > target)
    assert found.settings.batched_tokens >= found.settings.sequences


def test_pictures_that_never_come_leave_the_tower_out() -> None:
    """``imagesPerRequest: 0`` frees the vision tower's memory and sets the flag of vLLM."""
    found = plan("Qwen/Qwen3-VL-8B-Instruct", "L40S", workload={"imagesPerRequest": 0})
    usual = plan("Qwen/Qwen3-VL-8B-Instruct", "L40S")

    assert "--language-model-only" in found.argv
    assert found.memory.encoder == 0
    assert found.memory.kv > usual.memory.kv


def test_a_user_s_own_parser_wins_over_the_catalogue_s() -> None:
    """No flag occurs twice."""
    found = plan("Qwen/Qwen3-8B", "H100", engine={"extraArgs": ["--tool-call-parser", "qwen3_xml"]})

    assert found.argv.count("--tool-call-parser") == 1
    assert found.argv[-1] == "qwen3_xml"


def test_drain_fits_into_the_grace_period() -> None:
    """The grace period covers preStop, vLLM's drain and the time to exit."""
    found = plan("Qwen/Qwen3-8B", "H100", rollout={"drainSeconds": 120})

    assert found.pod.grace_seconds > found.pod.pre_stop_seconds + found.pod.drain_seconds
    assert found.argv[found.argv.index("--shutdown-timeout") + 1] == "120"


def test_the_hash_is_of_what_runs_not_of_why() -> None:
    """A changed argument changes the hash of a plan; a changed reason does not."""
    from dataclasses import replace

    found = plan("Qwen/Qwen3-8B", "H100")
    reworded = replace(found, choices=())
    other = plan("Qwen/Qwen3-8B", "H100", engine={"maxNumSeqs": 64})

    assert found.hash == reworded.hash
    assert found.hash != other.hash


@pytest.mark.parametrize(
    ("source", "model"),
    [
        ("pvc://weights/llama/8b", "/model/llama/8b"),
        ("oci://registry/llama:1", "/model"),
        ("/models/m", "/models/m"),
    ],
)
def test_weights_are_where_manifests_mount_them(source: str, model: str) -> None:
    """Claims and images are mounted at one path; a path in the engine's image is used unchanged."""
    found = make_plan(pools.pool(source), pools.made(), gpu="H100")

    assert found.argv[1] == model


def test_adapters_are_named_with_their_paths() -> None:
    """Adapters of the hub are named by repository, others by the path where they are mounted."""
    adapters = [
        {"name": "a", "source": "hf://acme/a"},
        {"name": "b", "source": "pvc://claim/b", "rank": 64},
        {"name": "c", "source": "/adapters/c"},
    ]
    found = plan("Qwen/Qwen3-8B", "H100", model={"adapters": adapters})
    at = found.argv.index("--lora-modules")

    assert found.argv[at + 1 : at + 4] == ("a=acme/a", "b=/adapters/b", "c=/adapters/c")
    assert found.argv[found.argv.index("--max-lora-rank") + 1] == "64"


def test_more_adapters_than_a_step_uses_wait_in_the_host_s_memory() -> None:
    """Twenty adapters take GPU memory for eight; both numbers can be set, and that of a step counts."""
    adapters = [{"name": f"a{i}", "source": "hf://acme/a"} for i in range(20)]
    auto = plan("Qwen/Qwen3-8B", "H100", model={"adapters": adapters})
    engine = {"maxLoras": 2, "maxCpuLoras": 30}
    given = plan("Qwen/Qwen3-8B", "H100", model={"adapters": adapters}, engine=engine)
    few = plan("Qwen/Qwen3-8B", "H100", model={"adapters": adapters[:3]})

    def numbers(argv: tuple[str, ...]) -> list[str]:
        return [argv[argv.index(flag) + 1] for flag in ("--max-loras", "--max-cpu-loras") if flag in argv]

    assert [numbers(each.argv) for each in (auto, given, few)] == [["8", "20"], ["2", "30"], ["3"]]
    assert auto.memory.weights - few.memory.weights == pytest.approx(
        5 / 6 * (auto.memory.weights - given.memory.weights)
    )


def test_layers_for_several_tokens_are_suggested_and_not_used() -> None:
    """A checkpoint with layers for multi-token prediction gets a suggestion; the arguments stay without."""
    found = plan("deepseek-ai/DeepSeek-R1", "H200")

    assert "spec.engine.speculative with method MTP" in reason(found, "speculative")
    assert "--speculative-config" not in found.argv
    assert "speculative" not in [choice.field for choice in plan("Qwen/Qwen3-8B", "H100").choices]


@pytest.mark.parametrize(
    ("kind", "tool", "reasoning"),
    [
        ("qwen3", "hermes", "qwen3"),
        ("qwen3_moe", "", ""),
        ("llama", "", ""),
        ("deepseek_v3", "deepseek_v3", ""),
    ],
)
def test_parsers_follow_the_type_of_the_model(kind: str, tool: str, reasoning: str) -> None:
    """A model outside the catalogue gets the parsers that all models of its type in the catalogue share."""
    shape = Shape(config={**DENSE, "model_type": kind})
    found = model_facts(ModelRef(kind=Source.HUB, location="acme/tuned", shape=shape))

    assert (found.tool_parser, found.reasoning_parser) == (tool, reasoning)


def test_expected_requests_keep_their_context_at_the_cost_of_concurrency() -> None:
    """With hints, the concurrency is lowered before the context becomes too short for the prompts."""
    workload = {"promptTokens": 20_000, "outputTokens": 2000, "concurrency": 64}
    found = plan("Qwen/Qwen3-32B", "L40S", accelerator={"perNode": 2}, workload=workload)

    assert found.settings.max_len >= 22_000
    assert 1 <= chosen(found, "concurrency") < 64
    assert "lowered from 64" in reason(found, "concurrency")


def test_one_field_is_changed_and_nothing_else() -> None:
    """An assignment sets a YAML value in a copy of the resource."""
    before = resource(engine={"maxNumSeqs": 64})
    after = override(before, ["engine.kvCacheDtype=Model", "spec.workload.concurrency=4"])

    assert after["spec"]["engine"] == {"maxNumSeqs": 64, "kvCacheDtype": "Model"}
    assert after["spec"]["workload"] == {"concurrency": 4}
    assert before == resource(engine={"maxNumSeqs": 64})


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("engine.kvCacheDtype", "write it like engine.kvCacheDtype=Model"),
        ("model.source.deeper=1", "is not a field"),
    ],
)
def test_what_is_no_assignment_is_refused(assignment: str, said: str) -> None:
    """An invalid assignment is refused with an example or the path."""
    with pytest.raises(SpecError, match=said):
        override(resource(), [assignment])


def test_the_differences_are_the_facts_that_changed() -> None:
    """A 16-bit cache differs by bytes per token, tokens, backend and a flag."""
    first, second = (
        make_plan(read_pool(override(resource(), with_)), known("Qwen/Qwen3-8B"), gpu="H100")
        for with_ in ([], ["engine.kvCacheDtype=Model"])
    )
    found = {d.field: (d.before, d.after) for d in differences(first.to_dict(), second.to_dict())}

    assert found["memory.kv_bytes_per_token"] == (73_728, 147_456)
    assert found["--kv-cache-dtype"] == ("fp8", None)
    assert found["choice.kvCacheDtype"] == ("fp8", "bfloat16")
    assert "memory.weights_gib" not in found
    assert differences(first.to_dict(), first.to_dict()) == []
