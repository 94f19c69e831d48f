"""A release has one version everywhere, and its workflows only run pinned actions."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvist_operator.manifests.object_names import PICKER_IMAGE
from tests.test_packaging import PROJECT, ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE = ROOT / ".github" / "release.py"
VERSION = PROJECT["project"]["version"]


def release(*words: str) -> subprocess.CompletedProcess[str]:
    """``release.py`` as the workflow runs it."""
    return subprocess.run([sys.executable, RELEASE, *words], capture_output=True, text=True, check=False)


def test_the_version_is_one() -> None:
    """pyproject.toml says it; chart, images and the operator say the same."""
    chart = yaml.safe_load((ROOT / "charts" / "kvist" / "Chart.yaml").read_text())
    assert release("version").stdout.strip() == VERSION
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    assert f"kvist-epp:{VERSION}" == PICKER_IMAGE
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[a-z0-9.]+)?", VERSION), "a chart's version is semantic"


def test_a_tag_of_another_version_is_refused() -> None:
    """Both versions are named; the right tag gives the version."""
    assert release("version", "--tag", f"v{VERSION}").stdout.strip() == VERSION
    refused = release("version", "--tag", "v9.9.9")
    assert refused.returncode == 1
    assert f"the tag v9.9.9 is not v{VERSION}" in refused.stderr


def test_a_published_chart_has_its_registry(tmp_path: Path) -> None:
    """One value differs from the checkout's chart; without a registry nothing is published."""
    assert release("chart", "--registry", "registry.example.com/kvist", "--to", str(tmp_path)).returncode == 0
    values = {
        where: yaml.safe_load((where / "values.yaml").read_text())
        for where in (ROOT / "charts" / "kvist", tmp_path / "kvist")
    }
    here, there = values.values()
    assert there == {**here, "registry": "registry.example.com/kvist"}
    refused = release("chart", "--registry", "", "--to", str(tmp_path / "other"))
    assert "set the repository's variable REGISTRY" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_workflows_are_sound() -> None:
    """The workflows pass zizmor in pedantic mode: pinned actions, least privileges, no injection."""
    zizmor = str(Path(sys.executable).with_name("zizmor"))
    command = [zizmor, "--offline", "--persona=pedantic", *map(str, WORKFLOWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_every_action_is_pinned_and_its_version_stated(workflow: Path) -> None:
    """By the hash of a commit, with the tag beside it; the same action at the same commit everywhere."""
    used = re.findall(r"uses: (\S+)@(\S+)(.*)", workflow.read_text())
    assert used
    for action, commit, comment in used:
        assert re.fullmatch(r"[0-9a-f]{40}", commit), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action
    everywhere = {use for file in WORKFLOWS for use in re.findall(r"uses: (\S+)@(\S+)", file.read_text())}
    assert len({action for action, _ in everywhere}) == len(everywhere)


def test_ci_runs_what_a_developer_runs() -> None:
    """The jobs of the workflow together run every target of ``.ci/run``, on the oldest and a new Python."""
    assert "make check test-all" in (ROOT / ".ci" / "run").read_text()
    [needed] = re.findall(r"^test-all: (.*?) *##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    [tests] = re.findall(r"^test: (.*?) *##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    run = {step["run"] for step in jobs["unit"]["steps"] if "run" in step}
    tiers = jobs["tiers"]["strategy"]["matrix"]["tier"]

    assert {"make check", "make coverage"} <= run
    assert jobs["unit"]["strategy"]["matrix"]["python"][0] == "3.11"
    assert sorted([*tiers, "test-unit"]) == sorted({*needed.split(), *tests.split()} - {"test"})


def test_a_release_builds_and_signs_everything() -> None:
    """The wheel, an image of each Dockerfile, and the chart, images with SBOM and provenance."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    matrix = jobs["images"]["strategy"]["matrix"]["include"]
    assert {one["dockerfile"] for one in matrix} == {
        path.name.removesuffix(".Dockerfile") for path in (ROOT / "docker").glob("*.Dockerfile")
    }
    assert {one["image"] for one in matrix} == {"kvist-operator", "kvist-epp"}
    [build] = [step["with"] for step in jobs["images"]["steps"] if step.get("id") == "build"]
    assert (build["sbom"], build["provenance"], build["push"]) == (True, "mode=max", True)
    for job in ("images", "chart"):
        assert any("cosign sign" in step.get("run", "") for step in jobs[job]["steps"]), job
        assert jobs[job]["permissions"]["id-token"] == "write"
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}
