"""What a plan is: frozen, and the same facts as JSON."""

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvist_operator.hardware import Accelerator
from kvist_operator.memory.layout import GIB, EngineSettings, Layout
from kvist_operator.memory.memory_budget import Memory


class PlanVerdict(StrEnum):
    """``refused`` is the only one with exit code 3."""

    FITS = "fits"
    UNVERIFIED = "unverified"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision: what, why, and whose word it rests on."""

    field: str
    value: Any
    reason: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Accelerators there are for one replica."""

    accelerator: Accelerator
    per_node: int
    count: int | None = None
    """Exactly so many, where the user says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNeeds:
    """Resources of one replica's pods besides accelerators, for each node."""

    shm_bytes: int
    memory_bytes: int
    startup_seconds: int
    pre_stop_seconds: int
    drain_seconds: int
    grace_seconds: int
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arguments and resources of a pool's engines, each with its reason."""

    verdict: PlanVerdict
    shortfall_bytes: float
    """What the fullest GPU lacks, when refused."""
    nearest: str
    """The nearest thing that would fit, when refused."""
    hardware: Hardware
    layout: Layout
    settings: EngineSettings
    memory: Memory
    model: str
    """One line about the model."""
    argv: tuple[str, ...]
    """The whole command after ``vllm``; empty when refused."""
    env: dict[str, str]
    needs: PodNeeds
    choices: tuple[Choice, ...]
    doubts: tuple[str, ...]
    """Why the plan is unverified."""

    @property
    def nodes(self) -> int:
        """Nodes one replica spans."""
        return -(-self.layout.gpus // self.hardware.per_node)

    @property
    def hash(self) -> str:
        """Changes when what runs changes; reasons do not count."""
        facts = {k: v for k, v in self.to_dict().items() if k in ("accelerator", "args", "env", "pod")}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """``kvist plan -o json`` and ``status.plan``: memory per GPU, tokens and concurrency per replica."""
        return {
            "verdict": str(self.verdict),
            "shortfall_gib": gib(self.shortfall_bytes),
            "nearest": self.nearest,
            "model": self.model,
            "accelerator": self._accelerator(),
            "parallelism": {
                "tensor": self.layout.tensor,
                "pipeline": self.layout.pipeline,
                "data": self.layout.data,
                "expert": self.layout.expert_size,
            },
            "memory": self._memory(),
            "args": list(self.argv),
            "env": dict(self.env),
            "pod": self._pod(),
            "doubts": list(self.doubts),
            "choices": [
                {"field": c.field, "value": c.value, "reason": c.reason, "source": c.source}
                for c in self.choices
            ],
        }

    def _accelerator(self) -> dict[str, Any]:
        row = self.hardware.accelerator
        return {
            "product": row.product,
            "name": row.name,
            "resource": row.resource,
            "per_replica": self.layout.gpus,
            "per_node": min(self.layout.gpus, self.hardware.per_node),
            "nodes": self.nodes,
        }

    def _memory(self) -> dict[str, Any]:
        m = self.memory
        return {
            "per_gpu_gib": gib(m.total),
            "usable_gib": gib(m.usable),
            "weights_gib": gib(m.weights),
            "activations_gib": gib(m.activations + m.encoder),
            "graphs_gib": gib(m.graphs),
            "overhead_gib": gib(m.overhead),
            "kv_gib": gib(m.kv),
            "kv_tokens": m.kv_tokens,
            "kv_bytes_per_token": round(m.bytes_per_token),
            "kv_gib_per_sequence": gib(self._sequence_bytes()),
            "max_concurrency": round(m.max_concurrency, 2),
        }

    def _sequence_bytes(self) -> float:
        """Cache of one sequence of ``max_len`` on all GPUs that hold a part of it."""
        stages = sum(cache.request_bytes(self.settings.max_len) for cache in self.memory.stages)
        return stages * self.layout.tensor

    def _pod(self) -> dict[str, Any]:
        n = self.needs
        return {
            "shm_gib": gib(n.shm_bytes),
            "memory_gib": gib(n.memory_bytes),
            "disk_gib": gib(n.disk_bytes),
            "startup_seconds": n.startup_seconds,
            "pre_stop_seconds": n.pre_stop_seconds,
            "drain_seconds": n.drain_seconds,
            "grace_seconds": n.grace_seconds,
        }


def gib(number: float) -> float:
    """GiB with two decimals."""
    return round(number / GIB, 2)
