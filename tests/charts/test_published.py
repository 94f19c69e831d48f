"""The chart as the release workflow publishes it."""

import os
import subprocess
from pathlib import Path

import yaml
from tests.charts import binaries
from tests.charts.generate import ROOT
from tests.charts.helm import Helm, of_kind, one
from tests.test_packaging import PROJECT

VERSION = PROJECT["project"]["version"]
REGISTRY = "registry.example.com/kvist"


def step(name: str) -> str:
    """The script of a step of the workflow's chart job."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    [script] = [found["run"] for found in jobs["chart"]["steps"] if found.get("id") == name]
    return str(script)


def test_the_workflow_s_own_script_packages_the_chart(tmp_path: Path, helm4: Helm) -> None:
    """Run as it stands there: the package has the version, the registry in every image, and lints."""
    for name in (".github", "charts", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    told = {"REGISTRY": REGISTRY, "VERSION": VERSION}
    environment = {**binaries.environment(tmp_path / "home"), **told}
    environment["PATH"] = f"{binaries.helm(4).parent}{os.pathsep}{environment['PATH']}"
    subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step("package")],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=120,
    )
    made = helm4.template(chart=tmp_path / "build" / f"kvist-{VERSION}.tgz")
    [container] = one(made, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"{REGISTRY}/kvist-operator:{VERSION}"
    assert f"--picker-image={REGISTRY}/kvist-epp:{VERSION}" in container["args"]
    [pod] = of_kind(made, "Pod")
    assert pod["spec"]["containers"][0]["image"] == container["image"]
