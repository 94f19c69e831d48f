"""How a checkpoint's weights are stored: ``quantization_config`` → bytes a weight, part by part. Pure.

Each part of a model stands for many modules; whether a quantisation skips it is asked by one representative
module name, in the way the checkpoint's own list is written (exact, prefix, glob or regular expression).
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.errors import ModelError

from .keys import Keys, whole

MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": ("model.layers.{i}.self_attn.o_proj", "model.layers.{i}.self_attn.q_proj"),
    "mlp": ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"),
    "experts": ("model.layers.{i}.mlp.experts.0.gate_proj",),
    "shared": (
        "model.layers.{i}.mlp.shared_experts.gate_proj",
        "model.layers.{i}.mlp.shared_expert.gate_proj",
    ),
    "recurrent": ("model.layers.{i}.linear_attn.in_proj_qkv", "backbone.layers.{i}.mixer.in_proj"),
    "head": ("lm_head",),
    "encoder": ("vision_tower.blocks.0.attn", "visual.blocks.0.attn"),
}
ALWAYS_PLAIN: Final = ("embedding", "router", "norms", "encoder")
INT4: Final = ("awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round", "auto_awq", "auto_gptq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """``method`` is empty for a checkpoint in its own dtype."""

    method: str = ""
    label: str = ""
    """For people: ``FP8 (blocks of 128)``."""
    bits: float = 16.0
    """A stored weight, its share of scales and zero points included."""
    block: int = 0
    """A shard of a quantised matrix must be a multiple of this many columns; 0 = any."""
    fp8: bool = False
    kv: str = ""
    """The KV dtype the checkpoint brings scales for: ``fp8`` or empty."""
    skipped: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    """Parts that are quantised where the rest is not; empty = all that may be."""
    exact: bool = True
    """False: sizes by this method are a guess."""

    def bytes_of(self, part: str, plain: float) -> float:
        """Bytes a weight of this part; ``plain`` = bytes of the model's dtype."""
        return self.bits / 8 if self.covers(part) else plain

    def covers(self, part: str) -> bool:
        """Whether weights of this part are stored quantised."""
        if not self.method or part in ALWAYS_PLAIN or part == "head" or (self.only and part not in self.only):
            return False
        names = [name.format(i=5) for name in MODULES.get(part, ())]
        return not any(_skips(rule, name) for rule in self.skipped for name in names)


def quantisation(keys: Keys, beside: Mapping[str, Any] | None = None) -> Quantisation:
    """From ``quantization_config``, or ModelOpt's file beside it (``hf_quant_config.json``).

    Raises:
        ModelError: a method vLLM does not load (GGUF, bitsandbytes).
    """
    config = _config(keys, beside)
    if not config:
        return Quantisation()
    method = str(config.get("quant_method") or ("modelopt" if "quant_algo" in config else "")).lower()
    if method in REFUSED:
        raise ModelError(f"{keys.name}: {REFUSED[method]}")
    try:
        return _made(method, config)
    except ModelError as error:
        raise ModelError(f"{keys.name}: quantization_config: {error}") from error


REFUSED: Final = {
    "gguf": "GGUF checkpoints are refused: vLLM has no GGUF loader any more; use a safetensors repository of "
    "the model, with AWQ, GPTQ, FP8 or compressed-tensors if it has to be small",
    "bitsandbytes": "bitsandbytes checkpoints are refused: vLLM loads none any more; use AWQ, GPTQ or FP8",
}


def _config(keys: Keys, beside: Mapping[str, Any] | None) -> Mapping[str, Any]:
    found = keys.text.get("quantization_config") or keys.whole.get("quantization_config")
    if isinstance(found, Mapping):
        return found
    inner = (beside or {}).get("quantization")
    return inner if isinstance(inner, Mapping) else {}


def _made(method: str, config: Mapping[str, Any]) -> Quantisation:
    skipped = _skipped(config)
    if method == "fp8":
        return _fp8(config, skipped)
    if method == "compressed-tensors":
        return _compressed(config, skipped)
    if method == "modelopt":
        return _modelopt(config, skipped)
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        return Quantisation(
            method=method, label="MXFP4 experts", bits=4.25, skipped=skipped, only=("experts",)
        )
    if method in INT4:
        return _grouped(method, config, skipped)
    return Quantisation(method=method, label=method or "unknown", bits=8, skipped=skipped, exact=False)


