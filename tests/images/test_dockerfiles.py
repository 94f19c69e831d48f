"""Promises of the Dockerfiles that can be read off them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.images.build import PATH, ROOT
from tests.images.dockerfile import Copy, Stage, read
from tests.test_packaging import PROJECT

from kvist_epp.settings.settings import Settings as PickerSettings
from kvist_operator.manifests.picker import USER
from kvist_operator.process.settings import OperatorSettings

FOLDER = ROOT / "docker"
IMAGES = {"operator": "operator", "picker": "epp"}
"""Name of the Dockerfile → extra of the package."""
EXTRAS = PROJECT["project"]["optional-dependencies"]


def dockerfile(name: str) -> Path:
    """Return the path of an image's Dockerfile."""
    return FOLDER / f"{name}.Dockerfile"


def stages(name: str) -> list[Stage]:
    """Return the stages of an image's Dockerfile as a release builds it."""
    return read(dockerfile(name), {"VERSION": "1.2.3"}, path_variable=PATH)


@pytest.mark.parametrize("name", IMAGES)
def test_hadolint_has_nothing_to_say(name: str) -> None:
    """Hadolint has no findings, not even of style."""
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [str(hadolint), "--failure-threshold=style", str(dockerfile(name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_slim_and_not_root(name: str) -> None:
    """Two stages on one pinned base; the last one takes only the finished environment from the first, runs
    as the numbered user that the pods of the operator name, and has labels."""
    first, last = stages(name)
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", first.base)
    assert last.base == first.base
    assert [step for step in last.steps if isinstance(step, Copy)] == [
        Copy(("/opt/kvist",), "/opt/kvist", first.name)
    ]
    assert last.user == f"{USER}:{USER}"
    assert last.labels["org.opencontainers.image.version"] == "1.2.3"
    assert last.labels["org.opencontainers.image.base.name"] == last.base
    assert last.labels["org.opencontainers.image.licenses"] == PROJECT["project"]["license"]


def test_the_base_is_a_python_that_is_tested() -> None:
    """The images' Python is the oldest that the package allows, on which all tests and figures are."""
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert {stage.base.partition("-")[0] for name in IMAGES for stage in stages(name)} == {f"python:{oldest}"}


def test_images_start_the_commands_that_pods_name() -> None:
    """Images start the commands that pods name, and expose the ports on which these listen."""
    operator, picker = stages("operator")[-1], stages("picker")[-1]
    told = PickerSettings()
    ports = (told.grpc_port, told.grpc_health_port, told.replica_port, told.metrics_port)
    assert (operator.entrypoint, operator.ports) == (("kvist-operator",), (OperatorSettings().metrics_port,))
    assert (picker.entrypoint, picker.ports) == (("kvist-epp",), ports)


@pytest.mark.parametrize("name", IMAGES)
def test_the_builder_sees_a_wheel_and_a_lock(name: str) -> None:
    """.dockerignore lets through what is copied, and nothing else."""
    [step] = [step for step in stages(name)[0].steps if isinstance(step, Copy)]
    assert step.sources == (f"docker/{name}.lock", "dist/kvist-*.whl")
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules == ["*", "!dist/*.whl", "!docker/*.lock"]


@pytest.mark.parametrize(("name", "extra"), IMAGES.items())
def test_the_lock_holds_what_the_extra_asks_for(name: str, extra: str) -> None:
    """Each requirement at one version within its bounds, each with hashes; `make lock` writes it again."""
    text = (FOLDER / f"{name}.lock").read_text().replace("\\\n", " ")
    pins = versions(FOLDER / f"{name}.lock")
    for wanted in map(Requirement, EXTRAS[extra]):
        assert pins[canonicalize_name(wanted.name)] in wanted.specifier, str(wanted)
    assert all("--hash=sha256:" in line for line in text.splitlines())


def test_images_share_what_both_need() -> None:
    """One version of a package in both images, so that nodes keep one and tests mean both."""
    locks = [versions(FOLDER / f"{name}.lock") for name in IMAGES]
    both = locks[0].keys() & locks[1].keys()
    assert {name: (locks[0][name], locks[1][name]) for name in both if locks[0][name] != locks[1][name]} == {}


def versions(path: Path) -> dict[str, str]:
    """Package → version."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", path.read_text(), re.MULTILINE))
