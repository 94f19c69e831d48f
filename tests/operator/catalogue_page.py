"""The page that lists the catalogue, and models that no stored source proves;
``python -m tests.operator.catalogue_page`` writes docs/catalogue.md again."""

from pathlib import Path
from typing import Any, Final

from tests.operator.pools import known

from kvist_operator.models.catalogue import catalogue
from kvist_operator.models.shape import checkpoint_bytes

PAGE: Final = Path(__file__).parents[2] / "docs" / "catalogue.md"
HEAD: Final = """# Models of the catalogue

Written by `make golden`; a test compares the page with the catalogue. Facts of these {number} models need no
hub ([planning](guides/planning.md#where-facts-about-a-model-come-from)). *Source* is the package, or the
repository and its commit, where config.json was read. Weights with * are the size of the published files;
others are computed from the shape.
"""
MISSING: Final = (
    ("Qwen2.5-VL 3B, 32B, 72B", "no stored copy of config.json; the 7B is there"),
    ("Qwen3-Coder-30B-A3B, Qwen3-Coder-Next, Qwen3-VL FP8", "no stored copy of config.json"),
    ("Qwen3.6, Qwen3.8", "only NVIDIA's NVFP4 of Qwen3.6-27B; that of Qwen3.6-35B-A3B mixes precisions"),
    ("Qwen AWQ and GPTQ but Qwen3-8B-AWQ", "no stored source of the lists of modules or of the size"),
    ("Ministral-3 8B and 14B", "the width of their feed-forward blocks is in no stored source"),
    ("Mistral-Large-3, Magistral, Mistral Small 3.0 and 3.1", "no stored copy of config.json"),
    ("Granite 4 and later", "tied embeddings and widths are in no stored source"),
    ("GLM-4.5 to 4.7 in FP8", "the stored config.json leaves out the quantization"),
    ("Kimi-K2-Thinking, MiniMax-M2", "the stored config.json leaves out the quantization"),
    ("Phi-3-mini-4k, Phi-3-medium", "the stored sources disagree on the window, or lack the width"),
    ("Llama-3.2 11B and 90B Vision", "cross-attention layers are not modelled"),
    ("Llama-3.3-Nemotron-Super, MiniMax-M3-NVFP4, DeepSeek-V4 NVFP4", "parts that are not modelled"),
    ("Gemma 3n, Gemma 4 E2B and E4B", "per-layer embeddings are in no stored source"),
    (
        "Yi, InternLM, Command R, EXAONE, SmolLM3, Hunyuan, Ernie",
        "no stored copy of config.json was looked at",
    ),
)
"""Wanted models that no stored public source proves, and why."""


def page() -> str:
    """Return the page."""
    models = catalogue()
    rows = [_row(name, models[name]) for name in sorted(models, key=str.lower)]
    table = "| model | weights, GiB | context | source |\n|---|---|---|---|\n" + "\n".join(rows)
    missing = "\n".join(f"| {names} | {why} |" for names, why in MISSING)
    return (
        f"{HEAD.format(number=len(models))}\n{table}\n\n## Not in the catalogue\n\n"
        "These need the hub, or `spec.model.shape`: no public source that could be read proves them.\n\n"
        f"| models | why |\n|---|---|\n{missing}\n"
    )


def _row(name: str, entry: dict[str, Any]) -> str:
    facts = known(name)
    size = facts.checkpoint_bytes or checkpoint_bytes(facts.shape)
    published = " *" if facts.checkpoint_bytes else ""
    return f"| {name} | {size / 2**30:,.1f}{published} | {facts.shape.max_len:,} | {entry['source']} |"


if __name__ == "__main__":
    PAGE.write_text(page())
