"""Generate a load of OpenAI requests: open loop at given times, or closed loop at a given concurrency.

An open loop sends at the planned moment however slow the answers are, as users do: a policy that falls
behind shows it in its waiting times. A closed loop measures what a number of clients can get done.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .http1 import Connection, HttpError, request_bytes
from .workloads import Arrival

CHAT_PATH: Final = "/v1/chat/completions"
NO_ANSWER: Final = 0
"""Status of a request without a complete answer."""
OK: Final = 200
_USAGE_TAIL: Final = 4_096
"""Bytes kept of a stream's end; the usage chunk is its last but one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one request; times in seconds."""

    started: float
    """Time of sending, after the load began."""
    ttft: float | None
    """Time to the first data of the answer; None without data."""
    latency: float
    """Time to the end, or until the request was cancelled."""
    status: int
    """HTTP status; NO_ANSWER for a broken or refused connection."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    """Reason for the error; never text of the prompt."""
    finished: bool = True
    """True if the request ended before the load did."""

    @property
    def good(self) -> bool:
        """True for a complete answer with status 200."""
        return self.finished and self.status == OK and not self.error


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run; times in seconds, rates per second."""

    seconds: float
    """Length of the measured window."""
    requests: int
    """Requests that began in the window."""
    errors: int
    unfinished: int
    """Got no whole answer before the run was over; their waiting so far counts in the percentiles."""
    requests_per_second: float
    """Answered, from the beginning of the load to the end of the window: with a window of its own, a backlog
    from before it would add to a slow policy's figure, and one left behind it would take away."""
    output_tokens_per_second: float
    """Output tokens per second of the same answers."""
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    latency_p50: float
    latency_p90: float
    prompt_tokens: int
    cached_tokens: int

    @property
    def cached_share(self) -> float:
        """Share of prompt tokens that came from a cache, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class Progress:
    """Live figures of a run; the load writes, a display reads."""

    outcomes: list[Outcome] = field(default_factory=list)
    sent: int = 0
    running: int = 0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile; 0.0 without values."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summarise(outcomes: Iterable[Outcome], *, begin: float, end: float) -> Summary:
    """Return the figures of the requests begun between two moments (seconds after the load began)."""
    every = list(outcomes)
    begun = [o for o in every if begin <= o.started < end]
    answered = [o for o in every if o.good and o.started + o.latency < end]
    waits = [o.latency if o.ttft is None else o.ttft for o in begun if o.good or not o.finished]
    return Summary(
        seconds=end - begin,
        requests=len(begun),
        errors=sum(o.finished and not o.good for o in begun),
        unfinished=sum(not o.finished for o in begun),
        requests_per_second=len(answered) / end,
        output_tokens_per_second=sum(o.completion_tokens for o in answered) / end,
        ttft_p50=percentile(waits, 0.5),
        ttft_p90=percentile(waits, 0.9),
        ttft_p99=percentile(waits, 0.99),
        latency_p50=percentile([o.latency for o in begun if o.good], 0.5),
        latency_p90=percentile([o.latency for o in begun if o.good], 0.9),
        prompt_tokens=sum(o.prompt_tokens for o in begun),
        cached_tokens=sum(o.cached_tokens for o in begun),
    )


class Target:
    """A server and its idle connections."""

    def __init__(self, host: str, port: int, path: str = CHAT_PATH) -> None:
        """Use ``path`` for all bodies."""
        self._host, self._port, self._path = host, port, path
        self._idle: list[Connection] = []

    async def post(self, body: bytes, on_data: Callable[[bytes], None]) -> int:
        """Send one body; return the status when the answer has ended. Raises OSError or HttpError."""
        connection = await self._take()
        request = request_bytes("POST", self._path, f"{self._host}:{self._port}", body)
        head = await connection.exchange(request, on_data)
        self._idle.append(connection)
        return head.status

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return await Connection.open(self._host, self._port)


async def open_loop(
    target: Target,
    plan: Iterable[Arrival],
    *,
    seconds: float,
    drain_seconds: float,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Send the requests of the plan for ``seconds``, then wait up to ``drain_seconds`` for the rest."""
    clock = asyncio.get_running_loop().time
    zero = clock()
    progress = progress or Progress()
    tasks: set[asyncio.Task[None]] = set()
    try:
        async for arrival in _on_time(plan, seconds, zero):
            task = asyncio.create_task(_one(target, arrival.body, zero, progress))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks, timeout=drain_seconds)
    finally:
        await _cancel(tasks)
    return progress.outcomes


async def closed_loop(
    target: Target,
    bodies: Iterator[bytes],
    *,
    concurrency: int,
    seconds: float,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Run ``concurrency`` clients, each sending its next request when its last one has ended."""
    clock = asyncio.get_running_loop().time
    zero = clock()
    progress = progress or Progress()

    async def client() -> None:
        while clock() < zero + seconds and (body := next(bodies, None)) is not None:
            await _one(target, body, zero, progress)

    tasks = {asyncio.create_task(client()) for _ in range(concurrency)}
    try:
        await asyncio.wait(tasks, timeout=seconds)
    finally:
        await _cancel(tasks)
    return progress.outcomes


async def _on_time(plan: Iterable[Arrival], seconds: float, zero: float) -> AsyncIterator[Arrival]:
    clock = asyncio.get_running_loop().time
    for arrival in plan:
        if arrival.at >= seconds:
            break
        await asyncio.sleep(max(0.0, zero + arrival.at - clock()))
        yield arrival


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    """Give up what still runs; each writes its outcome as unfinished."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _one(target: Target, body: bytes, zero: float, progress: Progress) -> None:
    """Send one request and note how it went, also when it is cancelled."""
    clock = asyncio.get_running_loop().time
    answer = _Answer(clock)
    status, error, finished = NO_ANSWER, "", False
    began = clock()
    progress.sent += 1
    progress.running += 1
    try:
        status = await target.post(body, answer.data)
        finished = True
    except (OSError, HttpError) as failure:
        finished, error = True, f"{type(failure).__name__}: {failure}"
    finally:
        progress.running -= 1
        if finished and not error:
            error = "" if status == OK else f"HTTP {status}"
        ttft = None if answer.first is None else answer.first - began
        usage = answer.usage() if status == OK else (0, 0, 0)
        progress.outcomes.append(
            Outcome(began - zero, ttft, clock() - began, status, *usage, error=error, finished=finished)
        )


class _Answer:
    """State of an answer while it streams: the time of its first byte, and its end."""

    __slots__ = ("_clock", "_tail", "first")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tail = b""
        self.first: float | None = None

    def data(self, data: bytes) -> None:
        if self.first is None:
            self.first = self._clock()
        self._tail = (self._tail + data)[-_USAGE_TAIL:]

    def usage(self) -> tuple[int, int, int]:
        """Return prompt, cached and completion tokens; zeros without a usage."""
        at = self._tail.rfind(b'"usage":')
        if at < 0:
            return 0, 0, 0
        try:
            found, _ = json.JSONDecoder().raw_decode(self._tail[at + 8 :].decode("utf-8", "replace").lstrip())
        except json.JSONDecodeError:
            return 0, 0, 0
        return _tokens(found) if isinstance(found, dict) else (0, 0, 0)


def _tokens(usage: dict[str, Any]) -> tuple[int, int, int]:
    details = usage.get("prompt_tokens_details") or {}
    return (
        int(usage.get("prompt_tokens") or 0),
        int(details.get("cached_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
    )