def _fp8(config: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantisation:
    block = config.get("weight_block_size")
    if isinstance(block, list) and block:
        side = whole(block[0], 128, "weight_block_size")
        bits, label = 8 + 32 / side / side, f"FP8 (blocks of {side})"
    else:
        side, bits, label = 0, 8.0, "FP8"
    return Quantisation(method="fp8", label=label, bits=bits, block=side, fp8=True, skipped=skipped)


def _compressed(config: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantisation:
    weights = _weights(config.get("config_groups"))
    bits = whole(weights.get("num_bits"), 16, "num_bits")
    group = whole(weights.get("group_size"), 0, "group_size")
    floating = weights.get("type") == "float"
    scale = 8 if floating and bits == 4 else 16
    return Quantisation(
        method="compressed-tensors",
        label=f"{'FP' if floating else 'INT'}{bits}" + (f" (groups of {group})" if group > 0 else ""),
        bits=bits + (scale / group if group > 0 else 0),
        block=max(group, 0),
        fp8=floating and bits == 8,
        kv="fp8" if _eight_bits(config) else "",
        skipped=skipped,
        exact=bool(weights),
    )


def _weights(groups: Any) -> Mapping[str, Any]:
    """Return the format of the first group's weights; empty where nothing says."""
    listed = groups.values() if isinstance(groups, Mapping) else ()
    found = (group.get("weights") for group in listed if isinstance(group, Mapping))
    return next((weights for weights in found if isinstance(weights, Mapping)), {})


def _modelopt(config: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantisation:
    algorithm = str(config.get("quant_algo") or "").upper()
    group = whole(config.get("group_size"), 16, "group_size")
    fp4 = "NVFP4" in algorithm or "W4A16" in algorithm
    kv = str(config.get("kv_cache_quant_algo") or "").upper() == "FP8" or _eight_bits(config)
    return Quantisation(
        method="modelopt",
        label="NVFP4" if fp4 else algorithm.replace("_", " ") or "ModelOpt",
        bits=4 + 8 / group if fp4 else 8.0,
        block=group if fp4 else 0,
        fp8=not fp4,
        kv="fp8" if kv else "",
        skipped=skipped,
        exact=algorithm in ("NVFP4", "FP8", "FP8_PB_WO"),
    )


def _eight_bits(config: Mapping[str, Any]) -> bool:
    scheme = config.get("kv_cache_scheme")
    return isinstance(scheme, Mapping) and scheme.get("num_bits") == 8


def _grouped(method: str, config: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantisation:
    bits = whole(config.get("bits") or config.get("w_bit"), 4, "bits")
    group = _group(config.get("group_size") or config.get("q_group_size"))
    zero = 0 if config.get("sym") else bits
    per_group = (16 + zero) / group if group > 0 else 0
    name = method.upper().removesuffix("_MARLIN").removeprefix("AUTO_")
    return Quantisation(
        method=method,
        label=f"{name} INT{bits}" + (f" (groups of {group})" if group > 0 else ""),
        bits=bits + per_group,
        block=max(group, 0),
        skipped=skipped,
    )


def _group(value: Any) -> int:
    """-1 means one scale for a whole column."""
    return 0 if value == -1 else whole(value, 128, "group_size")


def _skipped(config: Mapping[str, Any]) -> tuple[str, ...]:
    for name in ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers"):
        found = config.get(name)
        if isinstance(found, list) and found:
            return tuple(_rule(str(each), name) for each in found)
    return ()


def _rule(rule: str, name: str) -> str:
    try:
        re.compile(rule[3:] if rule.startswith("re:") else "")
    except re.error as error:
        raise ModelError(f"{name}: {rule!r} is no regular expression: {error}") from error
    return rule


def _skips(rule: str, name: str) -> bool:
    if rule.startswith("re:"):
        return re.match(rule[3:], name) is not None
    if "*" in rule:
        return fnmatch.fnmatch(name, rule) or fnmatch.fnmatch(name, f"{rule}.*")
    return name == rule or name.startswith(f"{rule}.") or f".{rule}." in name
