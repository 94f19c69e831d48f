"""Asks a pool's pickers how much prefill the engines' KV caches have saved.

They are polled periodically for the status, and before replicas are lowered for the order in which pods are
deleted. Each picker is asked by the address of its pod; one that does not answer does not affect the others.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from kvist_operator.cluster.cluster_api import Json
from kvist_operator.cluster.kinds import Target, target_of
from kvist_operator.cluster.pool_cache import PoolCache, PoolKey
from kvist_operator.errors import ClusterError, FleetError
from kvist_operator.manifests.object_names import ENGINE, METRICS_PORT, PICKER
from kvist_operator.plan import Plan
from kvist_operator.spec.pool import COMPONENT, Pool
from kvist_operator.status.advice import Figures, advice, standing

from .cache_reports import (
    CacheReport,
    MergedReport,
    deletion_costs,
    figures,
    kv_tokens,
    merge_reports,
    parse_report,
)

logger = logging.getLogger(__name__)

COST: Final = "controller.kubernetes.io/pod-deletion-cost"
TIMEOUT_SECONDS: Final = 5.0
"""Time limit of one picker's answer, and so of the delay before replicas are lowered."""
MAX_PAGE_BYTES: Final = 8 << 20
"""A thousand endpoints take less than 1 MiB."""
PARALLEL_POOLS: Final = 32
"""Pools whose pickers are asked at the same time."""


Annotate = Callable[[Target, Mapping[str, str | None]], Awaitable[None]]
"""``Cluster.annotate``."""


@dataclass(slots=True)
class PickerClient:
    """Polls the pickers of all pools; used with ``async with``. ``on_change`` is called with pools whose
    figures have changed."""

    annotate: Annotate
    cache: PoolCache
    on_change: Callable[[PoolKey], None]
    port: int = METRICS_PORT
    _known: dict[PoolKey, MergedReport] = field(default_factory=dict)
    _semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL_POOLS))
    _session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "PickerClient":
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def run(self, interval: float) -> None:
        """Poll now and every ``interval`` seconds, until cancelled; 0 means never."""
        while interval > 0:
            await self.poll()
            await asyncio.sleep(interval)

    async def poll(self) -> None:
        """Poll the pickers of every pool; pools without an answer keep their last figures."""
        keys = self.cache.pools()
        for gone in self._known.keys() - set(keys):
            del self._known[gone]
        await asyncio.gather(*(self._poll_pool(key) for key in keys))

    async def _poll_pool(self, key: PoolKey) -> None:
        async with self._semaphore:
            found = await self._ask(key, self.cache.pods(key))
        if not found.pickers:
            return
        before, self._known[key] = self._known.get(key), found
        if before is None or _shown(before) != _shown(found):
            self.on_change(key)

    async def set_deletion_costs(self, pool: Pool, pods: list[Json], replicas: int) -> None:
        """Set each engine's deletion cost by what its cache has saved, before replicas are lowered to this
        number. Where it cannot be determined or written, replicas are lowered all the same, in Kubernetes'
        order."""
        leaving = {str(pod["metadata"]["name"]): pod for pod in pods if _has_deletion_cost(pod)}
        if not 0 < replicas < len(leaving):
            return
        found = await self._ask(PoolKey(pool.namespace, pool.name), pods)
        costs = deletion_costs(found, leaving)
        await asyncio.gather(*(self._annotate(leaving[name], cost) for name, cost in costs.items()))

    async def _annotate(self, pod: Json, cost: int) -> None:
        if (pod["metadata"].get("annotations") or {}).get(COST) == str(cost):
            return
        try:
            await self.annotate(target_of(pod), {COST: str(cost)})
        except ClusterError as error:
            meta = pod["metadata"]
            logger.warning(
                "%s/%s: cannot set the pod deletion cost: %s", meta["namespace"], meta["name"], error
            )

    async def _ask(self, key: PoolKey, pods: Iterable[Json]) -> MergedReport:
        urls = {str(pod["metadata"]["name"]): url for pod in pods if (url := fleet_url(pod, self.port))}
        if self._session is None:
            raise RuntimeError("PickerClient must be used with `async with`")
        reports, problems = await ask_all(self._session, urls)
        for name, problem in problems.items():
            logger.info("%s: picker %s did not report its engines' caches: %s", key, name, problem)
        return merge_reports(reports, len(problems))

    def kv_tokens(self, key: PoolKey) -> int | None:
        """Return the size of a replica's KV cache in tokens, as engines report it; None when not known."""
        return kv_tokens(self._known.get(key, MergedReport()))

    def advice(self, key: PoolKey, pool: Pool, plan: Plan, before: list[str]) -> tuple[str, ...]:
        """Return advice by the latest figures, or the advice of before while there are none."""
        if key not in self._known:
            return standing(before)
        found = self._known[key]
        prefill = figures(found, prefill=True) if plan.prefill else None
        return advice(pool, plan, figures(found), before, prefill=prefill)


