"""Asks the pickers of a pool what the engines' caches are worth: now and then for the status, and just before
replicas are lowered for the order in which pods go.

Pickers are asked by the address of their pods, each for itself: one that does not answer spoils nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import aiohttp

from kvist_operator.cluster.kinds import Target, target_of
from kvist_operator.cluster.port import Json
from kvist_operator.cluster.store import PoolKey, Store
from kvist_operator.errors import ClusterError, FleetError
from kvist_operator.manifests.names import COMPONENT, ENGINE, METRICS_PORT, PICKER
from kvist_operator.plan import Plan
from kvist_operator.spec.pool import Pool
from kvist_operator.status.advice import advice, standing

from .reports import Merged, Report, deletion_costs, figures, kv_tokens, merged, report

logger = logging.getLogger(__name__)

COST: Final = "controller.kubernetes.io/pod-deletion-cost"
TIMEOUT_SECONDS: Final = 5.0
"""For one picker's answer; lowering replicas waits for no longer."""
MAX_PAGE_BYTES: Final = 8 << 20
"""A thousand endpoints take less than one."""
AT_ONCE: Final = 32
"""Pools whose pickers are asked at the same time."""


class Annotates(Protocol):
    """What is needed of the ``Cluster``."""

    async def annotate(self, target: Target, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of an object. Raises ClusterError."""


@dataclass(slots=True)
class Pickers:
    """Of all pools. ``async with``; ``changed`` is told of a pool of which something else is known now."""

    cluster: Annotates
    store: Store
    changed: Callable[[PoolKey], None]
    port: int = METRICS_PORT
    _known: dict[PoolKey, Merged] = field(default_factory=dict)
    _gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    _session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Pickers":
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def run(self, interval: float) -> None:
        """Ask now and every ``interval`` seconds, until cancelled; 0: never."""
        while interval > 0:
            await self.look()
            await asyncio.sleep(interval)

    async def look(self) -> None:
        """Ask the pickers of every pool; those that do not answer leave what was known as it is."""
        keys = self.store.pools()
        for gone in self._known.keys() - set(keys):
            del self._known[gone]
        await asyncio.gather(*(self._look(key) for key in keys))

    async def _look(self, key: PoolKey) -> None:
        async with self._gate:
            found = await self._ask(key, self.store.pods(key))
        if not found.pickers:
            return
        before, self._known[key] = self._known.get(key), found
        if before is None or figures(before) != figures(found):
            self.changed(key)

    async def price(self, pool: Pool, pods: list[Json], replicas: int) -> None:
        """Say what each engine's cache is worth, by its deletion cost, before replicas are lowered to this
        number. Where that cannot be had or written they are lowered all the same, in Kubernetes' order."""
        leaving = {str(pod["metadata"]["name"]): pod for pod in pods if _priced(pod)}
        if not 0 < replicas < len(leaving):
            return
        found = await self._ask(PoolKey(pool.namespace, pool.name), pods)
        costs = deletion_costs(found, leaving)
        await asyncio.gather(*(self._annotate(leaving[name], cost) for name, cost in costs.items()))

    async def _annotate(self, pod: Json, cost: int) -> None:
        if (pod["metadata"].get("annotations") or {}).get(COST) == str(cost):
            return
        try:
            await self.cluster.annotate(target_of(pod), {COST: str(cost)})
        except ClusterError as error:
            logger.warning("%s: its deletion cost is not set: %s", pod["metadata"]["name"], error)

    async def _ask(self, key: PoolKey, pods: Iterable[Json]) -> Merged:
        urls = {str(pod["metadata"]["name"]): url for pod in pods if (url := fleet_url(pod, self.port))}
        if self._session is None:
            raise RuntimeError("pickers are asked within `async with`")
        reports, problems = await ask_all(self._session, urls)
        for name, problem in problems.items():
            logger.info("%s: picker %s: %s", key, name, problem)
        return merged(reports)

    def kv_tokens(self, key: PoolKey) -> int | None:
        """What engines report as the size of a replica's cache; None = nothing is known."""
        return kv_tokens(self._known.get(key, Merged()))

    def advice(self, key: PoolKey, pool: Pool, plan: Plan, before: list[str]) -> tuple[str, ...]:
        """What could be better, by what is known; what was said stays as long as nothing is."""
        if key not in self._known:
            return standing(before)
        return advice(pool, plan, figures(self._known[key]), before)


async def ask_all(
    session: aiohttp.ClientSession, urls: Mapping[str, str]
) -> tuple[list[Report], dict[str, FleetError]]:
    """Pages by name of the picker: those that came, and why others did not."""
    answers = await asyncio.gather(*(_asked(session, url) for url in urls.values()))
    named = dict(zip(urls, answers, strict=True))
    problems = {name: answer for name, answer in named.items() if isinstance(answer, FleetError)}
    return [answer for answer in answers if isinstance(answer, Report)], problems


async def _asked(session: aiohttp.ClientSession, url: str) -> Report | FleetError:
    try:
        return await ask(session, url)
    except FleetError as error:
        return error


async def ask(session: aiohttp.ClientSession, url: str) -> Report:
    """One picker's page. Raises FleetError: it cannot be reached, answers late, too much, or nonsense."""
    try:
        async with session.get(url, allow_redirects=False) as response:
            return report(await _body(response))
    except FleetError as error:
        raise FleetError(f"{url}: {error}") from None
    except TimeoutError:
        raise FleetError(f"{url}: no answer in time") from None
    except (aiohttp.ClientError, OSError) as error:
        raise FleetError(f"{url}: {type(error).__name__}: {error}") from error


async def _body(response: aiohttp.ClientResponse) -> bytes:
    if response.status != 200:
        raise FleetError(f"it answered {response.status}")
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_PAGE_BYTES:
            raise FleetError(f"the page is larger than {MAX_PAGE_BYTES} bytes")
    return bytes(body)


def fleet_url(pod: Mapping[str, Any], port: int = METRICS_PORT) -> str:
    """Where to ask a pod; empty for what is no picker, or does not run."""
    meta, status = pod["metadata"], pod.get("status") or {}
    address = status.get("podIP") or ""
    if (meta.get("labels") or {}).get(COMPONENT) != PICKER or not address or "deletionTimestamp" in meta:
        return ""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}/fleet" if status.get("phase") == "Running" else ""


def _priced(pod: Mapping[str, Any]) -> bool:
    """Whether its deletion cost matters: a ready engine of a ReplicaSet. Of others Kubernetes takes those
    first that are not ready, and LeaderWorkerSets go by number."""
    meta = pod["metadata"]
    owners = {each.get("kind") for each in meta.get("ownerReferences") or () if each.get("controller")}
    conditions = (pod.get("status") or {}).get("conditions") or ()
    ready = any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
    engine = (meta.get("labels") or {}).get(COMPONENT) == ENGINE
    return engine and ready and "ReplicaSet" in owners and "deletionTimestamp" not in meta
