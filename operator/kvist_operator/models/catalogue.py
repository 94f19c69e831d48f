"""The catalogue of current models, for clusters that cannot reach the hub; reads the file of the package.

A name may be spelled in any case of letters, or be one that the repository had before.
"""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import cycle, islice
from typing import Any, Final

import yaml

from kvist_operator.spec.pool import Task

from .config_json import Keys
from .pooling import SentenceFiles
from .shape import COMPUTED, Facts, read_shape

MANY_FORMATS: Final = ("llama", "mistral", "qwen2")
"""Types whose models write tool calls in many formats, because others were trained from them."""


@cache
def catalogue() -> Mapping[str, Any]:
    """Return catalogue.yaml: current models by repository, for clusters that cannot reach the hub."""
    text = resources.files(__package__).joinpath("catalogue.yaml").read_text(encoding="utf-8")
    # the parser in C, where PyYAML was built with it, takes 0.03 s instead of 0.17
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: Mapping[str, Any] = yaml.load(text, loader)
    return found


RENAMED: Final = {"thudm": "zai-org", "neuralmagic": "redhatai"}
"""Organisations of the hub that have another name now; the hub redirects the old one."""
META: Final = "meta-llama/meta-llama-3.1-"
"""Former spelling of repositories that are called ``meta-llama/Llama-3.1-…`` now."""


def listed_name(repository: str) -> str:
    """Return the name of a repository in the catalogue, which may be spelled in any case of letters, or have
    the name that it had before; empty for one that is not there."""
    text = repository.lower()
    organisation, slash, name = text.partition("/")
    text = f"{RENAMED.get(organisation, organisation)}{slash}{name}"
    if text.startswith(META):
        text = text.replace("/meta-", "/", 1)
    return next((each for each in catalogue() if each.lower() == text), "")


def near_names(repository: str) -> list[str]:
    """Return up to three names of the catalogue that look like this one."""
    names = {each.lower(): each for each in catalogue()}
    return [names[each] for each in difflib.get_close_matches(repository.lower(), names, n=3, cutoff=0.75)]


def from_catalogue(repository: str) -> Facts | None:
    """Return the facts of a repository in the catalogue; None for another one."""
    models = catalogue()
    name = listed_name(repository)
    if not name:
        return None
    entry = models[name]
    origin = entry if "config" in entry else models[entry["as"]]
    config, sentence = origin["config"], origin.get("sentence")
    size = entry.get("checkpoint") or {}
    files = SentenceFiles(**sentence) if sentence is not None else None
    return Facts(
        shape=read_shape(_expanded(config), name=name, sentence=files),
        checkpoint_bytes=size.get("bytes", 0),
        source=f"catalogue: {entry['source']}" if "source" in entry else "catalogue",
        checkpoint_source=size.get("source", COMPUTED),
        tool_parser=entry.get("tool_parser", ""),
        reasoning_parser=entry.get("reasoning_parser", ""),
        task=Task(entry["task"]) if "task" in entry else None,
        remote_code=entry.get("remote_code", False),
    )


def with_parsers(facts: Facts) -> Facts:
    """Return the facts with the parsers that all models of this type in the catalogue have in common."""
    kind = facts.shape.model_type
    if kind in MANY_FORMATS:
        return facts
    models = catalogue()
    alike = []
    for entry in models.values():
        origin = entry if "config" in entry else models[entry["as"]]
        other = "task" in entry or origin.get("sentence", {}).get("listed") or not entry.get("typical", True)
        if Keys(origin["config"]).model_type == kind and not other:
            alike.append((entry.get("tool_parser", ""), entry.get("reasoning_parser", "")))
    tool, reasoning = ({pair[i] for pair in alike} for i in (0, 1))
    return replace(
        facts,
        tool_parser=tool.pop() if len(tool) == 1 else "",
        reasoning_parser=reasoning.pop() if len(reasoning) == 1 else "",
        parser_source=f"catalogue, models of type {kind}",
    )


def _expanded(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace ``runs`` by the lists config.json has: [number, kind] pairs, repeated over all layers."""
    layers = config.get("num_hidden_layers")

    def expanded(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if "runs" not in value:
            return _expanded(value)
        pattern = [kind for number, kind in value["runs"] for _ in range(number)]
        return list(islice(cycle(pattern), layers or len(pattern)))

    return {key: expanded(value) for key, value in config.items()}