def _shown(found: MergedReport) -> tuple[Figures, Figures]:
    return figures(found), figures(found, prefill=True)


async def ask_all(
    session: aiohttp.ClientSession, urls: Mapping[str, str]
) -> tuple[list[CacheReport], dict[str, FleetError]]:
    """Return the reports that arrived, and why others did not, by name of the picker."""
    answers = await asyncio.gather(*(_asked(session, url) for url in urls.values()))
    named = dict(zip(urls, answers, strict=True))
    problems = {name: answer for name, answer in named.items() if isinstance(answer, FleetError)}
    return [answer for answer in answers if isinstance(answer, CacheReport)], problems


async def _asked(session: aiohttp.ClientSession, url: str) -> CacheReport | FleetError:
    try:
        return await ask(session, url)
    except FleetError as error:
        return error


async def ask(session: aiohttp.ClientSession, url: str) -> CacheReport:
    """Return one picker's report. Raises FleetError when it is absent, late, too large or invalid."""
    try:
        async with session.get(url, allow_redirects=False) as response:
            return parse_report(await _body(response))
    except FleetError as error:
        raise FleetError(f"{url}: {error}") from None
    except TimeoutError:
        raise FleetError(f"{url}: no answer in time") from None
    except (aiohttp.ClientError, OSError) as error:
        raise FleetError(f"{url}: {type(error).__name__}: {error}") from error


async def _body(response: aiohttp.ClientResponse) -> bytes:
    if response.status != 200:
        raise FleetError(f"the picker answered {response.status}")
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_PAGE_BYTES:
            raise FleetError(f"the page is larger than {MAX_PAGE_BYTES} bytes")
    return bytes(body)


def fleet_url(pod: Mapping[str, Any], port: int = METRICS_PORT) -> str:
    """Return the URL of a picker's ``/fleet``; empty for pods that are not running pickers."""
    meta, status = pod["metadata"], pod.get("status") or {}
    address = status.get("podIP") or ""
    if (meta.get("labels") or {}).get(COMPONENT) != PICKER or not address or "deletionTimestamp" in meta:
        return ""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}/fleet" if status.get("phase") == "Running" else ""


def _has_deletion_cost(pod: Mapping[str, Any]) -> bool:
    """Return whether the deletion cost matters: for ready engines of a ReplicaSet. Kubernetes deletes pods
    that are not ready first, and LeaderWorkerSets delete by number."""
    meta = pod["metadata"]
    owners = {each.get("kind") for each in meta.get("ownerReferences") or () if each.get("controller")}
    conditions = (pod.get("status") or {}).get("conditions") or ()
    ready = any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
    engine = (meta.get("labels") or {}).get(COMPONENT) == ENGINE
    return engine and ready and "ReplicaSet" in owners and "deletionTimestamp" not in meta
