"""Promises of the command line: flags of the plan are refused in every spelling, removed flags by name."""

import pytest

from kvist_operator.engine_flags import (
    GONE,
    OWNED,
    EngineArgs,
    check_extra,
    image_version,
    parse_version,
)
from kvist_operator.errors import SpecError


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--kv-cache-dtype", "set spec.engine.kvCacheDtype instead"),
        ("--kv_cache_dtype=fp8", "set spec.engine.kvCacheDtype instead"),
        ("--kv-cache-d", "which vLLM reads as --kv-cache-dtype"),
        ("--gpu-memory-util", "which vLLM reads as --gpu-memory-utilization"),
        ("-tp", "set spec.engine.tensorParallelSize instead"),
        ("-tp=4", "set spec.engine.tensorParallelSize instead"),
        ("-tp4", "set spec.engine.tensorParallelSize instead"),
        ("--no-enable-prefix-caching", "set spec.engine.prefixCaching instead"),
        ("--kv-events-config.topic", "gateway, picker and plan depend on it"),
        ("--config", "gateway, picker and plan depend on it"),
        ("--disable-log-stats", "gateway, picker and plan depend on it"),
        ("--ssl-keyfile", "gateway, picker and plan depend on it"),
        ("--lora-modules", "set spec.model.adapters instead"),
    ],
)
def test_owned_flags_are_refused_in_every_spelling(word: str, said: str) -> None:
    """Flags of the plan are refused as vLLM's parser would read them; the error names the field to use."""
    with pytest.raises(SpecError) as refused:
        check_extra(["--seed", "1", word])

    assert str(refused.value).startswith("spec.engine.extraArgs[2]: ")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--swap-space", "spec.offload.cpu"),
        ("--speculative-model", "spec.engine.speculative"),
        ("--preemption-mode=recompute", "always recomputed"),
        ("--rope-scaling", "spec.engine.maxModelLen"),
        ("--cache-eviction-policy", "never existed"),
        ("--calculate-kv-scales", "scales come with the checkpoint"),
        ("--num_scheduler_steps", "asynchronous scheduling"),
        ("--disable-log-requests", "--enable-log-requests"),
    ],
)
def test_flags_that_are_gone_say_what_replaced_them(word: str, said: str) -> None:
    """Flags of old guides that vLLM no longer has are refused with a replacement."""
    with pytest.raises(SpecError, match="is gone from vLLM") as refused:
        check_extra([word])

    assert said in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--seed", "1"],
        ["--max-cudagraph-capture-size=64"],
        ["-O3"],
        ["--api-key", "$(KEY)"],
        ["--tokenizer-mode", "mistral"],
        ["--block-size", "32"],
        ["--enforce-eager"],
        ["--tool-call-parser", "mine"],
        ["--quantization-config", "{}"],
    ],
)
def test_other_flags_are_the_user_s(words: list[str]) -> None:
    """Other flags are accepted, even if they begin like a flag of the plan."""
    check_extra(words)


def test_no_flag_is_both_owned_and_gone() -> None:
    """No flag is in both tables."""
    assert set(OWNED) & set(GONE) == set()


def test_the_command_says_only_what_was_decided() -> None:
    """Arguments that are None or off are left out; prefix caching that is off is spelled out."""
    args = EngineArgs(
        model="m", tensor_parallel_size=2, enable_prefix_caching=False, gpu_memory_utilization=0.9
    )

    assert args.to_argv() == [
        "serve",
        "m",
        "--tensor-parallel-size",
        "2",
        "--gpu-memory-utilization",
        "0.9",
        "--no-enable-prefix-caching",
    ]


def test_objects_are_compact_json() -> None:
    """Objects are compact JSON in one word, so that no shell is needed."""
    args = EngineArgs(model="m", hf_overrides={"a": {"b": 1}})

    assert args.to_argv()[-1] == '{"a":{"b":1}}'


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("v0.33.0", (0, 33)),
        ("0.32.1rc1-cu130", (0, 32)),
        ("0.30", (0, 30)),
        ("latest", None),
        ("nightly-abc", None),
        ("12", None),
    ],
)
def test_versions_are_read_from_tags(text: str, version: tuple[int, int] | None) -> None:
    """Versions are read from release tags with any suffix; other tags have none."""
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.32.0", (0, 32)),
        ("registry:5000/vllm/vllm-openai:v0.31.0-cu129", (0, 31)),
        ("registry:5000/vllm", None),
        ("vllm/vllm-openai:v0.33.0@sha256:abc", (0, 33)),
        ("vllm/vllm-openai@sha256:abc", None),
    ],
)
def test_an_image_s_tag_has_the_version(image: str, version: tuple[int, int] | None) -> None:
    """The port of a registry is not a tag, and a digest has no version."""
    assert image_version(image) == version
