"""Each Dockerfile is carried out, and its image serves: not as root, on a root that is read only."""

import functools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.cluster.client import Client, Namespace
from tests.cluster.conftest import admin, plane, space
from tests.cluster.control_plane import HOST, ControlPlane
from tests.cluster.operated import ACCOUNT, account, with_crd
from tests.images.build import ROOT, Start, script
from tests.images.test_dockerfiles import stages

from kvist_sim.http1 import answers
from kvist_sim.ports import free_ports
from kvist_sim.processes import Children

__all__ = ["admin", "plane", "space"]
pytestmark = pytest.mark.timeout(600)
SECONDS = 400.0
"""To install some fifty packages on a machine that has other things to do."""
MOST_MIB = {"operator": 280, "picker": 380}
"""A third or more of either is the official Kubernetes client: its models, twice, and their bytecode. numpy
and its BLAS are 60 MiB of the picker (docs/decisions/0024)."""
IDENTITY = "/run/secrets/kubernetes.io/serviceaccount"


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a build context with what a builder needs: the locks, and the wheel of `make build`."""
    made = tmp_path_factory.mktemp("context")
    (made / "docker").symlink_to(ROOT / "docker")
    to = ("--outdir", str(made / "dist"), str(ROOT))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", *to]
    subprocess.run(command, check=True, capture_output=True)
    return made


async def served(folder: Path, name: str, context: Path, start: Start, port: int, page: str) -> str:
    """Build and run until the page answers; the log."""
    argv = script(stages(name), context, folder / "work", start)
    (folder / "work").mkdir()
    async with Children(folder) as children:
        child = children.start(name, argv)
        await children.ready(child, functools.partial(answers, HOST, port, page), SECONDS)
        return log(folder, name)


def log(folder: Path, name: str) -> str:
    """Return the log of a child process."""
    return "\n".join(path.read_text() for path in folder.glob(f"{name}*.log"))


def flags(**values: object) -> Sequence[str]:
    """``a_b=c`` is ``--a-b=c``."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def small(said: str, name: str) -> None:
    """The environment is smaller than its bounds; its size is printed."""
    [size] = re.findall(r"site-packages KiB: (\d+)", said)
    [count] = re.findall(r"packages: (\d+)", said)
    print(f"{name}: {int(size) / 1024:.0f} MiB in {count} packages")  # noqa: T201 - shown by -rP
    assert int(size) / 1024 < MOST_MIB[name]


async def test_the_picker_s_image_serves(tmp_path: Path, context: Path) -> None:
    """From the built wheel and its lock alone, as user 65532, writing nowhere but /tmp."""
    endpoints = tmp_path / "endpoints.yaml"
    endpoints.write_text("endpoints:\n  - {name: a, address: 127.0.0.1, port: 1}\n")
    grpc, health, metrics = free_ports(3)
    ports = flags(host=HOST, grpc_port=grpc, grpc_health_port=health, metrics_port=metrics)
    start = Start([*ports, "--endpoints-file=/tmp/endpoints.yaml"], files={"/tmp/endpoints.yaml": endpoints})
    small(await served(tmp_path, "picker", context, start, metrics, "/healthz"), "picker")


async def test_the_operator_s_image_serves(
    tmp_path: Path, context: Path, plane: ControlPlane, space: Namespace, admin: Client
) -> None:
    """The operator's image becomes ready on a cluster: it has found its CRD, its rights and all pools."""
    await with_crd(admin)
    await account(plane, admin, space.name)
    made = await admin.ask("GET", f"{space.path}/serviceaccounts/{ACCOUNT}")
    token, name = tmp_path / "token", tmp_path / "namespace"
    token.write_text(plane.keys.token(space.name, ACCOUNT, str(made["metadata"]["uid"]), 3000))
    name.write_text(space.name)
    [port] = free_ports(1)
    start = Start(
        flags(metrics_host=HOST, metrics_port=port),
        environment={"KUBERNETES_SERVICE_HOST": HOST, "KUBERNETES_SERVICE_PORT": str(plane.port)},
        files={
            f"{IDENTITY}/token": token,
            f"{IDENTITY}/namespace": name,
            f"{IDENTITY}/ca.crt": plane.keys.ca,
        },
    )
    try:
        small(await served(tmp_path, "operator", context, start, port, "/readyz"), "operator")
    finally:
        await admin.uninstall("inferencepools.kvist.dev")
