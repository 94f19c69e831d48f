"""Judge fair shares, priorities, deadlines and reaction times of queued requests. Pure.

*fair share*
    Among the tenants of one level, over the picks from the first one of that level until the first of these
    tenants has no request left: each should have the same number of tokens (of bytes, as all text is alike).
*out of order*
    A pick of a request while one of a higher level was still waiting. All of them waited when there was
    capacity for the first time, so there is no excuse.
*late*
    A request that the picker's own log says it held for longer than the limit and `SLACK_SECONDS`, or that
    never got an answer.
*relieved*
    Time from the end of a request until a queued request is dispatched: from the access log's entry on its
    way to the picker until the pick is with the client, both on the client's clock. Reading, choosing and
    writing are in it, and the client's own share.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvist_sim.bench.harness.direct import Direct, PickAnswer
from kvist_sim.load import percentile

SAMPLES: Final = 500
PAUSE_SECONDS: Final = 0.005
PATIENCE_SECONDS: Final = 0.1
"""Seconds without a dispatch after which an end counts as absorbed: its engine had more than it takes."""
BOUND_SECONDS: Final = 0.010


@dataclass(frozen=True, slots=True)
class Relieved:
    """Times in seconds."""

    waiting: int
    """Number of queued requests at the start."""
    seconds: Sequence[float]
    absorbed: int
    """Number of ends that led to no dispatch."""

    @property
    def p50(self) -> float:
        """Return the median."""
        return percentile(self.seconds, 0.5)

    @property
    def p99(self) -> float:
        """Return the 99th percentile, to which the bound applies."""
        return percentile(self.seconds, 0.99)

    def broken(self) -> list[str]:
        """Bounds that do not hold, in words."""
        if not self.seconds:
            return ["no end made room"]
        over = self.p99 > BOUND_SECONDS
        return [f"p99 {self.p99 * 1e3:.1f} of {BOUND_SECONDS * 1e3:g} ms after the end that made room"] * over


@dataclass(slots=True)
class Ends:
    """Picks whose requests have not ended."""

    clock: Callable[[], float]
    open: deque[PickAnswer] = field(default_factory=deque)
    seen: asyncio.Event = field(default_factory=asyncio.Event)
    at: float = 0.0
    """Time of the latest dispatch."""

    def picked(self, answer: PickAnswer) -> None:
        """Add a request that was picked just now."""
        self.at = self.clock()
        self.open.append(answer)
        self.seen.set()

    async def taken(self, count: int) -> None:
        """Wait for ``count`` picks."""
        while len(self.open) < count:
            self.seen.clear()
            await self.seen.wait()

    async def relief(self, log: Direct) -> float | None:
        """End the oldest request; return seconds until the next pick, or None without one."""
        self.seen.clear()
        begin = self.clock()
        log.ended([self.open.popleft()])
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self.seen.wait()
        except TimeoutError:
            return None
        return self.at - begin


async def relieved(ends: Ends, log: Direct, waiting: int) -> Relieved:
    """End one request after the other."""
    found: list[float] = []
    absorbed = 0
    for _ in range(SAMPLES):
        seconds = await ends.relief(log)
        if seconds is None:
            absorbed += 1
        else:
            found.append(seconds)
        await asyncio.sleep(PAUSE_SECONDS)
    return Relieved(waiting, found, absorbed)


SHARE_BOUND: Final = 0.10
SLACK_SECONDS: Final = 1.0
"""Tolerance in seconds: refusing thousands of requests at once takes time."""


@dataclass(frozen=True, slots=True)
class WantedRequest:
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


def shares(order: Sequence[WantedRequest], priority: int) -> list[Share]:
    """Return the share of each tenant of one level; ``order`` is that of the picks."""
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


def out_of_order(order: Sequence[WantedRequest]) -> int:
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
