"""Careless or hostile input ends with an exit code, the name of a field and a remedy, never with a
traceback."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvist.__main__ import main

HEAD = "apiVersion: kvist.dev/v1alpha1\nkind: InferencePool\n"
MODEL = "model: {source: hf://Qwen/Qwen3-8B}"
GPU = "H100-80GB"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def run(path: Path, *words: str, content: str | bytes | None = None) -> tuple[int, str]:
    """Exit code and stderr of a command on a file."""
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = main([*words, "-f", str(path)])
    return code, errors.getvalue()


def pool(spec: str, meta: str = "metadata: {name: twig}\n") -> str:
    """A pool's text."""
    return f"{HEAD}{meta}spec: {{{spec}}}\n"


def shaped(**config: Any) -> str:
    """Return a pool with a model of this config."""
    model = {"source": "hf://acme/model", "shape": {"config": {**CONFIG, **config}}}
    return pool(f"model: {json.dumps(model)}")


@pytest.mark.parametrize("command", ["plan", "render"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "--filename"),
        (b"\xff\xfe\x00", "--filename"),
        ("a:\n\tb: 1", "--filename"),
        ("!!python/object/apply:os.system ['true']", "--filename"),
        (f"{HEAD}metadata: {{name: twig}}\nspec: " + "{a: " * 3000 + "1" + "}" * 3000, "nested deeper"),
        (
            f"{HEAD}metadata: {{name: twig}}\nspec:\n  {MODEL}\n  podTemplate: {{spec: &s {{x: *s}}}}",
            "refers to itself",
        ),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{c}: &{c} [{','.join([f'*{b}'] * 10)}]\n" for b, c in zip("abcdefg", "bcdefgh", strict=True)
            ),
            "more than 200000 values",
        ),
        ("# " + "x" * (5 << 20), "4 MiB"),
        (pool(f"{MODEL}, replicas: 1, replicas: 2"), "'replicas' occurs twice"),
        (pool(f"{MODEL}, null: 1"), "spec.None"),
        (pool(f"{MODEL}, replicas: .nan"), "spec.replicas"),
        (pool(f"{MODEL}, replicas: 2026-01-01"), "spec.replicas: is a date"),
        (pool(f"{MODEL}, engine: !!set {{a}}"), "spec.engine: is a set"),
        (pool(MODEL, "metadata: {name: twig, generation: abc}\n"), "metadata.generation"),
        (
            pool(f"{MODEL}, accelerator: {{product: X, memory: 80}}"),
            "spec.accelerator.memory: 80 is 80 bytes",
        ),
        (pool(f"{MODEL}, accelerator: {{product: X, memory: '{'9' * 400}Gi'}}"), "spec.accelerator.memory"),
        (pool(f"{MODEL}, offload: {{cpu: 64}}"), "spec.offload.cpu: 64 is 64 bytes"),
        (pool(f"{MODEL}, accelerator: {{count: 7}}"), "spec.accelerator.count: 7"),
        (pool(f"{MODEL}, accelerator: {{perNode: 3, count: 8}}"), "spec.accelerator.count: 8"),
        (pool(f"{MODEL}, engine: {{pipelineParallelSize: 64}}"), "spec.engine.pipelineParallelSize: 64"),
        (pool(f"{MODEL}, engine: {{extraArgs: ['--']}}"), "spec.engine.extraArgs[0]"),
        (pool("model: {source: 'hf://../../etc'}"), "spec.model.source"),
        (pool('model: {source: "hf://a/\\x1b[31mb"}'), "spec.model.source: 'hf://a/\\x1b"),
        (pool("model: {source: 'pvc://models/../..'}"), "spec.model.source"),
        (shaped(num_hidden_layers=10**30), "num_hidden_layers is"),
        (shaped(num_hidden_layers=100_000), "100000 layers are more than any model has"),
        (shaped(num_attention_heads=0), "num_attention_heads"),
        (shaped(hidden_size="wide"), "hidden_size is 'wide'"),
        (shaped(quantization_config={"quant_method": "gptq", "bits": "x"}), "quantization_config: bits"),
        (shaped(quantization_config={"quant_method": "fp8", "ignore": ["re:("]}), "regular expression"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, command: str, content: str | bytes, said: str) -> None:
    """Exit code 2, and one line that says which field or file."""
    code, errors = run(tmp_path / "pool.yaml", command, "--gpu", GPU, content=content)

    assert (code, said in errors) == (2, True), errors
    assert "\x1b" not in errors


def test_a_size_without_its_unit_does_not_make_a_model_fit(tmp_path: Path) -> None:
    """16 bytes are no weights; the message has a size to write."""
    text = shaped().replace('"shape": {', '"shape": {"checkpointSize": 16, ')
    code, errors = run(tmp_path / "pool.yaml", "plan", "--gpu", GPU, content=text)

    assert code == 2
    assert re.search(r"spec\.model\.shape\.checkpointSize: 16 bytes .* write it like 15Gi", errors)


@pytest.mark.parametrize("file", ["/nonexistent", "/", "/dev/zero"])
def test_a_file_that_is_none_is_named(file: str) -> None:
    """Also one that never ends."""
    code, errors = run(Path(file), "plan", "--gpu", GPU)

    assert (code, file in errors) == (2, True)


@pytest.mark.parametrize(
    "change", ["engine.x=[", "=5", "model=5", "model.source.x=1", "engine.extraArgs=!!x {}", "x"]
)
def test_a_change_that_is_none_is_named(tmp_path: Path, change: str) -> None:
    """A change given with ``--with`` is untrusted YAML, too: the error names the option or the field."""
    words = ("compare", "--gpu", GPU, "--with", change)
    code, errors = run(tmp_path / "pool.yaml", *words, content=pool(MODEL))

    assert code == 2
    assert "--with" in errors or "spec." in errors


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=10),
    st.lists(st.integers(-2, 5), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)
KEYS = (
    *CONFIG,
    *("head_dim", "sliding_window", "layer_types", "rope_scaling", "rope_parameters", "rope_theta"),
    *("quantization_config", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "text_config"),
    *("vision_config", "kv_lora_rank", "qk_rope_head_dim", "tie_word_embeddings", "num_nextn_predict_layers"),
    *("linear_attn_config", "hybrid_override_pattern", "attn_type_list", "full_attention_interval"),
)
QUANTISED = st.fixed_dictionaries(
    {
        "quant_method": st.sampled_from(
            ["fp8", "awq", "gptq", "compressed-tensors", "modelopt", "mxfp4", "odd"]
        )
    },
    optional=dict.fromkeys(
        ("bits", "group_size", "weight_block_size", "config_groups", "ignore", "kv_cache_scheme", "sym"), ODD
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), ODD, max_size=4), st.none() | QUANTISED)
@example({"model_type": {"odd": 1}, "vision_config": {"odd": 2}}, None)
def test_any_config_is_planned_refused_or_explained(
    tmp_path_factory: pytest.TempPathFactory, odd: dict[str, Any], quantised: dict[str, Any] | None
) -> None:
    """Any config.json is planned, refused or explained; the command never crashes."""
    config = {**CONFIG, **odd, **({"quantization_config": quantised} if quantised else {})}
    model = {"source": "hf://acme/model", "shape": {"config": config}}
    found = {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool", "metadata": {"name": "twig"}}
    text = yaml.safe_dump({**found, "spec": {"model": model}}, allow_unicode=True)
    code, errors = run(tmp_path_factory.getbasetemp() / "odd.yaml", "plan", "--gpu", GPU, content=text)

    assert code in (0, 2, 3)
    assert (code == 2) == ("spec." in errors or "--filename" in errors)
