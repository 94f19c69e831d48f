"""A real Prometheus in a cluster of the tests. It scrapes what PodMonitors select, as Prometheus' operator
does. Debian's Prometheus cannot list pods, so a task of the test lists them for it, with the labels that the
discovery of pods gives its targets (``__meta_kubernetes_pod_…``).

Rules run in quick motion (``monitoring.rules.quick``): their windows are ``QUICK`` times shorter.
"""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from monitoring.alerts import GROUPS
from monitoring.promql import selectors
from monitoring.rules import Alert, Group, quick, rules_file
from tests.cluster.cluster import Cluster
from tests.monitoring.binaries import prometheus

from kvist_sim.processes import Child, Children

Json = dict[str, Any]
PORT: Final = 29090
QUICK: Final = 120
"""A window of 30 minutes has 15 seconds, ``for: 10m`` five."""
INTERVAL: Final = "500ms"
"""Between two scrapes, and two evaluations of all rules."""
START_SECONDS: Final = 60.0
DISCOVERY_SECONDS: Final = 0.5
SECONDS: Final = 60.0
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}


def quick_rules(groups: Iterable[Group] = GROUPS) -> Json:
    """Return all rules in quick motion."""
    made = rules_file(groups)
    for group in made["groups"]:
        group["interval"] = INTERVAL
        for rule in group["rules"]:
            rule["expr"] = quick(rule["expr"], QUICK)
            if "for" in rule:
                seconds = int(rule["for"][:-1]) * _SECONDS[rule["for"][-1]]
                rule["for"] = f"{round(1000 * seconds / QUICK)}ms"
    return made


def scrape_configs(monitors: Iterable[Json]) -> list[Json]:
    """Return the scrape configurations of PodMonitors, relabelled in the order of Prometheus' operator: what
    selects the pods, its own labels, then those of the monitor."""
    return [
        {
            "job_name": f"podMonitor/{_name(monitor)}/{number}",
            "honor_labels": endpoint.get("honorLabels", False),
            "metrics_path": endpoint["path"],
            "relabel_configs": [*_usual(monitor, endpoint), *map(_own, endpoint.get("relabelings", ()))],
        }
        for monitor in monitors
        for number, endpoint in enumerate(monitor["spec"]["podMetricsEndpoints"])
    ]


def _usual(monitor: Json, endpoint: Json) -> list[Json]:
    meta = "__meta_kubernetes_pod_"
    labels = monitor["spec"]["selector"]["matchLabels"]
    return [
        {"source_labels": [f"{meta}phase"], "regex": "(Failed|Succeeded)", "action": "drop"},
        {
            "source_labels": ["__meta_kubernetes_namespace"],
            "regex": monitor["metadata"]["namespace"],
            "action": "keep",
        },
        *(
            {"source_labels": [f"{meta}label_{_plain(name)}"], "regex": value, "action": "keep"}
            for name, value in labels.items()
        ),
        {"source_labels": [f"{meta}container_port_name"], "regex": endpoint["port"], "action": "keep"},
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": [f"{meta}container_name"], "target_label": "container"},
        {"source_labels": [f"{meta}name"], "target_label": "pod"},
        {"target_label": "job", "replacement": _name(monitor)},
        {"target_label": "endpoint", "replacement": endpoint["port"]},
    ]


def _name(monitor: Json) -> str:
    return f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"


def _plain(label: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in label)


def pod_targets(pods: Iterable[Json]) -> list[Json]:
    """Return the targets that the discovery of pods finds: one for each port of each container."""
    meta = "__meta_kubernetes_pod_"
    return [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {
                "__meta_kubernetes_namespace": pod["metadata"]["namespace"],
                f"{meta}name": pod["metadata"]["name"],
                f"{meta}phase": pod["status"]["phase"],
                f"{meta}container_name": container["name"],
                f"{meta}container_port_name": port.get("name", ""),
                **{f"{meta}label_{_plain(k)}": v for k, v in pod["metadata"].get("labels", {}).items()},
            },
        }
        for pod in pods
        if pod.get("status", {}).get("podIP")
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
    ]


