"""Defaults of the classes in transformers that vLLM reads config.json with, for keys a file leaves out.

``class_defaults.json`` is written by ``python -m tests.engine.class_defaults``, which asks the classes: the
configuration inside ``text_config`` is stored without the keys that are equal to the default of its class
(Gemma 3 has no ``num_attention_heads`` there), while those of the file itself are all stored.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

FILE: Final = "class_defaults.json"
PATTERN: Final = "layer_pattern"
"""Kinds of layers that the class repeats where a file has no ``layer_types``."""
WRITTEN: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "sliding_window",
)
"""Keys without a default where the decoder is not inside another model: transformers writes all of these,
and a window that a user left out of ``spec.model.shape`` would promise too large a cache."""


@cache
def class_defaults() -> Mapping[str, Any]:
    """Return the table: ``text`` by type of decoder, ``outer`` by type of models that have one inside."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


def text_defaults(file: Mapping[str, Any], text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the defaults for the decoder of a config.json; ``text`` are its keys, those around it included.

    Keys that the file has under another name of the class are left out.
    """
    table, kind = class_defaults(), str(text.get("model_type"))
    around = table["outer"].get(str(file.get("model_type")), {})
    row = table["text"].get(kind) or table["text"].get(around.get("text"), {})
    aliases = row.get("aliases", {})
    named = {real for alias, real in aliases.items() if alias in text}
    hidden = {"aliases", *named, *(WRITTEN if text is file else ())}
    return {k: v for k, v in {**_switches(around), **row}.items() if k not in hidden}


def vision_defaults(file: Mapping[str, Any], vision: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the defaults for ``vision_config``; none for a tower of another class than the usual one."""
    row = class_defaults()["outer"].get(str(file.get("model_type")), {})
    kind = vision.get("model_type")
    found: Mapping[str, Any] = row.get("vision", {}) if kind in (None, row.get("vision_type")) else {}
    return found


def _switches(around: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in around.items() if key not in ("text", "vision", "vision_type")}
