"""A pool in a whole cluster, observed by a real Prometheus: engines, pickers, Envoy and the operator."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
import yaml
from monitoring.generate import ROOT
from monitoring.rules import quick
from tests.cluster.cluster import Cluster
from tests.cluster.foreign import crds
from tests.cluster.pooled import NAME, NAMESPACE, PICKERS, Served, serving
from tests.cluster.prometheus import QUICK, Prometheus, scrape_configs, scraping
from tests.cluster.space import Space
from tests.docs_runner.blocks import blocks

from kvist_operator.manifests.object_names import METRICS_PORT

Json = dict[str, Any]
BLOCKS: Final = 220
"""KV cache blocks of each engine: 3,520 tokens, so that few requests fill it."""
SPEC: Final[Json] = {
    "replicas": 2,
    "picker": {"replicas": 2, "resources": PICKERS},
    "engine": {
        "maxModelLen": 2048,
        "maxNumSeqs": 16,
        "extraArgs": [f"--num-gpu-blocks-override={BLOCKS}"],
    },
    "workload": {
        "promptTokens": 100,
        "sharedPrefixTokens": 90,
        "outputTokens": 20,
        "ttftMilliseconds": 10_000,
        "tpotMilliseconds": 1000,
    },
}
GUIDE: Final = ROOT / "docs" / "guides" / "dashboards.md"
SECRET: Final = "twig-epp-tls"
FLAGS: Final = (f"--resync={600 // QUICK}", "--fleet-interval=5")
"""The operator's timers in the motion of the rules."""
OPERATOR: Final[Json] = {
    "metadata": {"namespace": NAMESPACE, "name": "kvist-operator"},
    "spec": {
        "selector": {"matchLabels": {"app": "kvist-operator"}},
        "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "honorLabels": True}],
    },
}
"""As the chart's, with the labels of the tests' Deployment (test_render.py checks the chart's)."""


def scrape_of_the_guide() -> Json:
    """Return the guide's scrape configuration for a Prometheus without PodMonitors. It finds targets here;
    their samples are dropped, because PodMonitors have the same ones."""
    [text] = [block.text for block in blocks(GUIDE) if block.language == "yaml"]
    found = {each["job_name"]: each for each in yaml.safe_load(text)["scrape_configs"]}
    made = found["kvist-pools"]
    assert made.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    drop = {"source_labels": ["__name__"], "regex": ".*", "action": "drop"}
    return {**made, "metric_relabel_configs": [drop]}


