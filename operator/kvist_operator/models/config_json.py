"""Typed access to the keys of config.json, which have several names in use; reads the vision tower. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvist_operator.errors import ModelError

from .class_defaults import text_defaults, vision_defaults
from .layers import Encoder

MAX_NUMBER: Final = 1 << 40
"""Larger than any number of a model."""
NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")
DEFAULT_IMAGE_TOKENS: Final = 16_384
"""Default limit of Qwen VL processors; used where config.json has no limit."""
PATCH_LIMIT: Final = {"kimi_k25": 16_384, "kimi_vl": 4_096}
"""Patches of one image by processor (``in_patch_limit``), where config.json has no limit."""

GATED_TOWERS: Final = ("qwen2_5_vl", "pixtral", "gemma4_vision")
"""Vision towers, or models with such a tower, whose feed-forward blocks have a gate matrix (transformers:
``Qwen2_5_VLMLP``, ``PixtralMLP``, ``Gemma4VisionMLP``)."""


class Keys:
    """The text part of one config.json; ``file`` is all of it. Methods take the names that a key may have.

    Where the text part has a key under none of its names, ``number``, ``sequence`` and ``flag`` return the
    default of the class in transformers that reads such files; a key that is null has no default.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        name: str = "config.json",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.file = config
        self.text = _text_part(config)
        self.name = name
        self.defaults = text_defaults(config, self.text) if defaults is None else defaults

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first key that holds a number; of a list with one number per layer, the largest.

        Negative numbers stand for none (``sliding_window: -1``).

        Raises:
            ModelError: a key has an invalid value, or no key is above zero and there is no default.
        """
        values = self._values(names)
        found = (self._integer(name, values.get(name)) for name in names)
        value = next((number for number in found if number is not None), default)
        if value is None or (default is None and not value):
            raise ModelError(f"{self.name}: {names[0]} is missing or not a number above 0")
        return value

    def _values(self, names: Sequence[str]) -> Mapping[str, Any]:
        """Return the file's keys if one of these is among them, otherwise the defaults of the class."""
        return self.text if any(name in self.text for name in names) else self.defaults

    def _integer(self, name: str, value: Any) -> int | None:
        if isinstance(value, list) and value and all(type(each) in (int, float) for each in value):
            value = max(value)
        if value is None or isinstance(value, bool | list):
            return None
        if not isinstance(value, int | float) or not math.isfinite(value) or value > MAX_NUMBER:
            raise ModelError(f"{self.name}: {name} is {str(value)[:40]!r}, not a valid number")
        return int(value) if value >= 0 else None

    def sequence(self, *names: str) -> Sequence[Any] | None:
        """Return the first key that holds a list with entries; None without one."""
        values = self._values(names)
        return next((v for name in names if isinstance(v := values.get(name), list) and v), None)

    def flag(self, name: str) -> bool | None:
        """Return whether a switch is on; None without the key."""
        value = self._values((name,)).get(name)
        return None if value is None else bool(value)

    def mapping(self, *names: str) -> Mapping[str, Any]:
        """Return the first key that holds an object; an empty one without."""
        return next((v for name in names if isinstance(v := self.text.get(name), Mapping)), {})

    def word(self, *names: str, default: str = "") -> str:
        """Return the first key that holds a string, or the default."""
        return next((v for name in names if isinstance(v := self.text.get(name), str)), default)

    @property
    def model_type(self) -> str:
        """``model_type`` of the text part, without the suffix ``_text`` that some models give it."""
        return self.word("model_type").removesuffix("_text")

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.number("hidden_size", "n_embd", "d_model")


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object that describes the decoder, completed by outer keys that it lacks."""
    for name in NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            outer = {
                k: v for k, v in config.items() if not isinstance(v, Mapping) or k == "quantization_config"
            }
            return _text_part({**outer, **inner})
    return config


def integer_above_zero(value: Any, default: int, name: str) -> int:
    """Return a whole number above zero; the default for None, 0 and below. Raises ModelError."""
    if value is None or value == 0:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value > MAX_NUMBER:
        raise ModelError(f"{name} is {str(value)[:40]!r}, not a whole number")
    return value if value > 0 else default


def read_encoder(keys: Keys) -> Encoder | None:
    """Return the vision tower of a multimodal model from ``vision_config``; None for a text model."""
    config = keys.file.get("vision_config") or keys.file.get("vision_tower_config")
    if not isinstance(config, Mapping) or not config:
        return None
    vision = Keys(
        {k: v for k, v in config.items() if k != "text_config"},
        f"{keys.name}: vision_config",
        vision_defaults(keys.file, config),
    )
    width = vision.number("hidden_size", "vt_hidden_size", "mm_hidden_size", "embed_dim", default=1152)
    kernel = vision.sequence("merge_kernel_size")
    merge = Keys(keys.file, keys.name).number("spatial_merge_size", default=1)
    sides = ("spatial_merge_size", "pooling_kernel_size")
    side = int(kernel[0]) if kernel else vision.number(*sides, default=merge)
    tokens = _image_tokens(keys, vision, side * side)
    whole = _square_patches(vision)
    return Encoder(
        layers=vision.number("depth", "num_hidden_layers", "vt_num_hidden_layers", default=27),
        hidden=width,
        width=vision.number("intermediate_size", "vt_intermediate_size", default=4 * width),
        merge=side * side,
        tokens=tokens,
        output=keys.hidden,
        # Gemma 3 pools 4,096 patches to 256 tokens without saying how many make one
        patches=whole if whole > tokens * side * side else 0,
        matrices=3 if any(file.get("model_type") in GATED_TOWERS for file in (config, keys.file)) else 2,
    )


def _square_patches(vision: Keys) -> int:
    """Return the patches of an image of ``image_size``; 0 where the file has no such size."""
    size, patch = vision.number("image_size", default=0), vision.number("patch_size", default=0)
    return (size // patch) ** 2 if size and patch else 0


def _image_tokens(keys: Keys, vision: Keys, merge: int) -> int:
    outer = Keys(keys.file, keys.name)
    named = outer.number("vision_soft_tokens_per_image", "mm_tokens_per_image", default=0)
    if named:
        return named
    limit = PATCH_LIMIT.get(str(keys.file.get("model_type")))
    if limit:
        return limit // merge
    return _square_patches(vision) // merge or DEFAULT_IMAGE_TOKENS
