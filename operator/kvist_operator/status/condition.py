"""One condition of a pool, and conditions as the status has them. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

Json = dict[str, Any]
MESSAGE: Final = 4096
"""Characters of a message that are kept: an engine's own error may be long."""


class Truth(StrEnum):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, without its time."""

    type: str
    status: Truth
    reason: str
    """Stable name in CamelCase, for programs."""
    message: str
    """Sentence for users: the state, and the remedy."""

    @property
    def holds(self) -> bool:
        return self.status is Truth.TRUE


def written(
    conditions: Iterable[Condition], old: Sequence[Mapping[str, Any]], generation: int, now: datetime
) -> list[Json]:
    """Return these conditions as objects; one whose status is as before keeps its time (RFC 3339 in UTC)."""
    times = {(each.get("type"), each.get("status")): each.get("lastTransitionTime") for each in old}
    timestamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return [
        {
            "type": each.type,
            "status": str(each.status),
            "observedGeneration": generation,
            "lastTransitionTime": times.get((each.type, each.status)) or timestamp,
            "reason": each.reason,
            "message": each.message[:MESSAGE],
        }
        for each in conditions
    ]


TRUE, FALSE, UNKNOWN = Truth.TRUE, Truth.FALSE, Truth.UNKNOWN