def _own(relabeling: Json) -> Json:
    names = {"targetLabel": "target_label", "sourceLabels": "source_labels"}
    return {names.get(key, key): value for key, value in relabeling.items()}


@dataclass
class Prometheus:
    """A running server."""

    cluster: Cluster
    child: Child

    async def _get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{PORT}/api/v1/{path}"
        async with self.cluster.http() as http, http.get(url, params=query) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{query}: {answer}"
        return answer["data"]

    async def query(self, expr: str) -> list[Json]:
        """Return the result of an expression now: series, or one series for a number."""
        found = await self._get("query", query=expr)
        return (
            [{"metric": {}, "value": found["result"]}] if found["resultType"] == "scalar" else found["result"]
        )

    async def targets(self) -> list[Json]:
        """Return the targets that are scraped."""
        found: list[Json] = (await self._get("targets", state="active"))["activeTargets"]
        return found

    async def firing(self, alert: str) -> list[Mapping[str, str]]:
        """Return the labels of an alert that fires."""
        found = await self.query(f'ALERTS{{alertname="{alert}",alertstate="firing"}}')
        return [each["metric"] for each in found]

    async def until(self, alert: str, *, fires: bool, seconds: float = SECONDS) -> list[Mapping[str, str]]:
        """Wait until an alert fires, or no longer does. Fails with the values of its expression."""
        deadline = asyncio.get_running_loop().time() + seconds
        while bool(found := await self.firing(alert)) is not fires:
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(
                    f"{alert}: {'silent' if fires else 'fires'}\n{await self.explained(alert)}"
                )
            await asyncio.sleep(0.2)
        return found

    async def explained(self, alert: str) -> str:
        """Return the value of each part of an alert's expression, for a failed test."""
        [rule] = [each for group in GROUPS for each in group.alerts if each.name == alert]
        parts = parts_of(rule)
        values = [json.dumps(await self.query(part)) for part in parts]
        return "\n".join(f"{part}\n    {value}" for part, value in zip(parts, values, strict=True))


def parts_of(alert: Alert) -> Sequence[str]:
    """Return the expression of an alert in quick motion, and each series in it."""
    whole = quick(alert.expr, QUICK)
    return [whole, *selectors(whole)]


@asynccontextmanager
async def scraping(cluster: Cluster, folder: Path, scrapes: Sequence[Json]) -> AsyncIterator[Prometheus]:
    """Start a server in the cluster's network with these scrape configurations and all rules."""
    pods = folder / "pods.json"
    pods.write_text("[]")
    (folder / "rules.yaml").write_text(yaml.safe_dump(quick_rules()))
    settings = {
        "global": {
            "scrape_interval": INTERVAL,
            "scrape_timeout": INTERVAL,
            "evaluation_interval": INTERVAL,
        },
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [{**each, "file_sd_configs": [{"files": [str(pods)]}]} for each in scrapes],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    argv = [
        *("nsenter", "--target", str(cluster.first), "--net", str(prometheus())),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{PORT}",
        "--query.lookback-delta=5s",
        "--log.level=warn",
    ]
    async with Children(folder) as children, asyncio.TaskGroup() as group:
        child = children.start("prometheus", argv)
        await children.ready(child, functools.partial(_ready, cluster), START_SECONDS)
        discovery = group.create_task(_discover(cluster, pods))
        yield Prometheus(cluster, child)
        discovery.cancel()


async def _discover(cluster: Cluster, file: Path) -> None:
    """Write the targets of all pods to a file whenever they change."""
    known = ""
    async with cluster.client() as client:
        while True:
            pods = (await client.ask("GET", "/api/v1/pods"))["items"]
            text = json.dumps(pod_targets(pods))
            if text != known:
                _replace(file, text)
                known = text
            await asyncio.sleep(DISCOVERY_SECONDS)


def _replace(file: Path, text: str) -> None:
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.rename(file)


async def _ready(cluster: Cluster) -> bool:
    try:
        async with cluster.http() as http, http.get(f"http://127.0.0.1:{PORT}/-/ready") as response:
            return response.status == 200
    except OSError:
        return False
