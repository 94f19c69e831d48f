"""Promises of ``spec.engine.extraArgs``: any flag of the version that the plan does not set, and no other."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.pools import plan, pool

from kvist_operator.engine_version import EngineVersion, engine_version
from kvist_operator.errors import SpecError
from kvist_operator.extra_args import ExtraFlag, doubts, read_extra
from kvist_operator.flag_table import options

NEW = engine_version("vllm/vllm-openai:v0.33.0")
OLD = engine_version("vllm/vllm-openai:v0.30.0")
UNKNOWN = engine_version("registry/internal:prod")
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def refused(words: list[str], version: EngineVersion = NEW) -> str:
    """Return why words are refused."""
    with pytest.raises(SpecError) as found:
        read_extra(words, version)
    return str(found.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--kv-cache-dtype", "set spec.engine.kvCacheDtype instead"),
        ("--kv_cache_dtype=fp8", "set spec.engine.kvCacheDtype instead"),
        ("--kv-cache-dt", "which vLLM reads as --kv-cache-dtype"),
        ("--gpu-memory-util", "which vLLM reads as --gpu-memory-utilization"),
        ("--device-memory-utilization", "set spec.engine.gpuMemoryUtilizationPercent instead"),
        ("-tp", "set spec.engine.tensorParallelSize instead"),
        ("-tp=4", "set spec.engine.tensorParallelSize instead"),
        ("-tp4", "set spec.engine.tensorParallelSize instead"),
        ("--no-enable-prefix-caching", "set spec.engine.prefixCaching instead"),
        ("--disable-prefix-caching", "set spec.engine.prefixCaching instead"),
        ("--kv-events-config.topic", "gateway, picker and plan depend on it"),
        ("--config", "gateway, picker and plan depend on it"),
        ("--grpc", "gateway, picker and plan depend on it"),
        ("--disable-log-stats", "gateway, picker and plan depend on it"),
        ("--ssl-keyfile", "gateway, picker and plan depend on it"),
        ("--lora-modules", "set spec.model.adapters instead"),
        ("--quantization=fp8", "set spec.engine.quantization instead"),
        ("-q=fp8", "set spec.engine.quantization instead"),
    ],
)
def test_owned_flags_are_refused_in_every_spelling(word: str, said: str) -> None:
    """Flags of the plan are refused as vLLM's parser would read them; the error names the field to use."""
    message = refused(["--seed", "1", word])

    assert message.startswith("spec.engine.extraArgs[2]: ")
    assert said in message


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
    ],
)
def test_flags_that_are_gone_say_what_replaced_them(word: str, said: str) -> None:
    """Flags of old guides that vLLM no longer has are refused with a replacement."""
    message = refused([word])

    assert "is gone from vLLM" in message
    assert said in message


