"""Reads how a checkpoint stores its weights: ``quantization_config`` → bytes per weight of each part. Pure.

Each part of a model stands for many modules. Whether a quantization skips a part is decided by the name of
one representative module, matched the way the checkpoint's own list is written: exact name, prefix, glob or
regular expression.
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.errors import ModelError

from .config_json import Keys, integer_above_zero

MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": ("model.layers.{i}.self_attn.o_proj", "model.layers.{i}.self_attn.q_proj"),
    "mlp": ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"),
    "experts": ("model.layers.{i}.mlp.experts.0.gate_proj",),
    "shared": tuple(f"model.layers.{{i}}.mlp.{n}.gate_proj" for n in ("shared_experts", "shared_expert")),
    "recurrent": ("model.layers.{i}.linear_attn.in_proj_qkv", "backbone.layers.{i}.mixer.in_proj"),
}
NEVER_QUANTIZED: Final = ("embedding", "head", "router", "norms", "encoder")
INT4: Final = ("awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round", "auto_awq", "auto_gptq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Format of the stored weights; ``method`` is empty for weights in the model's dtype."""

    method: str = ""
    label: str = ""
    """Shown to users: ``FP8 (blocks of 128)``."""
    bits: float = 16.0
    """Bits of a stored weight, its share of scales and zero points included."""
    block: int = 0
    """Columns of which a shard of a quantized matrix must be a multiple; 0 = any."""
    fp8: bool = False
    kv: str = ""
    """KV cache dtype for which the checkpoint has scales: ``fp8`` or empty."""
    skipped: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    """The only quantized parts; empty = all parts that may be quantized."""
    exact: bool = True
    """False if sizes with this method are estimates."""

    @property
    def mxfp4(self) -> bool:
        """Whether experts are in MXFP4: 4-bit floats with a shared exponent for 32 of them."""
        return self.method in ("mxfp4", "gpt_oss_mxfp4")

    def bytes_of(self, part: str, plain: float) -> float:
        """Return the bytes of one weight of this part; ``plain`` = bytes of the model's dtype."""
        return self.bits / 8 if self.covers(part) else plain

    def covers(self, part: str) -> bool:
        """Return whether weights of this part are stored quantized."""
        if not self.method or part in NEVER_QUANTIZED or (self.only and part not in self.only):
            return False
        names = [name.format(i=5) for name in MODULES.get(part, ())]
        return not any(_skips(rule, name) for rule in self.skipped for name in names)


REFUSED: Final = {
    "gguf": "GGUF checkpoints are refused: vLLM no longer has a GGUF loader; use a safetensors repository of "
    "the model, with AWQ, GPTQ, FP8 or compressed-tensors if it has to be small",
    "bitsandbytes": "bitsandbytes checkpoints are refused: vLLM no longer loads them; use AWQ, GPTQ or FP8",
}


def read_quantization(keys: Keys, quant_config: Mapping[str, Any] | None = None) -> Quantization:
    """Return the format given by ``quantization_config``, or by ModelOpt's separate hf_quant_config.json.

    Raises:
        ModelError: an invalid value, or a method that vLLM does not load (GGUF, bitsandbytes).
    """
    config = keys.text.get("quantization_config") or keys.file.get("quantization_config")
    if not isinstance(config, Mapping):
        config = (quant_config or {}).get("quantization")
    if not isinstance(config, Mapping) or not config:
        return Quantization()
    method = str(config.get("quant_method") or ("modelopt" if "quant_algo" in config else "")).lower()
    if method in REFUSED:
        raise ModelError(f"{keys.name}: {REFUSED[method]}")
    try:
        return _by_method(method, config)
    except ModelError as error:
        raise ModelError(f"{keys.name}: quantization_config: {error}") from error


def _by_method(method: str, config: Mapping[str, Any]) -> Quantization:
    skipped = _skipped(config)
    if method == "fp8":
        return _fp8(config, skipped)
    if method == "compressed-tensors":
        return _compressed_tensors(config, skipped)
    if method == "modelopt":
        return _modelopt(config, skipped)
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        return Quantization(
            method=method, label="MXFP4 experts", bits=4.25, skipped=skipped, only=("experts",)
        )
    if method in INT4:
        return _int4(method, config, skipped)
    return Quantization(method=method, label=method or "unknown", bits=8, skipped=skipped, exact=False)


