"""Conditions as the API conventions want them: a time that changes only with the status. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

Json = dict[str, Any]
MESSAGE: Final = 4096
"""Characters of a message that are kept: an engine's own words may be many."""


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
    """CamelCase, stable: for machines."""
    message: str
    """For people: what is, and what to do."""

    @property
    def holds(self) -> bool:
        return self.status is Truth.TRUE


def written(
    conditions: Iterable[Condition], old: Sequence[Mapping[str, Any]], generation: int, now: datetime
) -> list[Json]:
    """In the order given; one that is not given any more is gone."""
    before = {each.get("type"): each for each in old}
    return [_written(each, before.get(each.type), generation, now) for each in conditions]


def _written(condition: Condition, old: Mapping[str, Any] | None, generation: int, now: datetime) -> Json:
    kept = old.get("lastTransitionTime") if old and old.get("status") == condition.status else None
    return {
        "type": condition.type,
        "status": str(condition.status),
        "observedGeneration": generation,
        "lastTransitionTime": kept or timestamp(now),
        "reason": condition.reason,
        "message": condition.message[:MESSAGE],
    }


def timestamp(now: datetime) -> str:
    """RFC 3339 in UTC, whole seconds."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