@pytest.mark.parametrize(
    "words",
    [
        ["--seed", "1"],
        ["--seed", "-1"],
        ["--max-cudagraph-capture-size=64"],
        ["-O3"],
        ["-O", "3"],
        ["-cc.mode=3"],
        ["-ep"],
        ["--api-key", "$(KEY)"],
        ["--tokenizer-mode", "mistral"],
        ["--block-size", "32"],
        ["--enforce-eager"],
        ["--no-async-scheduling"],
        ["--disable-chunked-mm-input"],
        ["--tool-call-parser", "qwen3_xml"],
        ["--tool-parser-plugin", "/plugin.py", "--tool-call-parser", "mine"],
        ["--quantization-config", "{}"],
        ["--quantization", "bitsandbytes"],
        ["--moe-backend", "DEEP-GEMM"],
        ["--cudagraph-capture-sizes", "1", "2", "4"],
        ["--middleware", "a", "--middleware", "b"],
        ["--hf-overrides.rope_parameters.factor", "2", "--hf-overrides.architectures+", "A,B"],
        ["--additional-config", "text"],
        ["--allowed-origins", '["*"]'],
        ["--kv-transfer-config", json.dumps(CONNECTOR)],
        ["--max-num-queued-tokens", "64k"],
        ["--compilation-config", '{"max_cudagraph_capture_size": 1k, "cache_dir": "8k"}'],
        ["--video-pruning-rate=-0.5"],
        ["--prefix-match-unit", "None"],
    ],
)
def test_other_flags_are_the_user_s(words: list[str]) -> None:
    """Other flags are accepted in every form that vLLM's parser takes."""
    assert sum(each.words for each in read_extra(words, NEW)) == len(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--no-such-flag"], "[0]: --no-such-flag is not a flag of vLLM 0.33"),
        (["--enable-chunked-prefil=1"], "takes no value"),
        (["--tokenizer-mod3", "hf"], "did you mean --tokenizer-mode?"),
        (["--enforce_eagre"], "did you mean --enforce-eager?"),
        (["-xyz"], "-xyz is not a flag of vLLM 0.33"),
        (["stray"], "[0]: 'stray' belongs to no flag"),
        (["enforce-eager"], "did you mean --enforce-eager?"),
        (["--seed", "1", "2"], "[2]: '2' belongs to no flag, since --seed takes one value"),
        (["--enforce-eager", "true"], "[1]: 'true' belongs to no flag, since --enforce-eager takes no value"),
        (["--enforce-eager=true"], "write --enforce-eager alone, or --no-enforce-eager to switch it off"),
        (["--seed"], "[0]: --seed lacks its value"),
        (["--seed", "--enforce-eager"], "[0]: --seed lacks its value"),
        (["--seed 1"], "is one word with a space: write '--seed' and '1' as two entries"),
        (["--seed", "one"], "--seed: 'one' is not a whole number"),
        (["--cpu-offload-gb", "4Gi"], "--cpu-offload-gb: '4Gi' is not a number"),
        (["--max-num-scheduled-tokens", "8kb"], "is not a number such as 8192 or 8k"),
        (["--dtype", "bf16"], "--dtype: 'bf16' is not a choice; did you mean bfloat16?"),
        (["--mamba-cache-mode", "al"], "'al' is not a choice"),
        (["--tool-call-parser", "qwen3_xlm"], "did you mean qwen3_xml?"),
        (["--reasoning-parser", "zzz"], "'zzz' is not a choice; leave it out, or use one of the"),
        (["--compilation-config", "{mode: 3}"], "is not JSON; quote keys and texts with double quotes"),
        (
            ["--kv-transfer-config", '{"kv_conector": "a"}'],
            "'kv_conector' is not one of its keys; did you mean",
        ),
        (["-cc.moed=3"], "-cc.moed: 'moed' is not one of its keys; did you mean mode?"),
        (["--compilation-config", "[1]"], "'[1]' is not a JSON object; write its keys in braces"),
        (["--video-pruning-rate", "-0.5"], "vLLM takes '-0.5' for a flag: write --video-pruning-rate=-0.5"),
        (["--kv-cache-memory-bytes", "auto"], "'auto' is not a number such as 8192 or 8k"),
        (["--seed.a", "1"], "--seed takes no JSON, so it has no keys"),
        (["--hf-overrides.a"], "lacks its value"),
        (["--enable-log"], "is the beginning of several flags"),
        (["--seed=1", "--seed=2"], "[1]: --seed is given twice"),
        (["--api-key", "sk-123"], "set spec.engine.apiKeySecretRef"),
        (["--hf-token=hf_123"], "set spec.model.tokenSecretRef"),
        (["--", "x"], "is neither a flag nor a value"),
    ],
)
def test_what_vllm_would_refuse_is_refused(words: list[str], said: str) -> None:
    """Unknown flags, stray words, missing and invalid values are refused with the remedy or nearest name."""
    assert said in refused(words)


