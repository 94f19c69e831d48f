"""Envoy Gateway in a test cluster, installed by its own chart, which its Go module holds like its CRDs."""

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.charts.helm import settings
from tests.cluster.cluster import Cluster
from tests.cluster.foreign import ENVOY_GATEWAY, module, writable_copy
from tests.cluster.space import Space
from tests.e2e.commands import Commands

Json = dict[str, Any]
VERSION: Final = ENVOY_GATEWAY.partition("@")[2]
IMAGE: Final = "envoyproxy/gateway"
RELEASE: Final = "eg"
OWNER: Final = "gateway.envoyproxy.io/owning-gateway-"
PROBED: Final = settings(
    deployment__envoyGateway__readinessProbe__initialDelaySeconds=0,
    deployment__envoyGateway__readinessProbe__periodSeconds=1,
)
"""It is ready when it is, not at the next look ten seconds later."""
DRAIN: Final = "--drain-time-s"
CLUSTER_IP: Final[Json] = {"type": "Kubernetes", "kubernetes": {"envoyService": {"type": "ClusterIP"}}}
"""For an EnvoyProxy: nothing here gives addresses to a Service of type LoadBalancer."""


@dataclass(frozen=True)
class Edge:
    """An Envoy Gateway that runs."""

    cluster: Cluster
    space: Space
    """Its own; the Envoys of all Gateways are there, too."""

    async def envoys(self, room: Space, gateway: str = "edge") -> list[Json]:
        """Pods of a Gateway."""
        labels = {f"{OWNER}name": gateway, f"{OWNER}namespace": room.name}
        return await self.space.pods(**labels)

    async def drain_seconds(self, room: Space, gateway: str = "edge") -> set[int]:
        """For how long its Envoys leave streams alone whose listener has changed."""
        pods = await self.envoys(room, gateway)
        found = [c.get("args", []) for pod in pods for c in pod["spec"]["containers"]]
        return {int(args[args.index(DRAIN) + 1]) for args in found if DRAIN in args}


async def gateway_address(room: Space, name: str = "edge") -> str:
    """Return the address of a Gateway, once it is programmed."""

    async def programmed() -> Json | None:
        found = await room.get("Gateway", name)
        return found if condition(found.get("status", {}), "Programmed") == "True" else None

    found = await room.until(programmed, f"Gateway {name}")
    assert found is not None
    return str(found["status"]["addresses"][0]["value"])


def accepted(policy: Json, where: str) -> bool:
    """Whether every gateway has taken an object as it is now."""
    found = policy.get("status", {}).get(where, [])
    seen = [one.get("observedGeneration") for each in found for one in each["conditions"]]
    taken = all(condition(one, "Accepted") == "True" for one in found)
    return bool(found) and taken and set(seen) == {policy["metadata"]["generation"]}


def condition(status: Json, kind: str) -> str:
    """Status of one of the conditions; empty when there is none."""
    found = [one["status"] for one in status.get("conditions", []) if one["type"] == kind]
    return str(found[0]) if found else ""


async def attached(room: Space, name: str) -> None:
    """The gateway has taken the pool's route and its policies."""
    for kind, where in (
        ("HTTPRoute", "parents"),
        ("BackendTrafficPolicy", "ancestors"),
        ("EnvoyExtensionPolicy", "ancestors"),
    ):

        async def taken(kind: str = kind, where: str = where) -> bool:
            return accepted(await room.get(kind, name), where)

        await room.until(taken, f"{kind} {name}")


async def install(commands: Commands, cluster: Cluster, space: Space) -> Edge:
    """Install Envoy Gateway as its guide says, in a namespace that admits only restricted pods."""
    chart = _chart(commands.home)
    where = (f"--namespace={space.name}", "--wait", "--timeout=120s")
    await commands.helm("install", RELEASE, str(chart), *where, *PROBED)
    return Edge(cluster, space)


async def uninstall(commands: Commands, edge: Edge) -> None:
    """All but the CRDs."""
    await commands.helm("uninstall", RELEASE, f"--namespace={edge.space.name}", "--wait")


def _chart(home: Path) -> Path:
    """The chart as it is released: its values come from a template."""
    folder = writable_copy(module(ENVOY_GATEWAY) / "charts" / "gateway-helm", home / "gateway-helm")
    template = string.Template((folder / "values.tmpl.yaml").read_text())
    told = {"GatewayImage": f"docker.io/{IMAGE}:{VERSION}", "GatewayImagePullPolicy": "IfNotPresent"}
    (folder / "values.yaml").write_text(template.substitute(told))
    return folder
