"""docs/tutorials/laptop.md, typed from its first line to its last, with ports that are free."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.docs_runner.blocks import Step, blocks
from tests.shapes import ROOT

from kvist_sim.envoy import find_envoy
from kvist_sim.ports import free_ports

TUTORIAL: Final = ROOT / "docs" / "tutorials" / "laptop.md"
ENVOY: Final = ROOT / "docs" / "tutorials" / "laptop-envoy.yaml"
PORTS: Final = ("8001", "8002", "5557", "5558", "5657", "5658", "9002", "9003", "9090", "8080")
"""Every port of the page: of the engines, the picker and Envoy."""
SECONDS: Final = 90
_PORT: Final = re.compile(rf"\b({'|'.join(PORTS)})\b")
NAME: Final = "test_the_laptop_tutorial_does_what_it_says"


def test_the_laptop_tutorial_does_what_it_says(tmp_path: Path) -> None:
    """All commands of the tutorial succeed in one shell, with the output that the page shows: the second
    request finds its prefix, the picker explains itself, and Envoy answers without it."""
    assert shutil.which("curl"), "the tutorial asks with curl: install it"
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))

    def own(text: str) -> str:
        return _PORT.sub(lambda found: ports[found[1]], text)

    _checkout(tmp_path, own(ENVOY.read_text()))
    script = ["set -m -eo pipefail"]
    # a reader is slower than a script, and KV events take a moment
    script += [f"sleep 0.5\n{{ {own(step.command)}\n}} >said-{at}" for at, step in enumerate(steps())]
    code, errors = _typed(tmp_path, "\n".join(script), ports)
    said = [file.read_text() for file in sorted(tmp_path.glob("said-*"), key=_number)]

    logs = "".join(f"{log.name}: {log.read_text()[-500:]}\n" for log in tmp_path.glob("*.log"))
    assert code == 0, f"{steps()[max(len(said) - 1, 0)].command}\n{errors}\n{logs}"
    for step, text in zip(steps(), said, strict=True):
        assert step.agrees(text), f"{step.command}\n{text}"
    explained = json.loads(next(text for text in said if text.startswith("{") and "endpoints" in text))
    assert explained["endpoints"][0]["matched_tokens"] > explained["endpoints"][1]["matched_tokens"] == 0
    counted = re.findall(r"^kvist_epp_true_cached_tokens_total.* ([\d.]+)$", "".join(said), re.MULTILINE)
    assert sum(map(float, counted)) > 1000


def steps() -> list[Step]:
    """Return the commands of all blocks that this test runs, in order."""
    return [step for block in blocks(TUTORIAL) if block.where == ("run by", NAME) for step in block.steps()]


def _number(file: Path) -> int:
    return int(file.name.partition("-")[2])


def _checkout(folder: Path, envoy: str) -> None:
    """Lay out what the commands use of a checkout."""
    tutorials = folder / "docs" / "tutorials"
    tutorials.mkdir(parents=True)
    (tutorials / ENVOY.name).write_text(envoy)
    (folder / "sim").symlink_to(ROOT / "sim")
    (folder / ".venv").symlink_to(sys.prefix)


def _typed(folder: Path, text: str, ports: Mapping[str, str]) -> tuple[int, str]:
    """Run a script in bash with job control, as a terminal has it; return exit code and errors.

    The page leaves two ports of the picker at their defaults; variables set them here.
    """
    (folder / "script.sh").write_text(text)
    programs = [str(Path(sys.executable).parent), str(Path(find_envoy()).parent), os.environ["PATH"]]
    variables = {
        "PATH": os.pathsep.join(programs),
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "KVIST_EPP_GRPC_PORT": ports["9002"],
        "KVIST_EPP_GRPC_HEALTH_PORT": ports["9003"],
        "KVIST_EPP_METRICS_PORT": ports["9090"],
    }
    with (folder / "errors").open("w+") as errors:
        bash = subprocess.Popen(
            ["bash", "script.sh"],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = bash.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            _end(bash.pid)
        errors.seek(0)
        return code, errors.read()[-3000:]


def _end(session: int) -> None:
    """End all processes of a session: each job has a group of its own."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "-s", str(session)], capture_output=True, text=True, check=False
    )
    for pid in listed.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