@pytest.mark.parametrize(
    ("words", "version", "said"),
    [
        (["--watchdog-config", "{}"], OLD, "is not a flag of vLLM 0.30; it came with 0.33"),
        (["--disable-lora"], OLD, "is not a flag of vLLM 0.30; it came with 0.33"),
        (["--enable-mamba-fine-grained-prefix-cache"], NEW, "vLLM 0.33; 0.30 was the last with it"),
        (["--mamba-cache-mode", "all"], NEW, "'all' is not a choice; it is one of align, none"),
    ],
)
def test_flags_of_another_version_say_which(words: list[str], version: EngineVersion, said: str) -> None:
    """A flag or value that only another version has is refused with that version."""
    assert said in refused(words, version)


def test_a_version_that_is_not_known_may_have_other_flags() -> None:
    """Flags and choices that the nearest version lacks are taken, and the doubt has the nearest name."""
    words = ["--enforce-eagre", "--new-thing", "a", "b", "--dtype", "fp4"]
    found = read_extra(words, UNKNOWN)

    assert [each.name for each in found] == ["enforce-eagre", "new-thing", "dtype"]
    first, second, *_ = doubts(found, UNKNOWN)
    assert first.endswith("is not a flag of vLLM 0.33; did you mean --enforce-eager?")
    assert second.startswith("--new-thing in spec.engine.extraArgs is not a flag of vLLM 0.33")
    assert "--dtype: 'fp4' is not a choice" in "; ".join(doubts(found, UNKNOWN))
    keys = read_extra(["-cc.new=1", "--kv-transfer-config", '{"newer": 1}'], UNKNOWN)
    assert ["is not one of its keys" in said for said in doubts(keys, UNKNOWN)] == [True, True, False, False]
    assert "set by the plan" in refused(["--port", "1"], UNKNOWN)
    assert "lacks its value" in refused(["--seed"], UNKNOWN)


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-transfer-config", json.dumps(CONNECTOR)],
        ["--hf-overrides", '{"rope_parameters": {"factor": 2}}'],
        ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "64"],
        ["--cpu-offload-gb", "8"],
        ["--kv-cache-memory-bytes", "8G"],
        ["--quantization", "bitsandbytes"],
        ["--enable-eplb"],
    ],
)
def test_flags_that_change_memory_make_a_plan_unverified(words: list[str]) -> None:
    """Flags that change memory are passed on as they are, and the doubt names each."""
    found = plan("Qwen/Qwen3-8B", "H100", engine={"extraArgs": words})

    assert list(found.argv[-len(words) :]) == words
    assert str(found.verdict) == "unverified"
    for word in words:
        assert not word.startswith("--") or any(doubt.startswith(f"{word} in") for doubt in found.doubts)


def test_flags_without_memory_leave_the_verdict() -> None:
    """A plan with other flags fits as before."""
    found = plan("Qwen/Qwen3-8B", "H100", engine={"extraArgs": ["--seed", "1", "--uvicorn-log-level=info"]})

    assert (str(found.verdict), found.doubts) == ("fits", ())


ADAPTERS = {"model": {"adapters": [{"name": "sql", "source": "hf://acme/sql"}]}}


@pytest.mark.parametrize(
    ("spec", "words", "said"),
    [
        ({"offload": {"cpu": "8Gi", "disk": "9Gi"}}, ["--kv-transfer-config", "{}"], "set spec.offload"),
        (ADAPTERS, ["--enable-lora"], "set spec.model.adapters"),
        (ADAPTERS, ["--max-loras", "4"], "set spec.engine.maxLoras"),
        (ADAPTERS, ["--max-cpu-loras", "4"], "set spec.engine.maxCpuLoras"),
        ({"engine": {"quantization": "FP8"}}, ["--quantization", "fp8"], "set spec.engine.quantization"),
        ({}, ["--prefix-caching-hash-algo", "sha256"], "set spec.engine.prefixCaching"),
        ({"engine": {"maxModelLen": 65536}}, ["--hf-overrides.rope_parameters.factor", "2"], "maxModelLen"),
        ({"engine": {"maxModelLen": 65536}}, ["--hf-overrides", "text"], "is not a JSON object"),
    ],
)
def test_what_this_plan_sets_is_not_set_twice(spec: dict[str, Any], words: list[str], said: str) -> None:
    """A flag that this plan sets because of a field is refused, and the error names the field."""
    engine = {**spec.get("engine", {}), "extraArgs": words}

    with pytest.raises(SpecError, match=r"^spec\.engine\.extraArgs\[0\]: ") as found:
        plan("Qwen/Qwen3-8B", "H100", **{**spec, "engine": engine})
    assert said in str(found.value)