@dataclass
class Observed:
    """A pool that serves, and the Prometheus that scrapes it."""

    twig: Served
    prometheus: Prometheus

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of every series of the pool."""
        return {"namespace": self.twig.room.name, "pool": self.twig.name}

    async def fires(self, alert: str, *, seconds: float = 60.0) -> None:
        """Wait until an alert of this pool fires; an alert without a pool counts, too."""
        for labels in await self.prometheus.until(alert, fires=True, seconds=seconds):
            assert labels.get("pool", self.twig.name) == self.twig.name, labels

    async def ends(self, alert: str, *, seconds: float = 60.0) -> None:
        """Wait until an alert no longer fires."""
        await self.prometheus.until(alert, fires=False, seconds=seconds)

    async def rested(self) -> None:
        """Wait until no alert fires: the next one is then that of the next fault."""
        firing = 'ALERTS{alertstate="firing"}'
        await self.twig.room.until(lambda: self._none(firing), "a pool without alerts", seconds=120)

    async def _none(self, expr: str) -> bool:
        return not await self.prometheus.query(expr)

    async def pods(self, component: str) -> list[Json]:
        """Return the pods of one component of the pool."""
        return await self.twig.room.pods(**{"app.kubernetes.io/component": component})

    async def delete_pods(self, component: str) -> None:
        """Delete all pods of a component, as a runbook says (``--grace-period=1``: a process that hangs does
        not end by itself); their Deployment makes others."""
        for pod in await self.pods(component):
            path = await self.twig.room.path("Pod", pod["metadata"]["name"])
            await self.twig.room.client.ask("DELETE", path, {"gracePeriodSeconds": 1}, expect=(200, 202, 404))

    async def until(self, expr: str, about: str, *, seconds: float = 60.0) -> None:
        """Wait until an expression in quick motion has a value."""

        async def found() -> bool:
            return bool(await self.prometheus.query(quick(expr, QUICK)))

        await self.twig.room.until(found, about, seconds=seconds)

    async def page(self, pod: Json, path: str) -> str:
        """Return a page of a picker, as through ``kubectl port-forward``."""
        url = f"http://{pod['status']['podIP']}:{METRICS_PORT}{path}"
        async with self.twig.cluster.http() as http, http.get(url) as response:
            return await response.text()


@asynccontextmanager
async def _hurried(space: Space) -> AsyncIterator[None]:
    """Restart the operator with ``FLAGS``, and without them in the end."""
    [container] = (await space.get("Deployment", NAME))["spec"]["template"]["spec"]["containers"]
    await restarted(space, [*container["args"], *FLAGS])
    yield
    await restarted(space, container["args"])


async def restarted(space: Space, args: list[str]) -> None:
    """Restart the operator with these arguments."""
    change = [{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": args}]
    kind = {"Content-Type": "application/json-patch+json"}
    await space.client.ask("PATCH", await space.path("Deployment", NAME), change, headers=kind)
    await space.rolled_out(NAME)


@asynccontextmanager
async def observed(cluster: Cluster, folder: Path, **spec: Any) -> AsyncIterator[Observed]:
    """A pool ``twig`` with two engines, two pickers and Envoy, scraped as its PodMonitors say."""
    [crd] = [each for each in crds() if each["spec"]["names"]["kind"] == "PodMonitor"]
    async with cluster.client() as admin:
        await admin.install_crds(crd)
        try:
            async with serving(cluster, **{**SPEC, **spec}) as twig, _hurried(twig.operator):

                async def monitored() -> list[Json]:
                    found = await twig.room.all_of("PodMonitor")
                    return found if len(found) == 3 else []

                monitors = await twig.room.until(monitored, "three PodMonitors")
                scrapes = [*scrape_configs([*monitors, OPERATOR]), scrape_of_the_guide()]
                async with scraping(cluster, folder, scrapes) as prometheus:
                    yield Observed(twig, prometheus)
        finally:
            await admin.uninstall(crd["metadata"]["name"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Observed]:
    """A pool under observation that has served."""
    async with observed(cluster, tmp_path_factory.mktemp("prometheus")) as made:
        async with made.twig.load() as load:
            await load.until(40)
        yield made


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def rested(seen: Observed) -> None:
    """Begin each test with a pool that raises no alert."""
    await seen.rested()


async def scaled(seen: Observed, replicas: int) -> None:
    """Scale the pool as ``kubectl scale kvp/twig`` does."""
    await seen.twig.room.patch("InferencePool", "twig", {"spec": {"replicas": replicas}}, sub="scale")


async def operators(seen: Observed, replicas: int) -> None:
    """Scale the operator's Deployment; return when so many pods are there."""
    await seen.twig.operator.patch("Deployment", NAME, {"spec": {"replicas": replicas}})

    async def there() -> bool:
        return len(await seen.twig.operator.pods()) == replicas

    await seen.twig.operator.until(there, f"{replicas} operators")


async def remove_certificate(seen: Observed) -> None:
    """Delete what ``kubectl delete secret/twig-epp-tls configmap/twig-epp-ca`` does."""
    await seen.twig.room.remove("Secret", SECRET)
    await seen.twig.room.remove("ConfigMap", "twig-epp-ca")


def story(name: str) -> str:
    """Return a prompt that shares nothing with those of other requests."""
    return f"{name} tell me a long story. " * 4


@asynccontextmanager
async def long_requests(
    seen: Observed, count: int, tokens: int, text: Callable[[str], str] = story
) -> AsyncIterator[None]:
    """Keep so many requests with outputs of so many tokens running; ``text`` makes a prompt of the name of a
    request."""

    async def client(number: int) -> None:
        async with seen.twig.cluster.http() as http:
            for turn in range(1000):
                content = text(f"{number}-{turn}")
                body = {
                    "model": "twig",
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": tokens,
                    "ignore_eos": True,
                }
                try:
                    async with http.post(seen.twig.url, json=body) as answer:
                        await answer.read()
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(client(number)) for number in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
