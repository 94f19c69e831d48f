"""Reads config.json: first of several names, never a surprise about types."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvist_operator.errors import ModelError

MOST: Final = 1 << 40
"""No number of a model is larger."""
NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")


class Keys:
    """The text part of one config.json; ``whole`` is the file."""

    def __init__(self, config: Mapping[str, Any], name: str = "config.json") -> None:
        self.whole = config
        self.text = text_part(config)
        self.name = name

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of the names that holds a number. Negative ones stand for none (``sliding_window: -1``);
        of a list, one for each layer, the largest counts.

        Raises:
            ModelError: it is no number or out of reach; or there is none above zero, and no default.
        """
        found = (self._whole(name, _widest(self.text.get(name))) for name in names)
        value = next((number for number in found if number is not None), default)
        if value is None or (default is None and not value):
            raise ModelError(f"{self.name}: {names[0]} is missing or no number above 0")
        return value

    def _whole(self, name: str, value: Any) -> int | None:
        if value is None or isinstance(value, bool | list):
            return None
        if not isinstance(value, int | float) or not math.isfinite(value) or value > MOST:
            raise ModelError(f"{self.name}: {name} is {str(value)[:40]!r}, which is no number that can be")
        return int(value) if value >= 0 else None

    def sequence(self, *names: str) -> Sequence[Any] | None:
        """The first of the names that holds a list, else None."""
        return next((v for name in names if isinstance(v := self.text.get(name), list) and v), None)

    def mapping(self, *names: str) -> Mapping[str, Any]:
        """The first of the names that holds an object, else an empty one."""
        return next((v for name in names if isinstance(v := self.text.get(name), Mapping)), {})

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.text.get(name)
        return default if value is None else bool(value)

    def word(self, *names: str, default: str = "") -> str:
        return next((v for name in names if isinstance(v := self.text.get(name), str)), default)

    @property
    def kind(self) -> str:
        """``model_type`` of the text part, without the suffix some give it."""
        return self.word("model_type").removesuffix("_text")


def whole(value: Any, default: int, name: str) -> int:
    """A whole number above zero of some other object; the default where there is none. Raises ModelError."""
    if value is None or value == 0:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value > MOST:
        raise ModelError(f"{name} is {str(value)[:40]!r}, no whole number")
    return value if value > 0 else default


def _widest(value: Any) -> Any:
    if isinstance(value, list) and value and all(type(each) in (int, float) for each in value):
        return max(value)
    return value


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object that describes the decoder; outer keys stand in for those it lacks."""
    for name in NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return text_part({**_scalars(config), **inner})
    return config


def _scalars(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if not isinstance(v, Mapping) or k == "quantization_config"}