def test_overrides_of_plan_and_user_are_merged() -> None:
    """A longer context and overrides of the user become one value of ``--hf-overrides``."""
    words = [
        "--seed",
        "1",
        "--hf-overrides",
        '{"a": 1}',
        "--hf-overrides.b.c",
        "2",
        "--hf-overrides.d+",
        "e,f",
    ]
    found = plan("Qwen/Qwen3-8B", "H100", engine={"maxModelLen": 65536, "extraArgs": words})

    assert found.argv.count("--hf-overrides") == 1
    assert "--hf-overrides.b.c" not in found.argv
    value = json.loads(found.argv[found.argv.index("--hf-overrides") + 1])
    assert (value["a"], value["b"], value["max_position_embeddings"]) == (1, {"c": 2}, 65536)
    assert value["d"] == ["e", "f"]
    assert found.argv[-2:] == ("--seed", "1")


def test_an_eager_engine_has_no_graphs() -> None:
    """``--enforce-eager`` counts for the memory; the flag that switches it off does not."""
    eager, graphs = (
        plan("Qwen/Qwen3-8B", "H100", engine={"extraArgs": [word]})
        for word in ("--enforce-eager", "--no-enforce-eager")
    )

    assert eager.memory.graphs == 0 < graphs.memory.graphs


@pytest.mark.parametrize(
    ("backend", "said"),
    [("NONSENSE", "'NONSENSE' is not a choice"), ("FLASHINFR", "did you mean FLASHINFER?")],
)
def test_an_attention_backend_is_one_of_the_version(backend: str, said: str) -> None:
    """``spec.engine.attentionBackend`` is checked against the version's own list."""
    with pytest.raises(SpecError, match=r"^spec\.engine\.attentionBackend: ") as found:
        pool(engine={"attentionBackend": backend})
    assert said in str(found.value)
    unknown = {"attentionBackend": backend, "image": "registry/internal:prod"}
    assert any(backend in doubt for doubt in plan("Qwen/Qwen3-8B", "H100", engine=unknown).doubts)


def _read(words: list[str], version: EngineVersion) -> tuple[tuple[ExtraFlag, ...], str]:
    """Return the flags, or the field that the error names."""
    try:
        return read_extra(words, version), ""
    except SpecError as error:
        return (), error.field


SPELLED = st.sampled_from(sorted(options((0, 33)))) | st.text("-_=.aeOtpq1 {}$(", max_size=8)


@given(st.lists(SPELLED | st.sampled_from(["1", "x", "{}", "-0.5", "a=b", '{"a": 1}']), max_size=6))
def test_any_words_are_taken_or_refused_with_their_place(words: list[str]) -> None:
    """Whatever the words, each belongs to one flag, or the error names an entry of the list."""
    for version in (NEW, OLD, UNKNOWN):
        found, field = _read(words, version)
        assert not field or re.fullmatch(r"spec\.engine\.extraArgs\[[0-9]\]", field)
        if field:
            continue
        taken = [at for each in found for at in range(each.at, each.at + each.words)]
        assert taken == list(range(len(words)))
        assert all(said.startswith("-") for said in doubts(found, version))
