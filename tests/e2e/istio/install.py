"""Istio in a test cluster, installed by its own charts, before the Envoy that all tests use.

Its settings are those of the example. Three extensions that only Istio's build of Envoy has are switched off:
its metrics, the exchange of metadata between sidecars, and a filter for ALPN between sidecars. None has to do
with pools.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import yaml
from tests.cluster.client import Client
from tests.cluster.foreign import gateway_api, module, writable_copy
from tests.cluster.node.images import PROGRAMS, Programs
from tests.cluster.space import Space
from tests.e2e.commands import Commands
from tests.examples import ISTIOD
from tests.golang import build

from kvist_sim.envoy import find_envoy

Json = dict[str, Any]
TOOLS: Final = Path(__file__).parent / "tools"
MODULE: Final = "istio.io/istio"
NAMESPACE: Final = "istio-system"
BOOTSTRAP: Final = "envoy_bootstrap.json"
"""The template of an Envoy's first configuration, part of the image of Istio's proxies."""
RESOURCES: Final = {"requests": {"cpu": "100m", "memory": "128Mi"}}
RESTRICTED: Final = {"type": "RuntimeDefault"}


def binaries() -> Path:
    """The folder with Istio's two programs and the template; built if need be. Raises GoError."""
    folder = build(TOOLS, [f"{MODULE}/pilot/cmd/{name}" for name in ("pilot-discovery", "pilot-agent")])
    template = folder / BOOTSTRAP
    if not template.exists():
        shutil.copyfile(_module() / "tools" / "packaging" / "common" / BOOTSTRAP, template)
    return folder


def images() -> Programs:
    """Istio's images. Raises GoError."""
    folder = binaries()
    agent, envoy = str(folder / "pilot-agent"), str(find_envoy())
    return {
        "istio/pilot": {"pilot-discovery": str(folder / "pilot-discovery")},
        "istio/proxyv2": {"pilot-agent": agent, "envoy": envoy},
    }


def values() -> Json:
    """The values of the chart ``istiod`` besides those of the example."""
    return {
        "global": {"hub": "istio", "tag": "test", "proxy": {"resources": RESOURCES}},
        "env": {"PILOT_ENABLE_ALPN_FILTER": "false", "PILOT_ENABLE_METADATA_EXCHANGE": "false"},
        "telemetry": {"enabled": False},
        "autoscaleEnabled": False,
        "resources": RESOURCES,
        "seccompProfile": RESTRICTED,
        "gateways": {"seccompProfile": RESTRICTED},
        "meshConfig": {
            "defaultConfig": {
                "binaryPath": f"{PROGRAMS}/envoy",
                "concurrency": 1,
                "proxyMetadata": {"ISTIO_BOOTSTRAP": str(binaries() / BOOTSTRAP)},
            }
        },
    }


async def install(commands: Commands, admin: Client, space: Space, pools_in: str) -> None:
    """Install Istio in a namespace with the values of the example, for a pool in the namespace
    ``pools_in``."""
    await admin.install_crds(*gateway_api(), *extension_crds())
    charts = writable_copy(_module() / "manifests" / "charts", commands.home / "istio-charts")
    example, own = commands.home / ISTIOD.name, commands.home / "istiod.yaml"
    example.write_text(ISTIOD.read_text().replace(".default.svc", f".{pools_in}.svc"))
    own.write_text(json.dumps(values()))
    where = (f"--namespace={space.name}", "--wait", "--timeout=120s")
    await commands.helm("install", "istio-base", str(charts / "base"), *where)
    istiod = charts / "istio-control" / "istio-discovery"
    files = [f"--values={file}" for file in (example, own)]
    await commands.helm("install", "istiod", str(istiod), *where, *files)


async def uninstall(commands: Commands, space: Space) -> None:
    """All but the CRDs."""
    for release in ("istiod", "istio-base"):
        await commands.helm("uninstall", release, f"--namespace={space.name}", "--wait")


def extension_crds() -> list[Json]:
    """The CRDs of the Gateway API Inference Extension, which Istio's own tests install."""
    testdata = _module() / "tests" / "integration" / "pilot" / "testdata"
    return list(yaml.safe_load_all((testdata / "gateway-api-inference-extension-crd.yaml").read_text()))


def _module() -> Path:
    return module(MODULE, TOOLS)
