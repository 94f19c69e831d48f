"""The memory arithmetic against aiconfigurator-core's, for twenty-five pairs of model and GPU.

What differs by constant, and is set equal here:

- the memory of a card (theirs is what the box says, ours what a process gets),
- activations, and what context, libraries and NCCL take (two rough models; theirs are taken),
- tokens in flight while a window is held (vLLM counts two steps, they count none),
- the vision tower (they leave it out).

Not compared, because they count otherwise than the checkpoints are: gpt-oss-120b on a tight card (they leave
out MXFP4's scales and 16-bit embeddings), GLM-5 and DeepSeek V3.2 (their attention in 16 bits where the files
have FP8), Nemotron's recurrent states (counted per token), Llama 4's chunks (counted in full).
"""

import fcntl
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
from tests.engine import install

from kvist_operator.hardware import known_accelerator
from kvist_operator.memory.layout import EngineSettings, Layout
from kvist_operator.memory.memory_budget import budget
from kvist_operator.models.shape import Facts, read_shape

PACKAGE: Final = "aiconfigurator-core==0.12.0"
VERSIONS: Final = {"a100_sxm": "0.14.0"}
LENGTH: Final = 1 << 20
"""Long enough that the blocks of a window do not count."""
BATCHED, SEQUENCES, SHARE = 8192, 256, 92

PAIRS: Final = (
    ("Qwen/Qwen3-8B", "h200_sxm", "H200", 1),
    ("Qwen/Qwen3-8B", "l40s", "L40S", 1),
    ("Qwen/Qwen3-8B", "rtx_pro_6000_server", "RTX-PRO-6000", 1),
    ("Qwen/Qwen3-32B", "h100_sxm", "H100", 2),
    ("Qwen/Qwen3-32B", "rtx_pro_6000_server", "RTX-PRO-6000", 1),
    ("Qwen/Qwen3-32B-FP8", "h100_sxm", "H100", 1),
    ("Qwen/Qwen3-32B-FP8", "h200_sxm", "H200", 1),
    ("Qwen/Qwen3-VL-32B-Instruct", "h100_sxm", "H100", 2),
    ("meta-llama/Meta-Llama-3.1-8B", "a100_sxm", "A100-80GB", 1),
    ("meta-llama/Meta-Llama-3.1-8B", "l40s", "L40S", 1),
    ("meta-llama/Meta-Llama-3.1-70B", "h100_sxm", "H100", 4),
    ("meta-llama/Meta-Llama-3.1-70B", "h200_sxm", "H200", 2),
    ("meta-llama/Meta-Llama-3.1-70B", "gb200", "GB200", 2),
    ("meta-llama/Meta-Llama-3.1-405B", "h200_sxm", "H200", 8),
    ("Qwen/Qwen3-30B-A3B", "h100_sxm", "H100", 1),
    ("Qwen/Qwen3-235B-A22B", "h200_sxm", "H200", 8),
    ("Qwen/Qwen3-235B-A22B-FP8", "h200_sxm", "H200", 4),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "b200_sxm", "B200", 8),
    ("Qwen/Qwen3.5-27B", "h100_sxm", "H100", 1),
    ("Qwen/Qwen3.5-397B-A17B", "b200_sxm", "B200", 8),
    ("MiniMaxAI/MiniMax-M2.5", "h100_sxm", "H100", 8),
    ("openai/gpt-oss-20b", "h100_sxm", "H100", 1),
    ("google/gemma-4-26B-A4B", "h100_sxm", "H100", 1),
    ("deepseek-ai/DeepSeek-R1", "b200_sxm", "B200", 8),
    ("moonshotai/Kimi-K2.5", "h200_sxm", "H200", 8),
)
"""Model, their name of the GPU, ours, tensor parallelism (experts whole where there are several GPUs)."""

ASK = """
import json, logging, sys
from pathlib import Path
import aiconfigurator_core
from aiconfigurator_core.sdk.memory import estimate_kv_cache
logging.disable(logging.CRITICAL)
configs = Path(aiconfigurator_core.__file__).parent / "model_configs"
found = []
for pair in json.load(sys.stdin):
    text = (configs / (pair["model"].replace("/", "--") + "_config.json")).read_text()
    experts = any(word in text for word in ("num_experts", "n_routed_experts", "num_local_experts"))
    spread = {"moe_tp_size": 1, "moe_ep_size": pair["tp"]} if experts else {}
    estimate = estimate_kv_cache(
        pair["model"], pair["system"], "vllm", pair["version"], max_num_tokens=pair["batched"],
        max_batch_size=pair["sequences"], memory_fraction_kind="of_total",
        memory_fraction_value=pair["share"], tp_size=pair["tp"], kvcache_quant_mode="bfloat16", **spread,
    )
    found.append([estimate, json.loads(text)])
print("FOUND" + json.dumps(found))
"""


@dataclass(frozen=True)
class Estimate:
    """The published estimates for one model on one accelerator."""

    config: dict[str, Any]
    capacity: int
    others: int
    """Activations, context, communication."""
    tokens: int


def interpreter() -> Path:
    """An environment with the estimator, made once in the cache folder of the test tools (0.5 GB)."""
    home = install.cache() / PACKAGE.replace("==", "-")
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            uv = [sys.executable, "-m", "uv"]
            subprocess.run(
                [*uv, "venv", "--quiet", "--clear", "--python", install.PYTHON, str(home)], check=True
            )
            python = str(home / "bin" / "python")
            subprocess.run([*uv, "pip", "install", "--quiet", "--python", python, PACKAGE], check=True)
            (home / "complete").touch()
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def estimates() -> list[Estimate]:
    """Their word on every pair."""
    asked = [
        {
            "model": model,
            "system": system,
            "version": VERSIONS.get(system, "0.24.0"),
            "tp": tp,
            "batched": BATCHED,
            "sequences": SEQUENCES,
            "share": SHARE / 100,
        }
        for model, system, _, tp in PAIRS
    ]
    ran = subprocess.run(
        [str(interpreter()), "-c", ASK], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    return [_estimate(*found) for found in json.loads(ran.stdout.rpartition("FOUND")[2])]


def _estimate(found: dict[str, Any], config: dict[str, Any]) -> Estimate:
    parts = found["memory_breakdown"]
    others = sum(parts[f"{name}_bytes"] for name in ("activations", "runtime_overhead", "comm_overhead"))
    return Estimate(config, found["total_gpu_capacity_bytes"], others, found["total_kv_size_tokens"])


def tokens(theirs: Estimate, gpu: str, tp: int) -> int:
    """Our figure, with their constants."""
    shape = read_shape(theirs.config)
    layout = Layout(tensor=tp, expert=shape.experts is not None and tp > 1)
    run = EngineSettings(max_len=LENGTH, images=False)
    memory = budget(Facts(shape=shape, source="test"), known_accelerator(gpu), layout, run)
    free = theirs.capacity * SHARE / 100 - memory.weights - theirs.others
    [cache] = memory.stages
    return replace(cache, in_flight=0).tokens(free, LENGTH)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("at", range(len(PAIRS)), ids=[f"{m}-{g}x{tp}" for m, _, g, tp in PAIRS])
def test_kv_capacity_is_within_ten_per_cent(estimates: list[Estimate], at: int) -> None:
    """Weights and bytes a token are both ours; they agree with a second opinion."""
    _, _, gpu, tp = PAIRS[at]

    assert tokens(estimates[at], gpu, tp) == pytest.approx(estimates[at].tokens, rel=0.10)
