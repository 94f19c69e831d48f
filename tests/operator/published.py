"""Public start-up logs of vLLM (``published_logs.yaml``), and what the planner's arithmetic says for them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from tests.operator.pools import known

from kvist_operator.flag_table import LATEST, Version
from kvist_operator.hardware import Accelerator, known_accelerator
from kvist_operator.memory.layout import GIB, EngineSettings, Layout
from kvist_operator.memory.memory_budget import Memory, budget
from kvist_operator.models.shape import Facts, read_shape

TABLE = yaml.safe_load((Path(__file__).parent / "published_logs.yaml").read_text())
LOWEST, HIGHEST = -6.0, 2.0
"""Percent by which the planned KV cache may differ: with too much of it the engine does not start."""


@dataclass(frozen=True)
class PublishedLog:
    """One log; ``facts``, ``gpu``, ``layout`` and ``settings`` are what the arithmetic takes."""

    entry: dict[str, Any]

    @property
    def name(self) -> str:
        """The model and the GPUs."""
        return str(self.entry["name"])

    @property
    def version(self) -> Version:
        """Minor version of vLLM; the latest for a log that does not name it."""
        if self.entry["vllm"] == "unknown":
            return LATEST
        major, minor, *_ = self.entry["vllm"].split(".")
        return int(major), int(minor)

    @property
    def facts(self) -> Facts:
        """Facts of the model, from the catalogue or from the table's own keys."""
        name = self.entry["model"]
        if name not in TABLE["models"]:
            return known(name)
        return Facts(shape=read_shape(TABLE["models"][name]["config"], name=name), source="log")

    @property
    def gpu(self) -> Accelerator:
        """The GPU with the total memory that the log shows."""
        found = self.entry["gpu"]
        bare = replace(known_accelerator("L4"), name="other", product="other")
        row = known_accelerator(found) if isinstance(found, str) else replace(bare, **found)
        return replace(row, memory_gib=self.entry.get("memory", row.memory_gib))

    @property
    def layout(self) -> Layout:
        """Parallelism of the replica."""
        return Layout(tensor=self.entry.get("tensor", 1), expert=self.entry.get("expert", False))

    @property
    def settings(self) -> EngineSettings:
        """Settings of the engine."""
        e = self.entry
        given = ("eager", "kv_dtype", "block", "images", "pictures", "prefix_caching")
        return EngineSettings(
            version=self.version,
            share=e["share"],
            batched_tokens=e["batched"],
            sequences=e["sequences"],
            max_len=e["length"],
            **{name: e[name] for name in given if name in e},
        )

    @property
    def memory(self) -> Memory:
        """Return the memory by the planner's arithmetic."""
        return budget(self.facts, self.gpu, self.layout, self.settings)

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest difference of the KV cache, in percent."""
        low, high = self.entry.get("bounds", (LOWEST, HIGHEST))
        return low, high

    def difference(self, planned: Memory) -> float:
        """Return by how many percent the planned KV cache differs from the log's."""
        measured, own = self.entry.get("kv"), planned.kv / GIB
        if measured is None:
            measured, own = self.entry["tokens"], planned.kv_tokens
        return 100 * (own - float(measured)) / abs(float(measured))


LOGS = tuple(PublishedLog(entry) for entry in TABLE["logs"])


def page_table() -> str:
    """Return the table of docs/guides/planning.md: KV cache planned and logged."""
    lines = [
        "| model and GPUs | vLLM | KV cache, GiB: planned | logged | difference |",
        "|---|---|---|---|---|",
    ]
    for log in LOGS:
        planned = log.memory
        if "kv" in log.entry:
            figures = f"{planned.kv / GIB:.2f} | {log.entry['kv']:.2f}"
        else:
            figures = f"{planned.kv_tokens:,} tokens | {log.entry['tokens']:,} tokens"
        mark = " *" if "exception" in log.entry else ""
        lines.append(
            f"| {log.name} | {log.entry['vllm']} | {figures} | {log.difference(planned):+.1f} %{mark} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    guide = Path(__file__).parents[2] / "docs" / "guides" / "planning.md"
    text = guide.read_text()
    start = text.index(page_table().splitlines()[0])
    end = text.index("\n\n", start)
    guide.write_text(text[:start] + page_table() + text[end:])
