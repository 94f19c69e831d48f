"""The plan as a record and as JSON, and the comparison of two plans. Pure."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import yaml

from kvist_operator.errors import SpecError
from kvist_operator.hardware import Accelerator
from kvist_operator.json_digest import json_digest
from kvist_operator.memory.layout import GIB, EngineSettings, Layout
from kvist_operator.memory.memory_budget import Memory
from kvist_operator.spec.pool import Task


class PlanVerdict(StrEnum):
    """Result of a plan; ``kvist plan`` ends with exit code 3 for ``refused``, otherwise with 0."""

    FITS = "fits"
    UNVERIFIED = "unverified"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision of a plan, with its reason and the source of that reason."""

    field: str
    value: Any
    reason: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The accelerators available to one replica."""

    accelerator: Accelerator
    per_node: int
    count: int | None = None
    """Accelerators of one replica, where the user fixes the number."""
    price: float | None = None
    """Of one accelerator for an hour; None = not known."""

    def cost(self, layout: Layout) -> float | None:
        """Return the price of one replica for an hour; None if it is not known."""
        return None if self.price is None else self.price * layout.gpus

    def nodes(self, layout: Layout) -> int:
        """Return the number of nodes that one replica spans."""
        return -(-layout.gpus // self.per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another size or kind of accelerators for the same pool, with what it would hold."""

    accelerator: str
    gpus: int
    nodes: int
    sequences: float
    """Typical requests that fit at once."""
    wished: int
    """Requests that should fit at once."""
    tokens: int
    """Tokens of one of them."""
    cheaper: bool
    """Cheaper than the plan, or smaller where prices are not known; otherwise dearer."""
    price: float | None = None
    """Of a replica for an hour; None = not known."""

    def __str__(self) -> str:
        over = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        part = min(self.wished, math.floor(10 * self.sequences) / 10)
        held = f"{self.gpus} × {self.accelerator}{over} holds {part:g} of {self.wished} sequences"
        price = f", for {self.price:.2f} per hour" if self.price is not None else ""
        return f"{held} of {self.tokens:,} tokens{price}"

    def to_dict(self) -> dict[str, Any]:
        """Return the facts for ``kvist plan -o json``."""
        return {
            "accelerator": self.accelerator,
            "gpus": self.gpus,
            "nodes": self.nodes,
            "sequences": round(self.sequences, 2),
            "wished": self.wished,
            "tokens": self.tokens,
            "cheaper": self.cheaper,
            "price_per_hour": None if self.price is None else round(self.price, 4),
            "text": str(self),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResources:
    """Resources of one replica's pods besides accelerators, for each node."""

    shm_bytes: int
    memory_bytes: int
    startup_seconds: int
    pre_stop_seconds: int
    drain_seconds: int
    grace_seconds: int
    disk_bytes: int = 0
    checkpoint_bytes: int = 0
    """Files of the model and its draft model."""
    home_bytes: int = 0
    """Size of the volume with downloaded weights and compiled kernels; 0 = not limited."""
    ephemeral_bytes: int = 0
    """Space on the node's own disk; 0 = no more than any container needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place for KV cache blocks of one replica."""

    medium: str
    """``gpu``, ``host``, ``disk``, ``shared`` or ``lmcache``."""
    size_bytes: int
    tokens: int
    """Tokens that fit."""
    idle_seconds: float | None
    """Time after which a block that is not used again is dropped; None = the workload does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageNamespace:
    """Engines that may use each other's blocks on a volume."""

    name: str
    """A folder's name, and a label's value."""
    agreed: Mapping[str, str]
    """Everything in which engines of this namespace agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arguments and resources of a pool's engines, each with its reason."""

    verdict: PlanVerdict
    shortfall_bytes: float
    """Bytes that the fullest GPU lacks, if refused."""
    nearest: str
    """The nearest configuration that would fit, if refused."""
    hardware: Hardware
    layout: Layout
    settings: EngineSettings
    memory: Memory
    model: str
    """One line about the model."""
    argv: tuple[str, ...]
    """The whole command after ``vllm``; empty if refused."""
    env: dict[str, str]
    pod: PodResources
    choices: tuple[Choice, ...]
    doubts: tuple[str, ...]
    """Why the plan is unverified."""
    notes: tuple[str, ...] = ()
    """Remarks for the verdict line, which do not make a plan unverified."""
    warnings: tuple[str, ...] = ()
    """Fields of the pool without effect, or probably not with the one that is meant."""
    neighbours: tuple[Neighbour, ...] = ()
    """A cheaper size with what it would hold, and a dearer one if the plan holds less than the wish."""
    kv_events: bool = False
    """Engines publish KV events, which the picker reads."""
    tiers: tuple[Tier, ...] = ()
    """Places for KV cache blocks, the fastest first; empty without ``spec.offload``."""
    storage: StorageNamespace | None = None
    """Engines with which those of this plan share a volume that outlives pods."""
    role: str = ""
    """Role of the engines in a disaggregated pool; empty for others."""
    kv_compatibility: str = ""
    """Hash of what engines have in common that send each other blocks; empty without roles."""
    prefill: "Plan | None" = None
    """The plan of the engines for prompts, beside this one of those that decode."""

    @property
    def task(self) -> Task:
        """Task of the engines: text, embeddings, scores or classes."""
        return self.settings.pooling.task if self.settings.pooling else Task.GENERATE

    @property
    def routes_by_prefix(self) -> bool:
        """Whether the picker sends requests where their prefixes are cached, not by load alone."""
        return self.settings.routes_by_prefix

    @property
    def nodes(self) -> int:
        """Nodes that one replica spans."""
        return self.hardware.nodes(self.layout)

    @property
    def price_per_hour(self) -> float | None:
        """Price of one replica for an hour; None if it is not known."""
        price = self.hardware.cost(self.layout)
        return None if price is None else round(price, 4)

    @property
    def hash(self) -> str:
        """Hash of what runs (accelerators, arguments, environment, pods), without reasons."""
        facts = {k: v for k, v in self.to_dict().items() if k in ("accelerator", "args", "env", "pod")}
        # these were not there when the pods of older releases were hashed
        facts["accelerator"] = {k: v for k, v in facts["accelerator"].items() if k != "capability"}
        if not self.pod.ephemeral_bytes:
            facts["pod"] = {k: v for k, v in facts["pod"].items() if k != "ephemeral_gib"}
        return json_digest(facts, 12)

    @property
    def refusal(self) -> str:
        """The refusal in one sentence; empty if the plan is not refused."""
        return next((choice.reason for choice in self.choices if choice.field == "verdict"), "")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for ``kvist plan -o json`` and ``status.plan``.

        Memory is per GPU in GiB; tokens and concurrency are those of a whole replica.
        """
        row, layout, memory, pod = self.hardware.accelerator, self.layout, self.memory, self.pod
        # KV cache of one sequence of max_len on all GPUs that hold a part of it
        sequence = sum(cache.request_bytes(memory.max_len) for cache in memory.stages) * layout.tensor
        return {
            "verdict": str(self.verdict),
            "shortfall_gib": _gib(self.shortfall_bytes),
            "nearest": self.nearest,
            "model": self.model,
            "task": str(self.task),
            "batch": {"tokens": self.settings.batched_tokens, "sequences": self.settings.sequences},
            "accelerator": {
                "product": row.product,
                "name": row.name,
                "resource": row.resource,
                "capability": row.capability,
                "per_replica": layout.gpus,
                "per_node": min(layout.gpus, self.hardware.per_node),
                "nodes": self.nodes,
            },
            "parallelism": {
                "tensor": layout.tensor,
                "pipeline": layout.pipeline,
                "data": layout.data,
                "context": layout.context,
                "expert": layout.expert_size,
            },
            "memory": {
                "per_gpu_gib": _gib(memory.total),
                "usable_gib": _gib(memory.usable),
                "weights_gib": _gib(memory.weights),
                "activations_gib": _gib(memory.activations + memory.encoder),
                "encoder_gib": _gib(memory.encoder),
                "graphs_gib": _gib(memory.graphs),
                "graphs_outside_gib": _gib(memory.graphs_outside),
                "overhead_gib": _gib(memory.overhead),
                "communication_gib": _gib(memory.communication),
                "kv_gib": _gib(memory.kv if memory.caches else 0),
                "unused_gib": _gib(0 if memory.caches else memory.kv),
                "kv_tokens": memory.kv_tokens,
                "kv_bytes_per_token": round(memory.bytes_per_token),
                "kv_gib_per_sequence": _gib(sequence),
                "max_concurrency": round(memory.max_concurrency, 2),
            },
            "args": list(self.argv),
            "env": dict(self.env),
            "pod": {
                "shm_gib": _gib(pod.shm_bytes),
                "memory_gib": _gib(pod.memory_bytes),
                "disk_gib": _gib(pod.disk_bytes),
                "ephemeral_gib": _gib(pod.ephemeral_bytes),
                "startup_seconds": pod.startup_seconds,
                "pre_stop_seconds": pod.pre_stop_seconds,
                "drain_seconds": pod.drain_seconds,
                "grace_seconds": pod.grace_seconds,
            },
            "tiers": [
                {
                    "medium": tier.medium,
                    "gib": _gib(tier.size_bytes),
                    "tokens": tier.tokens,
                    **({} if tier.idle_seconds is None else {"idle_seconds": round(tier.idle_seconds)}),
                }
                for tier in self.tiers
            ],
            "storage": {"namespace": self.storage.name, **self.storage.agreed} if self.storage else {},
            **({"role": self.role, "kv_compatibility": self.kv_compatibility} if self.role else {}),
            **({"prefill": self.prefill.to_dict()} if self.prefill else {}),
            "doubts": list(self.doubts),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "price_per_hour": self.price_per_hour,
            "neighbours": [each.to_dict() for each in self.neighbours],
            "choices": [
                {"field": c.field, "value": c.value, "reason": c.reason, "source": c.source}
                for c in self.choices
            ],
        }


def _gib(number: float) -> float:
    return round(number / GIB, 2)


FIGURES: Final = ("accelerator.", "memory.", "parallelism.", "pod.")
"""Beginnings of names of figures, of which later versions have more."""
_SINGLE: Final = ("verdict", "shortfall_gib", "shortfallGib", "price_per_hour", "pricePerHour")


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact in which two plans differ."""

    field: str
    before: Any
    after: Any


def override(resource: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Return the resource with fields set by assignments such as ``engine.kvCacheDtype=Model``.

    The value is YAML.

    Raises:
        SpecError: an assignment without ``=``, with an invalid value, or to a field of something that is not
            an object.
    """
    changed = copy.deepcopy(dict(resource))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise SpecError(f"--with {assignment}", "write it like engine.kvCacheDtype=Model")
        *parents, last = path.removeprefix("spec.").split(".")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            problem = f"the value is not YAML ({str(error).partition(chr(10))[0]}): quote it"
            raise SpecError(f"--with {assignment}", problem) from error
        target: Any = changed.setdefault("spec", {})
        for key in parents:
            target = target.setdefault(key, {}) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise SpecError(f"--with {path}", "is not a field of the spec")
        target[last] = value
    return changed


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return the facts in which two plans differ, in the order in which a plan is printed.

    Both are as ``to_dict`` gives them, or as ``status.plan`` has them. One of an older version may lack
    figures, which are no differences.
    """
    a, b = _facts(before), _facts(after)
    lacking = {key for key in {*a, *b} - a.keys() & b.keys() if key.startswith(FIGURES)}
    return [
        Difference(key, a.get(key), b.get(key))
        for key in {**a, **b}
        if a.get(key) != b.get(key) and key not in lacking
    ]


def _facts(whole: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: whole[key] for key in _SINGLE if key in whole}
    for section in ("accelerator", "parallelism", "memory", "pod", "env"):
        flat |= {f"{section}.{key}": value for key, value in (whole.get(section) or {}).items()}
    for number, each in enumerate(whole.get("neighbours") or (), 1):
        flat[f"neighbour.{number}"] = each["text"] if isinstance(each, Mapping) else each
    flat |= {f"choice.{each['field']}": each.get("value") for each in whole.get("choices") or ()}
    # each flag with its values; a switch is "on"
    values: dict[str, list[str]] = {}
    flag = "args"
    for word in whole.get("args") or ():
        if word.startswith("--"):
            flag = word
            values[flag] = []
        else:
            values.setdefault(flag, []).append(word)
    flat |= {name: " ".join(words) or "on" for name, words in values.items()}
    if prefill := whole.get("prefill"):
        flat |= {f"prefill.{key}": value for key, value in _facts(prefill).items()}
    return flat
