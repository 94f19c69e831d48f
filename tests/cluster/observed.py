"""A pool in a whole cluster, observed by a real Prometheus: engines, pickers, Envoy and the operator."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml
from monitoring.generate import ROOT
from tests.cluster.cluster import Cluster
from tests.cluster.foreign import crds
from tests.cluster.pooled import NAME, NAMESPACE, PICKERS, Served, serving
from tests.cluster.prometheus import QUICK, Prometheus, scrape_configs, scraping
from tests.cluster.space import Space
from tests.docs_runner.blocks import blocks

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

    def signal(self, number: signal.Signals, word: str, most: int = 99) -> int:
        """Send a signal to the processes of the cluster with this word in their command line; return how many
        got it."""
        found = [pid for pid in _below(self.twig.cluster.first) if word in _command(pid)][:most]
        for pid in found:
            os.kill(pid, number)
        return len(found)


def _below(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield child
            yield from _below(child)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@asynccontextmanager
async def _hurried(space: Space) -> AsyncIterator[None]:
    """Restart the operator with ``FLAGS``, and without them in the end."""
    [container] = (await space.get("Deployment", NAME))["spec"]["template"]["spec"]["containers"]
    path = await space.path("Deployment", NAME)
    where = "/spec/template/spec/containers/0/args"
    kind = {"Content-Type": "application/json-patch+json"}
    for args in ([*container["args"], *FLAGS], container["args"]):
        change = [{"op": "replace", "path": where, "value": args}]
        await space.client.ask("PATCH", path, change, headers=kind)
        await space.rolled_out(NAME)
        if args != container["args"]:
            yield


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


@asynccontextmanager
async def long_requests(seen: Observed, count: int, tokens: int) -> AsyncIterator[None]:
    """Keep so many requests with outputs of so many tokens running, each about something else."""

    async def client(number: int) -> None:
        async with seen.twig.cluster.http() as http:
            for turn in range(1000):
                text = f"{number}-{turn} tell me a long story. " * 4
                body = {
                    "model": "twig",
                    "messages": [{"role": "user", "content": text}],
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
