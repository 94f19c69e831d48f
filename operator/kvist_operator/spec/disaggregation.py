"""Fields of ``spec.disaggregation``: prompts and answers are computed by different engines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """The role of an engine in a disaggregated pool: the value of its label ``kvist.dev/role``."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """Fields of ``spec.disaggregation.prefill`` and ``decode``; what is not given is the pool's."""

    replicas: int | None = None
    """None = 1 for prefill, ``spec.replicas`` for decode."""
    external: bool = False
    """An autoscaler sets the replicas of the workload."""
    accelerator: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``AcceleratorSpec`` that the role sets."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``EngineSpec`` that the role sets; ``extra_args`` and ``env`` are added to the pool's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregation:
    """Fields of ``spec.disaggregation``."""

    fluid: bool = True
    """Mode Fluid: every engine may prefill, decode, or both."""
    lease_seconds: int = 30
    """Time for which an engine keeps the blocks of a prompt for another one."""
    prefill: RoleSpec = RoleSpec()
    decode: RoleSpec = RoleSpec()

    def of(self, role: Role) -> RoleSpec:
        """Return the fields of prefill or decode."""
        return self.prefill if role is Role.PREFILL else self.decode
