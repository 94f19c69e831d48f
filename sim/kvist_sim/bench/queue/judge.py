"""Judge fair shares, priorities and deadlines of queued requests. Pure.

*fair share*
    Among the tenants of one level, over the picks from the first one of that level until the first of these
    tenants has no request left: each should have the same number of tokens (of bytes, as all text is alike).
*out of order*
    A pick of a request while one of a higher level was still waiting. All of them waited when there was room
    for the first time, so there is no excuse.
*late*
    A request that the picker's own log says it held for longer than the limit and `SLACK_SECONDS`, or that
    never got an answer.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SHARE_BOUND: Final = 0.10
SLACK_SECONDS: Final = 1.0
"""Tolerance in seconds: refusing thousands of requests at once takes time."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request that was sent."""

    id: str
    priority: int
    tenant: str
    size: int
    """Bytes of its body."""


@dataclass(frozen=True, slots=True)
class Share:
    """Requests that one tenant was served while every tenant of its priority still had requests queued."""

    tenant: str
    sent: int
    """Requests in all."""
    picked: int
    """In the window."""
    of_fair: float
    """1.0 is exactly its share."""


def shares(order: Sequence[Wanted], priority: int) -> list[Share]:
    """By tenant, of one level; ``order`` is that of the picks."""
    level = [wanted for wanted in order if wanted.priority == priority]
    left = Counter(wanted.tenant for wanted in level)
    total = Counter(left)
    picked: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for wanted in level:
        picked[wanted.tenant] += 1
        sizes[wanted.tenant] += wanted.size
        left[wanted.tenant] -= 1
        if not left[wanted.tenant]:
            break
    fair = sum(sizes.values()) / max(1, len(total))
    return [Share(name, total[name], picked[name], sizes[name] / fair) for name in sorted(total)]


def out_of_order(order: Sequence[Wanted]) -> int:
    """Requests that were picked before one of a higher level."""
    found = 0
    highest: int | None = None
    for wanted in reversed(order):
        if highest is not None and wanted.priority < highest:
            found += 1
        highest = wanted.priority if highest is None else max(highest, wanted.priority)
    return found


def late(waits: Sequence[float], limit: float) -> int:
    """Return how many waits (seconds; infinite without an answer) exceed the limit plus the slack."""
    return sum(wait > limit + SLACK_SECONDS for wait in waits)
