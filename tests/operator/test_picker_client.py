"""Polling pickers over real sockets, with a cluster that only stores annotations."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.operator.fleets import page, pod, row
from tests.operator.pools import plan, pool

from kvist_operator.cluster.kinds import Target
from kvist_operator.cluster.pool_cache import PoolCache, PoolKey
from kvist_operator.errors import Unavailable
from kvist_operator.reconcile import picker_client
from kvist_operator.reconcile.picker_client import COST, PickerClient, ask_all, fleet_url

Answer = Callable[[], Awaitable[web.StreamResponse]]
KEY = PoolKey("forest", "twig")
POOL = pool()
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
"""A picker each, on the same port, as pods have it."""


@dataclass
class Annotations:
    """A cluster that stores annotations of pods."""

    written: dict[str, str | None] = field(default_factory=dict)
    writes: int = 0
    fails: str = ""
    """The pod that cannot be written to."""

    async def annotate(self, target: Target, annotations: Mapping[str, str | None]) -> None:
        """Store the annotation."""
        self.writes += 1
        if target.name == self.fails:
            raise Unavailable("busy", 503)
        self.written[target.name] = annotations[COST]


async def says(body: bytes) -> web.Response:
    """Return an answer."""
    return web.Response(body=body)


@asynccontextmanager
async def pickers(*answers: Answer) -> AsyncIterator[int]:
    """Run a server on each host; yield their port."""
    port, runners = 0, []
    for host, answer in zip(HOSTS, answers, strict=False):
        app = web.Application()

        async def fleet_page(_: web.Request, answer: Answer = answer) -> web.StreamResponse:
            return await answer()

        app.router.add_get("/fleet", fleet_page)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        port = runner.addresses[0][1]
        runners.append(runner)
    try:
        yield port
    finally:
        for runner in runners:
            await runner.cleanup()


@dataclass
class World:
    """A pool of three engines with a number of pickers."""

    cluster: Annotations = field(default_factory=Annotations)
    cache: PoolCache = field(default_factory=PoolCache)
    changed: list[PoolKey] = field(default_factory=list)

    def tell(self, count: int = 1, **engine: Any) -> list[dict[str, Any]]:
        """Add all pods to the cache."""
        made = [pod(f"e{n}", "engine", namespace="forest", **engine) for n in range(3)]
        made += [
            pod(f"epp{n}", "picker", namespace="forest", address=host) for n, host in enumerate(HOSTS[:count])
        ]
        made.append({**pool_object(), "metadata": {"name": "twig", "namespace": "forest"}})
        for each in made:
            self.cache.update({**each, "metadata": {**each["metadata"], "resourceVersion": "1"}})
        return made

    def asking(self, port: int) -> PickerClient:
        """Return the client under test."""
        return PickerClient(self.cluster.annotate, self.cache, self.changed.append, port)


def pool_object() -> dict[str, Any]:
    """Return the pool with the fields that matter here."""
    return {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool"}


ROWS = [row("e0", worth=30), row("e1", worth=10, kv_tokens=900), row("e2", worth=20)]


async def test_each_pod_gets_its_deletion_cost() -> None:
    """Before replicas are lowered every ready engine gets a cost from all pickers; failing pickers do not
    matter."""
    world = World()
    world.tell(3)
    answers = [lambda: says(page(*ROWS)), lambda: says(b"{"), lambda: says(page(*ROWS))]
    async with pickers(*answers) as port, world.asking(port) as asking:
        await asking.set_deletion_costs(POOL, world.cache.pods(KEY), 2)
        assert world.cluster.written == {"e0": "60", "e1": "20", "e2": "40"}

        for each in world.cache.pods(KEY):
            each["metadata"].setdefault("annotations", {})[COST] = world.cluster.written.get(
                each["metadata"]["name"]
            )
            world.cache.update({**each, "metadata": {**each["metadata"], "resourceVersion": "2"}})
        await asking.set_deletion_costs(POOL, world.cache.pods(KEY), 1)
        assert world.cluster.writes == 3


@pytest.mark.parametrize("replicas", [0, 3, 4])
async def test_pickers_are_not_requested_where_there_is_no_choice(replicas: int) -> None:
    """Pickers are not asked when all pods stay or all go."""
    world = World()
    world.tell()
    async with world.asking(9) as asking:
        await asking.set_deletion_costs(POOL, world.cache.pods(KEY), replicas)
    assert world.cluster.writes == 0


@pytest.mark.parametrize(
    "engine",
    [{"ready": False}, {"owner": "StatefulSet"}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}],
    ids=["not-ready", "group", "leaving"],
)
async def test_other_pods_are_the_controllers_business(engine: dict[str, Any]) -> None:
    """Pods that are not ready, in groups, or terminating get no cost: Kubernetes orders them itself."""
    world = World()
    world.tell(**engine)
    async with pickers(lambda: says(page(*ROWS))) as port, world.asking(port) as asking:
        await asking.set_deletion_costs(POOL, world.cache.pods(KEY), 2)
    assert world.cluster.writes == 0


async def test_replicas_are_lowered_all_the_same() -> None:
    """Without an answer nothing is written; a pod that cannot be annotated does not affect the others."""
    world = World()
    world.tell()
    async with world.asking(9) as asking:
        await asking.set_deletion_costs(POOL, world.cache.pods(KEY), 2)
    assert world.cluster.writes == 0

    world.cluster.fails = "e0"
    async with pickers(lambda: says(page(*ROWS))) as port, world.asking(port) as asking:
        await asking.set_deletion_costs(POOL, world.cache.pods(KEY), 2)
    assert world.cluster.written == {"e1": "10", "e2": "20"}


async def test_changed_figures_reconcile_the_pool() -> None:
    """A pool is reconciled when its figures change; figures stay while pickers are silent and go with the
    pool."""
    world = World()
    world.tell()
    rows = list(ROWS)
    async with pickers(lambda: says(page(*rows))) as port, world.asking(port) as asking:
        await asking.poll()
        await asking.poll()
        assert (world.changed, asking.kv_tokens(KEY)) == ([KEY], 900)
        rows.append(row("e3", kv_tokens=800))
        await asking.poll()
        assert (world.changed, asking.kv_tokens(KEY)) == ([KEY, KEY], 800)

        asking.port = 9
        await asking.poll()
        assert asking.kv_tokens(KEY) == 800
        world.cache.remove(KEY.target)
        await asking.poll()
        assert asking.kv_tokens(KEY) is None


async def test_advice_stands_until_something_is_known() -> None:
    """After a restart the operator's earlier advice stands until figures arrive."""
    world = World()
    world.tell()
    known = plan("Qwen/Qwen3-8B", "H100-80GB")
    before = ["Preemptions: old.", "a note of another component"]
    busy = {"seconds": 600.0, "requests": 100.0, "preemptions": 50.0, "queries": 0.0, "hits": 0.0}
    told = page(row("e0", counted=busy, kv_usage=0.9, running=8))
    async with pickers(lambda: says(told)) as port, world.asking(port) as asking:
        assert asking.advice(KEY, POOL, known, before) == ("Preemptions: old.",)
        await asking.poll()
        [line] = asking.advice(KEY, POOL, known, before)
    assert line.startswith("Preemptions: 50 %")


