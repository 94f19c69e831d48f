"""Dashboards and alerts in a real API server, by the chart and by the commands of the guide."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from monitoring.dashboards import DASHBOARDS
from monitoring.generate import ROOT
from tests.charts import binaries
from tests.charts.generate import CHART
from tests.charts.helm import settings
from tests.charts.test_install import Release, release
from tests.cluster.client import Client, namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.foreign import rules
from tests.docs_runner.blocks import blocks

__all__ = ["release"]
pytestmark = pytest.mark.timeout(400)
GUIDE = ROOT / "docs" / "guides" / "dashboards.md"
RULE = "apis/monitoring.coreos.com/v1/prometheusrules/kvist"
NAMES = [f"kvist-{each.name}" for each in DASHBOARDS]


async def config_maps(admin: Client, where: str) -> list[str]:
    """Return the names of the dashboards in a namespace, as Grafana's sidecar finds them."""
    path = f"/api/v1/namespaces/{where}/configmaps"
    found = await admin.ask("GET", path, params={"labelSelector": "grafana_dashboard=1"})
    return sorted(each["metadata"]["name"] for each in found["items"])


async def test_rules_and_dashboards_come_with_the_api(release: Release, admin: Client) -> None:
    """In a cluster with the Prometheus operator's own CRD the API server accepts the PrometheusRule, and
    the dashboards are made; both are taken away when they are not wanted."""
    await admin.install_crds(*rules())
    try:
        labels = settings(monitoring__rules__labels={"release": "main"})
        await release.run("install", str(CHART), *labels)
        found = await release.found(RULE)
        assert found is not None
        assert found["metadata"]["labels"]["release"] == "main"
        assert await config_maps(admin, release.space.name) == sorted(NAMES)
        off = settings(monitoring__rules__mode="Disabled", monitoring__dashboards__mode="Disabled")
        await release.run("upgrade", str(CHART), *off)
        assert await release.found(RULE) is None
        assert await config_maps(admin, release.space.name) == []
    finally:
        await admin.uninstall("prometheusrules.monitoring.coreos.com")


async def test_the_commands_of_the_guide_work(
    release: Release, plane: ControlPlane, admin: Client, tmp_path: Path
) -> None:
    """Both ways of docs/guides/dashboards.md put five dashboards where Grafana's sidecar looks for them."""
    await release.run("install", str(CHART))
    made = [block for block in blocks(GUIDE) if block.language == "bash"]
    assert len(made) == 2
    for number, block in enumerate(made):
        place = await namespace(admin, f"{release.space.name}-grafana-{number}")
        text = block.text.replace("kvist-system", release.space.name).replace(
            "monitoring \\\n", f"{place.name} \\\n"
        )
        text = text.replace("namespace=monitoring", f"namespace={place.name}")
        text = text.replace("--namespace monitoring", f"--namespace {place.name}")
        await asyncio.to_thread(typed, text, plane.kubeconfig("guide"), tmp_path)
        assert await config_maps(admin, place.name) == sorted(NAMES)


def typed(text: str, kubeconfig: Path, folder: Path) -> None:
    """Run a script in the repository, with helm and kubectl on its PATH. Fails with what it prints."""
    for name, program in (("helm", binaries.helm(4)), ("kubectl", binaries.kubectl())):
        link = folder / name
        if not link.exists():
            link.symlink_to(program)
    environment = {**binaries.environment(folder), "KUBECONFIG": str(kubeconfig)}
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
