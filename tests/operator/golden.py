"""Whole plans as files, reviewed as a diff; ``python -m tests.operator.golden`` writes them again."""

import json
from pathlib import Path
from typing import Any, Final

from tests.operator import pools

from kvist_operator.plan import Plan, make_plan
from kvist_operator.spec import read_pool

FOLDER: Final = Path(__file__).parent / "golden"
CASES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "qwen3-32b-fp8-h100": ("Qwen/Qwen3-32B-FP8", "H100-80GB", {}),
    "llama-3.3-70b-h100": ("meta-llama/Llama-3.3-70B-Instruct", "NVIDIA-H100-80GB-HBM3", {}),
    "kimi-k2.5-h100": ("moonshotai/Kimi-K2.5", "H100-80GB", {}),
    "glm-5-fp8-h100": ("zai-org/GLM-5-FP8", "H100-80GB", {}),
    "gpt-oss-120b-a100": ("openai/gpt-oss-120b", "A100-80GB", {}),
    "qwen3.5-27b-mi300x": ("Qwen/Qwen3.5-27B", "MI300X", {}),
    "qwen3-8b-l4-agents": (
        "Qwen/Qwen3-8B",
        "L4",
        {
            "workload": {
                "promptTokens": 6000,
                "outputTokens": 400,
                "sharedPrefixTokens": 5000,
                "concurrency": 16,
                "ttftMilliseconds": 1500,
                "tpotMilliseconds": 50,
            },
            "offload": {"cpu": "64Gi", "disk": "500Gi"},
            "picker": {"priorities": [{"name": "interactive", "value": 10}]},
            "model": {"adapters": [{"name": "sql", "source": "hf://acme/sql-lora", "rank": 32}]},
        },
    ),
    "qwen3-0.6b-cpu": (
        "Qwen/Qwen3-0.6B",
        "cpu",
        {"accelerator": {"memory": "16Gi"}, "engine": {"version": "0.32.0", "maxModelLen": 4096}},
    ),
    "glm-5.3-speculative-b200": (
        "zai-org/GLM-5.3-FP8",
        "B200",
        {"engine": {"speculative": {"method": "MTP", "tokens": 3}, "kvCacheDtype": "Model"}},
    ),
    "deepseek-r1-data-parallel-h200": (
        "deepseek-ai/DeepSeek-R1",
        "H200",
        {"engine": {"tensorParallelSize": 1, "dataParallelSize": 8}},
    ),
    "qwen3-8b-stretched-l40s": (
        "Qwen/Qwen3-8B",
        "L40S",
        {"engine": {"maxModelLen": 131072, "extraArgs": ["--seed", "1"]}, "picker": {"mode": "Off"}},
    ),
    "bge-m3-l4": ("BAAI/bge-m3", "L4", {}),
    "bge-reranker-l4": ("BAAI/bge-reranker-v2-m3", "L4", {"engine": {"maxModelLen": 1024}}),
    "minilm-classify-cpu": (
        "cross-encoder/ms-marco-MiniLM-L6-v2",
        "cpu",
        {"model": {"task": "Classify"}, "accelerator": {"memory": "8Gi"}, "engine": {"version": "0.32.0"}},
    ),
    "qwen3-embedding-l40s": ("Qwen/Qwen3-Embedding-0.6B", "L40S", {"workload": {"outputTokens": 10}}),
    "qwen3-reranker-h100": (
        "Qwen/Qwen3-Reranker-0.6B",
        "H100-80GB",
        {"engine": {"prefixCaching": "Disabled"}},
    ),
    "qwen3-32b-tiers-h100": (
        "Qwen/Qwen3-32B-FP8",
        "H100-80GB",
        {
            "workload": {
                "promptTokens": 20000,
                "outputTokens": 500,
                "sharedPrefixTokens": 18000,
                "concurrency": 8,
            },
            "offload": {
                "cpu": "128Gi",
                "disk": "800Gi",
                "generatedTokens": "Enabled",
                "shared": {"claim": "kv-blocks", "size": "20Ti"},
            },
        },
    ),
    "qwen3-32b-lmcache-h100": (
        "Qwen/Qwen3-32B-FP8",
        "H100-80GB",
        {"offload": {"lmcache": {"memory": "200Gi"}}},
    ),
    "llama-405b-a10-refused": ("meta-llama/Llama-3.1-405B-Instruct", "A10", {}),
}


IMAGES: Final = (
    "vllm/vllm-openai:v0.29.0",
    "acme/vllm:0.4.2",
    "vllm/vllm-openai:v0.30.2",
    "vllm/vllm-openai:v0.32.1-cu130",
    "vllm/vllm-openai:v0.33.0",
    "vllm/vllm-openai:v0.99.0",
    "vllm/vllm-openai:latest",
    "vllm/vllm-openai@sha256:0f3c5f6b8c4d",
    "registry/internal:prod",
)
"""Images of which the version is known, is older or newer than the known ones, or cannot be read."""
IMAGES_FILE: Final = "images.json"


def image(name: str) -> dict[str, Any]:
    """Return what a plan with this image says about its version, and its arguments."""
    engine = {"image": name}
    pool = read_pool(pools.resource("hf://meta-llama/Llama-3.3-70B-Instruct", engine=engine))
    found = make_plan(pool, pools.known("meta-llama/Llama-3.3-70B-Instruct"), gpu="H100-80GB").to_dict()
    version = next(choice for choice in found["choices"] if choice["field"] == "engineVersion")
    return {"version": version} | {key: found[key] for key in ("verdict", "doubts", "args")}


def made(case: str) -> Plan:
    """Return the plan of one case."""
    name, gpu, spec = CASES[case]
    return make_plan(
        read_pool(pools.resource(f"hf://{name}", **json.loads(json.dumps(spec)))), pools.known(name), gpu=gpu
    )


def kept(case: str) -> Any:
    """Return the plan in the file of one case."""
    return json.loads((FOLDER / f"{case}.json").read_text())


def write() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        (FOLDER / f"{case}.json").write_text(
            json.dumps(made(case).to_dict(), indent=2, ensure_ascii=False) + "\n"
        )
    whole = {name: image(name) for name in IMAGES}
    (FOLDER / IMAGES_FILE).write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
