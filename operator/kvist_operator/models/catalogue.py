"""The catalogue: facts of current models, for clusters that reach no hub. Reads a file of the package."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import cycle, islice
from typing import Any

import yaml

from .facts import COMPUTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model of the catalogue."""

    name: str
    config: Mapping[str, Any]
    checkpoint_bytes: int
    """0 = computed from the shape."""
    checkpoint_source: str
    tool_parser: str
    reasoning_parser: str
    remote_code: bool
    """Its tokenizer is code of the repository, which vLLM runs only when told to trust it."""


@cache
def entries() -> Mapping[str, Entry]:
    """Every entry, by repository name in lower case."""
    text = resources.files(__package__).joinpath("catalogue.yaml").read_text(encoding="utf-8")
    raw = yaml.safe_load(text)
    return {name.lower(): _entry(name, raw) for name in raw}


def lookup(name: str) -> Entry | None:
    """The entry of a repository name; case does not matter."""
    return entries().get(name.lower())


def _entry(name: str, raw: Mapping[str, Any]) -> Entry:
    found = raw[name]
    size = found.get("checkpoint") or {}
    return Entry(
        name=name,
        config=_config(found, raw),
        checkpoint_bytes=size.get("bytes", 0),
        checkpoint_source=size.get("source", COMPUTED),
        tool_parser=found.get("tool_parser", ""),
        reasoning_parser=found.get("reasoning_parser", ""),
        remote_code=found.get("remote_code", False),
    )


def _config(found: Mapping[str, Any], raw: Mapping[str, Any]) -> Mapping[str, Any]:
    own = found if "config" in found else raw[found["as"]]
    return _expanded(own["config"])


def _expanded(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Runs become the lists config.json has: one pattern, repeated over the layers."""
    layers = config.get("num_hidden_layers")
    return {key: _value(value, layers) for key, value in config.items()}


def _value(value: Any, layers: int | None) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "runs" not in value:
        return _expanded(value)
    pattern = [kind for number, kind in value["runs"] for _ in range(number)]
    return list(islice(cycle(pattern), layers or len(pattern)))
