"""What pickers say of the engines' caches (``GET /fleet``, docs/guides/fleet.md), put together over replicas.
Pure.

Each picker counts its own requests, so what caches saved adds up over pickers. What engines and their events
tell is the same for all of them: there the report that has watched longest counts.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from kvist_operator.errors import FleetError
from kvist_operator.status.advice import Figures

VERSION: Final = 1
MOST_COST: Final = (1 << 31) - 1
"""The annotation is an int32; the pod with the lowest goes first (Kubernetes: pod deletion cost)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One endpoint, as one picker sees it."""

    pod: str
    endpoint: str
    """``ip:port``: a pod may have several."""
    ready: bool = False
    worth_tokens: int = 0
    """Tokens of prefill that blocks which only it holds saved in the last ten minutes."""
    exclusive_blocks: int = 0
    kv_tokens: int | None = None
    """Size of its cache; None = it has not said."""
    kv_usage: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    counted_seconds: float = 0.0
    """How long the next four were counted."""
    requests: float = 0.0
    preemptions: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One picker's page."""

    replica: str
    engines: tuple[Engine, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """All pickers' pages together: engines by endpoint."""

    engines: Mapping[str, Engine] = field(default_factory=dict)
    pickers: int = 0
    """That have answered."""


def report(body: bytes) -> Report:
    """A page. Raises FleetError naming what is wrong with it."""
    try:
        page = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FleetError(f"it is no JSON ({type(error).__name__})") from None
    version = _count(page, "version")
    if version != VERSION:
        raise FleetError(f"it is of version {version}, {VERSION} is known here")
    engines = tuple(_engine(each) for each in _typed(page, "endpoints", list))
    return Report(replica=_typed(page, "replica", str), engines=engines)


def _engine(raw: Any) -> Engine:
    counted = _typed(raw, "counted", dict)
    return Engine(
        pod=_typed(raw, "pod", str),
        endpoint=_typed(raw, "endpoint", str),
        ready=_typed(raw, "ready", bool),
        worth_tokens=_count(raw, "worth_tokens"),
        exclusive_blocks=_count(raw, "exclusive_blocks"),
        kv_tokens=None if raw.get("kv_tokens") is None else _count(raw, "kv_tokens"),
        kv_usage=_number(raw, "kv_usage"),
        running=_number(raw, "running"),
        waiting=_number(raw, "waiting"),
        counted_seconds=_number(counted, "seconds"),
        requests=_number(counted, "requests"),
        preemptions=_number(counted, "preemptions"),
        prompt_tokens=_number(counted, "queries"),
        cached_tokens=_number(counted, "hits"),
    )


def _typed(raw: Any, name: str, kind: type[T]) -> T:
    value = raw.get(name) if isinstance(raw, dict) else None
    if not isinstance(value, kind):
        raise FleetError(f"{name} is no {kind.__name__}")
    return value


def _number(raw: Any, name: str) -> float:
    """Finite, zero or above."""
    value = raw.get(name) if isinstance(raw, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise FleetError(f"{name} is no number from zero on")
    return float(value)


def _count(raw: Any, name: str) -> int:
    value = _number(raw, name)
    if not value.is_integer():
        raise FleetError(f"{name} is no whole number")
    return int(value)


def merged(reports: Iterable[Report]) -> Merged:
    """All of them, in whatever order they come."""
    found = list(reports)
    by_endpoint: dict[str, list[Engine]] = {}
    for each in found:
        for engine in each.engines:
            by_endpoint.setdefault(engine.endpoint, []).append(engine)
    return Merged({at: _joined(seen) for at, seen in sorted(by_endpoint.items())}, len(found))


def _joined(seen: Iterable[Engine]) -> Engine:
    """One endpoint in the eyes of several pickers."""
    known = sorted(seen, key=lambda each: each.counted_seconds)
    return replace(
        known[-1],
        ready=any(each.ready for each in known),
        worth_tokens=sum(each.worth_tokens for each in known),
        exclusive_blocks=max(each.exclusive_blocks for each in known),
    )


def deletion_costs(found: Merged, pods: Iterable[str]) -> dict[str, int]:
    """What ``controller.kubernetes.io/pod-deletion-cost`` is to be for each of these pods.

    Tokens saved, shrunk together where they do not fit. Where no cache has saved anything, because pickers or
    traffic have just begun, blocks that only one pod holds take their place. A pod that no picker knows gets
    no requests from them: it is worth 0, which is also what Kubernetes takes where there is no annotation. If
    no picker answered nothing is known, and nothing is said.
    """
    if not found.pickers:
        return {}
    names = list(pods)
    saved = _by_pod(found, names, lambda engine: engine.worth_tokens)
    worth = saved if any(saved.values()) else _by_pod(found, names, lambda engine: engine.exclusive_blocks)
    most = max(worth.values(), default=0)
    return worth if most <= MOST_COST else {pod: cost * MOST_COST // most for pod, cost in worth.items()}


def _by_pod(found: Merged, pods: Iterable[str], what: Callable[[Engine], int]) -> dict[str, int]:
    """Added up over the ports of a pod."""
    sums = dict.fromkeys(pods, 0)
    for engine in found.engines.values():
        if engine.pod in sums:
            sums[engine.pod] += what(engine)
    return sums


def kv_tokens(found: Merged) -> int | None:
    """Tokens of a replica's cache: the least that a ready pod reports, all its ports together."""
    sizes: dict[str, int] = {}
    for engine in found.engines.values():
        if engine.ready and engine.kv_tokens is not None:
            sizes[engine.pod] = sizes.get(engine.pod, 0) + engine.kv_tokens
    return min(sizes.values(), default=None)


def figures(found: Merged) -> Figures:
    """What advice is made from; of engines that are ready."""
    ready = [engine for engine in found.engines.values() if engine.ready]
    engines = max(1, len(ready))
    return Figures(
        requests=sum(engine.requests for engine in ready),
        preemptions=sum(engine.preemptions for engine in ready),
        prompt_tokens=sum(engine.prompt_tokens for engine in ready),
        cached_tokens=sum(engine.cached_tokens for engine in ready),
        running=sum(engine.running for engine in ready) / engines,
        waiting=sum(engine.waiting for engine in ready) / engines,
        kv_usage=sum(engine.kv_usage for engine in ready) / engines,
        kv_tokens=kv_tokens(found),
    )