def _fp8(config: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantization:
    block = config.get("weight_block_size")
    if isinstance(block, list) and block:
        side = integer_above_zero(block[0], 128, "weight_block_size")
        bits, label = 8 + 32 / side / side, f"FP8 (blocks of {side})"
    else:
        side, bits, label = 0, 8.0, "FP8"
    return Quantization(method="fp8", label=label, bits=bits, block=side, fp8=True, skipped=skipped)


def _compressed_tensors(config: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantization:
    groups = config.get("config_groups")
    listed = groups.values() if isinstance(groups, Mapping) else ()
    formats = (each.get("weights") for each in listed if isinstance(each, Mapping))
    weights: Mapping[str, Any] = next((found for found in formats if isinstance(found, Mapping)), {})
    bits = integer_above_zero(weights.get("num_bits"), 16, "num_bits")
    group = integer_above_zero(weights.get("group_size"), 0, "group_size")
    floating = weights.get("type") == "float"
    scale = 8 if floating and bits == 4 else 16
    return Quantization(
        method="compressed-tensors",
        label=f"{'FP' if floating else 'INT'}{bits}" + (f" (groups of {group})" if group else ""),
        bits=bits + (scale / group if group else 0),
        block=group,
        fp8=floating and bits == 8,
        kv="fp8" if _has_kv_scales(config) else "",
        skipped=skipped,
        exact=bool(weights),
    )


def _modelopt(config: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantization:
    algorithm = str(config.get("quant_algo") or "").upper()
    group = integer_above_zero(config.get("group_size"), 16, "group_size")
    fp4 = "NVFP4" in algorithm or "W4A16" in algorithm
    kv = str(config.get("kv_cache_quant_algo") or "").upper() == "FP8" or _has_kv_scales(config)
    return Quantization(
        method="modelopt",
        label="NVFP4" if fp4 else algorithm.replace("_", " ") or "ModelOpt",
        bits=4 + 8 / group if fp4 else 8.0,
        block=group if fp4 else 0,
        fp8=not fp4,
        kv="fp8" if kv else "",
        skipped=skipped,
        exact=algorithm in ("NVFP4", "FP8", "FP8_PB_WO"),
    )


def _has_kv_scales(config: Mapping[str, Any]) -> bool:
    scheme = config.get("kv_cache_scheme")
    return isinstance(scheme, Mapping) and scheme.get("num_bits") == 8


def _int4(method: str, config: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantization:
    bits = integer_above_zero(config.get("bits") or config.get("w_bit"), 4, "bits")
    size = config.get("group_size") or config.get("q_group_size")
    # -1 means one scale for a whole column
    group = 0 if size == -1 else integer_above_zero(size, 128, "group_size")
    zero = 0 if config.get("sym") else bits
    name = method.upper().removesuffix("_MARLIN").removeprefix("AUTO_")
    return Quantization(
        method=method,
        label=f"{name} INT{bits}" + (f" (groups of {group})" if group else ""),
        bits=bits + ((16 + zero) / group if group else 0),
        block=group,
        skipped=skipped,
    )


def _skipped(config: Mapping[str, Any]) -> tuple[str, ...]:
    for name in ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers"):
        found = config.get(name)
        if isinstance(found, list) and found:
            rules = tuple(map(str, found))
            for rule in rules:
                try:
                    re.compile(rule[3:] if rule.startswith("re:") else "")
                except re.error as error:
                    raise ModelError(f"{name}: {rule!r} is not a regular expression: {error}") from error
            return rules
    return ()


def _skips(rule: str, name: str) -> bool:
    if rule.startswith("re:"):
        return re.match(rule[3:], name) is not None
    if "*" in rule:
        return fnmatch.fnmatch(name, rule) or fnmatch.fnmatch(name, f"{rule}.*")
    return name == rule or name.startswith(f"{rule}.") or f".{rule}." in name