async def test_a_pool_that_no_gateway_asks_has_advice() -> None:
    """Picks of all pickers count; while one of them is silent the advice stands as it was."""
    world = World()
    world.tell(2)
    known = plan("Qwen/Qwen3-8B", "H100-80GB")
    served = {"seconds": 600.0, "requests": 100.0, "preemptions": 0.0, "queries": 0.0, "hits": 0.0}
    picks: list[int | None] = [0, 0]

    def answer(number: int) -> Answer:
        async def said() -> web.StreamResponse:
            if picks[number] is None:
                return web.Response(status=503)
            counts = {"seconds": 900.0, "picked": picks[number], "tls_refusals": 0}
            return await says(page(row("e0", counted=served), gateway=counts))

        return said

    async with pickers(answer(0), answer(1)) as port, world.asking(port) as asking:
        await asking.poll()
        [line] = asking.advice(KEY, POOL, known, [])
        assert line.startswith("Pickers: engines answered")
        picks[1] = None
        await asking.poll()
        assert asking.advice(KEY, POOL, known, []) == ()
        assert asking.advice(KEY, POOL, known, [line]) == (line,)
        picks[1] = 1
        await asking.poll()
        assert asking.advice(KEY, POOL, known, [line]) == ()


async def test_polling_repeats_until_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polling repeats at the interval; cancelling it leaves nothing behind."""
    asked, hang = asyncio.Event(), asyncio.Event()
    count = 0

    async def answer() -> web.StreamResponse:
        nonlocal count
        count += 1
        if count == 3:
            asked.set()
            await hang.wait()
        return web.Response(body=page(*ROWS))

    world = World()
    world.tell()
    async with pickers(answer) as port, world.asking(port) as asking:
        task = asyncio.create_task(asking.run(0.01))
        await asked.wait()
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        await asking.run(0)
        hang.set()
    assert count == 3


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [("TIMEOUT_SECONDS", 0.2, "in time"), ("MAX_PAGE_BYTES", 100, "larger than 100")],
)
async def test_answers_are_bounded(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float, words: str
) -> None:
    """An answer that is too slow or too large counts as none."""
    monkeypatch.setattr(picker_client, limit, value)
    hang = asyncio.Event()

    async def answer() -> web.StreamResponse:
        if limit == "TIMEOUT_SECONDS":
            await hang.wait()
        return web.Response(body=page(*ROWS))

    async with pickers(answer) as port:
        timeout = aiohttp.ClientTimeout(total=picker_client.TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            reports, problems = await ask_all(session, {"epp": f"http://127.0.0.1:{port}/fleet"})
        hang.set()
    assert reports == []
    assert words in str(problems["epp"])


async def test_redirects_and_errors_are_no_answers() -> None:
    """Redirects and errors are failures whose message names the URL and the cause."""

    async def elsewhere() -> web.StreamResponse:
        raise web.HTTPFound("http://127.0.0.1:9/fleet")

    async def fails() -> web.StreamResponse:
        return web.Response(status=503)

    async with pickers(elsewhere, fails) as port, aiohttp.ClientSession() as session:
        urls = {host: f"http://{host}:{port}/fleet" for host in HOSTS}
        reports, problems = await ask_all(session, urls)
    assert reports == []
    assert "302" in str(problems[HOSTS[0]])
    assert "503" in str(problems[HOSTS[1]])
    assert HOSTS[2] in str(problems[HOSTS[2]])


def test_only_running_pickers_are_requested() -> None:
    """Running pickers with an address are asked, and no other pods; IPv6 addresses are in brackets."""
    assert fleet_url(pod("p", "picker", address="10.0.0.1")) == "http://10.0.0.1:9090/fleet"
    assert fleet_url(pod("p", "picker", address="fd00::1"), 80) == "http://[fd00::1]:80/fleet"
    for other in (
        pod("p", "engine"),
        pod("p", "picker", address=""),
        pod("p", "picker", phase="Pending"),
        pod("p", "picker", deletionTimestamp="2026-01-01T00:00:00Z"),
    ):
        assert fleet_url(other) == ""
