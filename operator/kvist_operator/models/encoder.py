"""The vision tower of a multimodal model: its size, and the most tokens a picture becomes. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from .keys import Keys
from .layers import Encoder
from .mixers import hidden

DEFAULT_TOKENS: Final = 16_384
"""What Qwen VL processors allow a picture by default; used where config.json does not say."""
PATCH_LIMIT: Final = {"kimi_k25": 16_384, "kimi_vl": 4_096}
"""Patches of one picture by processor (``in_patch_limit``), where config.json does not say."""
AUDIO: Final = ("audio_config", "audio_encoder_config", "speech_config")


def encoder(keys: Keys) -> Encoder | None:
    """From ``vision_config``; None for a text model."""
    config = keys.whole.get("vision_config") or keys.whole.get("vision_tower_config")
    if not isinstance(config, Mapping) or not config:
        return None
    vision = Keys({k: v for k, v in config.items() if k != "text_config"}, f"{keys.name}: vision_config")
    width = vision.number("hidden_size", "vt_hidden_size", "mm_hidden_size", "embed_dim", default=1152)
    return Encoder(
        layers=vision.number("depth", "num_hidden_layers", "vt_num_hidden_layers", default=27),
        hidden=width,
        width=vision.number("intermediate_size", "vt_intermediate_size", default=4 * width),
        heads=vision.number("num_heads", "num_attention_heads", "vt_num_attention_heads", default=16),
        merge=_merge(vision),
        tokens=_tokens(keys, vision),
        output=hidden(keys),
    )


def has_audio(config: Mapping[str, Any]) -> bool:
    """Whether there is an audio tower, which the memory arithmetic does not count."""
    return any(config.get(name) for name in AUDIO)


def _merge(vision: Keys) -> int:
    kernel = vision.sequence("merge_kernel_size")
    side = int(kernel[0]) if kernel else vision.number("spatial_merge_size", "pooling_kernel_size", default=1)
    return side * side


def _tokens(keys: Keys, vision: Keys) -> int:
    outer = Keys(keys.whole, keys.name)
    named = outer.number("vision_soft_tokens_per_image", "mm_tokens_per_image", default=0)
    if named:
        return named
    limit = PATCH_LIMIT.get(str(keys.whole.get("model_type")))
    if limit:
        return limit // _merge(vision)
    size, patch = vision.number("image_size", default=0), vision.number("patch_size", default=0)
    if size and patch:
        return (size // patch) ** 2 // _merge(vision)
    return DEFAULT_TOKENS
