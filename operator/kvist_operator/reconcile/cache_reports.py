"""Parses what pickers report of the engines' caches (``GET /fleet``, docs/guides/fleet.md) and merges it.
Pure.

Each picker counts its own requests, so the tokens that caches saved are added up over pickers. Figures of the
engines and their events are the same for all pickers; the report with the longest window counts.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from kvist_operator.errors import FleetError
from kvist_operator.spec.disaggregation import Role
from kvist_operator.status.advice import Figures

VERSION: Final = 1
MOST_COST: Final = (1 << 31) - 1
"""The annotation is an int32; the pod with the lowest cost is deleted first (Kubernetes: pod deletion
cost)."""
ASKED_SECONDS: Final = 120.0
"""Least time after which a gateway without a pick is taken for one that does not ask."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One endpoint, as one picker reports it."""

    pod: str
    endpoint: str
    """``ip:port``; a pod may have several."""
    role: str = ""
    """``prefill``, ``decode`` or ``both``; empty in reports of older pickers."""
    ready: bool = False
    worth_tokens: int = 0
    """Tokens of prefill saved in the last ten minutes by blocks that only this endpoint has."""
    exclusive_blocks: int = 0
    kv_tokens: int | None = None
    """Size of the KV cache in tokens; None when not reported."""
    kv_usage: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    counted_seconds: float = 0.0
    """Window of the next four counters."""
    requests: float = 0.0
    preemptions: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """Counts of one picker, or of all, of what gateways asked in the last half hour."""

    seconds: float
    """Time that the counts cover."""
    picked: int
    """Requests for which an endpoint was picked."""
    tls_refusals: int
    """TLS handshakes that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """The answer of one picker."""

    replica: str
    engines: tuple[EngineReport, ...]
    gateway: GatewayReport | None = None
    """None in reports of older pickers."""


@dataclass(frozen=True, slots=True)
class MergedReport:
    """Answers of all pickers, merged by endpoint."""

    engines: Mapping[str, EngineReport] = field(default_factory=dict)
    pickers: int = 0
    """Number of pickers that answered."""
    gateway: GatewayReport | None = None
    """Sums over all pickers; None while any of them has not reported it."""


def parse_report(body: bytes) -> CacheReport:
    """Parse the body of an answer. Raises FleetError that names the problem."""
    try:
        page = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FleetError(f"the answer is not JSON ({type(error).__name__})") from None
    return read_report(page)


def read_report(page: Any) -> CacheReport:
    """Read the JSON document of an answer. Raises FleetError that names the problem."""
    version = _count(page, "version")
    if version != VERSION:
        raise FleetError(f"the answer has version {version}; this operator supports version {VERSION}")
    engines = tuple(_engine(each) for each in _typed(page, "endpoints", list))
    gateway = _gateway(page["gateway"]) if page.get("gateway") is not None else None
    return CacheReport(replica=_typed(page, "replica", str), engines=engines, gateway=gateway)


def _gateway(raw: Any) -> GatewayReport:
    return GatewayReport(
        seconds=_number(raw, "seconds"),
        picked=_count(raw, "picked"),
        tls_refusals=_count(raw, "tls_refusals"),
    )


def _engine(raw: Any) -> EngineReport:
    counted = _typed(raw, "counted", dict)
    return EngineReport(
        pod=_typed(raw, "pod", str),
        endpoint=_typed(raw, "endpoint", str),
        role=str(raw.get("role") or ""),
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
        raise FleetError(f"{name} is not a {kind.__name__}")
    return value


def _number(raw: Any, name: str) -> float:
    value = raw.get(name) if isinstance(raw, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise FleetError(f"{name} is not a number of at least 0")
    return float(value)


def _count(raw: Any, name: str) -> int:
    value = _number(raw, name)
    if not value.is_integer():
        raise FleetError(f"{name} is not a whole number")
    return int(value)


def merge_reports(reports: Iterable[CacheReport], silent: int = 0) -> MergedReport:
    """Merge answers, in any order; ``silent`` pickers gave none."""
    found = list(reports)
    by_endpoint: dict[str, list[EngineReport]] = {}
    for each in found:
        for engine in each.engines:
            by_endpoint.setdefault(engine.endpoint, []).append(engine)
    engines = {at: _joined(seen) for at, seen in sorted(by_endpoint.items())}
    return MergedReport(engines, len(found), None if silent else _all_gateways(found))


def _all_gateways(found: Iterable[CacheReport]) -> GatewayReport | None:
    known = [each.gateway for each in found]
    reports = [each for each in known if each is not None]
    if not reports or len(reports) < len(known):
        return None
    return GatewayReport(
        seconds=min(each.seconds for each in reports),
        picked=sum(each.picked for each in reports),
        tls_refusals=sum(each.tls_refusals for each in reports),
    )


def _joined(seen: Iterable[EngineReport]) -> EngineReport:
    """Merge what several pickers report of one endpoint."""
    known = sorted(seen, key=lambda each: each.counted_seconds)
    return replace(
        known[-1],
        ready=any(each.ready for each in known),
        worth_tokens=sum(each.worth_tokens for each in known),
        exclusive_blocks=max(each.exclusive_blocks for each in known),
    )


def deletion_costs(found: MergedReport, pods: Iterable[str]) -> dict[str, int]:
    """Return ``controller.kubernetes.io/pod-deletion-cost`` for each of these pods; empty when no picker
    answered.

    The cost is the number of tokens saved, scaled down together where one does not fit. Where no cache has
    saved anything, because pickers or traffic have just started, it is the number of blocks that only this
    pod has. A pod that no picker knows receives no requests: its cost is 0, which is also Kubernetes'
    default.
    """
    if not found.pickers:
        return {}
    names = list(pods)
    saved = _by_pod(found, names, lambda engine: engine.worth_tokens)
    costs = saved if any(saved.values()) else _by_pod(found, names, lambda engine: engine.exclusive_blocks)
    most = max(costs.values(), default=0)
    return costs if most <= MOST_COST else {pod: cost * MOST_COST // most for pod, cost in costs.items()}


def _by_pod(found: MergedReport, pods: Iterable[str], what: Callable[[EngineReport], int]) -> dict[str, int]:
    """Return sums over the ports of each pod."""
    sums = dict.fromkeys(pods, 0)
    for engine in found.engines.values():
        if engine.pod in sums:
            sums[engine.pod] += what(engine)
    return sums


def kv_tokens(found: MergedReport) -> int | None:
    """Return the tokens of a replica's KV cache: the least that a ready pod reports, over all its ports.
    Engines that only prefill have a cache of another size, and do not count."""
    sizes: dict[str, int] = {}
    for engine in found.engines.values():
        if engine.ready and engine.kv_tokens is not None and engine.role != Role.PREFILL:
            sizes[engine.pod] = sizes.get(engine.pod, 0) + engine.kv_tokens
    return min(sizes.values(), default=None)


def figures(found: MergedReport, *, prefill: bool = False) -> Figures:
    """Return the figures for advice, over engines that are ready: those that only prefill, or all others."""
    ready = [
        engine
        for engine in found.engines.values()
        if engine.ready and (engine.role == Role.PREFILL) == prefill
    ]
    engines, gateway = max(1, len(ready)), found.gateway or GatewayReport(0.0, 0, 0)
    # picks have to cover the requests that engines ended: those of a picker that restarted are lost
    counted = max((engine.counted_seconds for engine in ready), default=0.0)
    covered = gateway.seconds >= max(ASKED_SECONDS, counted)
    return Figures(
        requests=sum(engine.requests for engine in ready),
        preemptions=sum(engine.preemptions for engine in ready),
        prompt_tokens=sum(engine.prompt_tokens for engine in ready),
        cached_tokens=sum(engine.cached_tokens for engine in ready),
        running=sum(engine.running for engine in ready) / engines,
        waiting=sum(engine.waiting for engine in ready) / engines,
        kv_usage=sum(engine.kv_usage for engine in ready) / engines,
        kv_tokens=kv_tokens(found),
        picked=gateway.picked if covered else None,
        tls_refusals=gateway.tls_refusals,
    )
