"""Run the commands of documents: bash in the cluster's network, with helm, kubectl and curl.

What is there is what a checkout has, but for the pools: their model is the simulator's, since nothing here
reaches a hub, and one engine and one picker do. One thing is not the real one: ``kubectl port-forward``,
whose streams the tests' kubelet does not have (``forward.py``).
"""

import asyncio
import os
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from tests.charts import binaries
from tests.cluster.pooled import CONFIG, MODEL, PICKERS
from tests.docs_runner.blocks import Block, Step
from tests.docs_runner.running import WrongError
from tests.e2e.commands import Commands
from tests.e2e.edge import CLUSTER_IP
from tests.examples import EXAMPLES, is_pool
from tests.golang import GoError
from tests.shapes import ROOT

Json = dict[str, Any]
SECONDS: Final = 150.0
LASTING: Final = "&"
"""At the end of a command that goes on beside the next ones."""
_SETTINGS: Final = "set -euo pipefail\n"


@dataclass(frozen=True)
class Desk:
    """The workplace of one administrator who looks at one namespace, in an empty folder."""

    commands: Commands
    namespace: str
    folder: Path

    def lay(self) -> None:
        """Programs, cluster and files. Ports of ``localhost`` are all desks': who opens one holds a lock.

        Raises GoError when there is no curl.
        """
        if shutil.which("curl") is None:
            raise GoError("commands of documents ask with curl: install it")
        programs = self.folder / "bin"
        programs.mkdir(parents=True)
        _program(programs / "helm", f'exec {binaries.helm(4)} "$@"')
        kubectl, forward = binaries.kubectl(), f"{sys.executable} -m tests.e2e.forward"
        _program(
            programs / "kubectl",
            f'case " $* " in *" port-forward "*) PYTHONPATH={ROOT} exec {forward} {kubectl} "$@" ;; esac\n'
            f'exec {kubectl} "$@"',
        )
        config = yaml.safe_load(self.commands.kubeconfig.read_text())
        for context in config["contexts"]:
            context["context"]["namespace"] = self.namespace
        (self.folder / "kubeconfig").write_text(yaml.safe_dump(config))
        for name in ("charts", "crds", "docs"):
            (self.folder / name).symlink_to(ROOT / name)
        _examples(self.folder / "examples")

    async def run(self, block: Block) -> None:
        """Every command of a block. Raises WrongError."""
        steps = block.steps()
        said = [self.folder / f"{block.line}-{number}" for number in range(len(steps))]
        script = self.folder / f"{block.line}.sh"
        lock = f"exec 9>>{self.folder.parent / 'ports.lock'}\n"
        script.write_text(
            _SETTINGS + lock + "".join(self._typed(*each) for each in zip(steps, said, strict=True))
        )
        code, complaints = await self._bash(script)
        texts = [file.read_text() for file in said if file.exists()]
        if code:
            last = steps[max(len(texts) - 1, 0)].command
            raise WrongError(f"{block.name}: {last}\nexit code {code}\n{''.join(texts[-1:])}{complaints}")
        for step, text in zip(steps, texts, strict=True):
            if not step.agrees(text):
                raise WrongError(f"{block.name}: {step.command}\n{text}")

    def _typed(self, step: Step, said: Path) -> str:
        """One command; who reads on waits until one that goes on has begun to speak."""
        if not step.command.rstrip().endswith(LASTING):
            return f"{{ {step.command}\n}} >{said}\n"
        waits = f"until [ -s {said} ]; do kill -0 $!; sleep 0.1; done\n"
        return f"flock 9\n{{ {step.command}\n}} >{said} 9>&-\n{waits}"

    async def _bash(self, script: Path) -> tuple[int, str]:
        """Exit code and complaints; whatever the script has started ends with it."""
        words = (*self.commands.inside, "bash", str(script))
        complaints = script.with_suffix(".err")
        with complaints.open("w") as errors:
            bash = await asyncio.create_subprocess_exec(
                *words,
                cwd=self.folder,
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        try:
            code = await asyncio.wait_for(bash.wait(), SECONDS)
        except TimeoutError:
            code = -1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(bash.pid, signal.SIGKILL)
        return code, complaints.read_text()[-2000:]

    def _environment(self) -> dict[str, str]:
        found = binaries.environment(self.folder)
        path = os.pathsep.join((str(self.folder / "bin"), found["PATH"]))
        return {
            **found,
            "PATH": path,
            "LANG": "C.UTF-8",
            "KUBECONFIG": str(self.folder / "kubeconfig"),
            "HF_TOKEN": "hf_nobody",
        }


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _examples(folder: Path) -> None:
    shutil.copytree(EXAMPLES, folder)
    for path in folder.rglob("*.yaml"):
        documents = list(yaml.safe_load_all(path.read_text()))
        changed = [_changed(one) for one in documents if one and "kind" in one]
        if any(changed):
            path.write_text(yaml.safe_dump_all(documents, sort_keys=False))


def _changed(document: Json) -> bool:
    """Whether it was something that cannot be here as it is."""
    if document["kind"] == "EnvoyProxy":
        document["spec"] |= {"provider": CLUSTER_IP, "concurrency": 1}
        return True
    if not is_pool(document):
        return False
    spec = document["spec"]
    spec["model"] |= {"shape": {"config": CONFIG}}
    if not spec["model"]["source"].startswith("pvc:"):
        spec["model"]["source"] = MODEL
    spec["picker"] = spec.get("picker", {}) | {"replicas": 1, "resources": PICKERS}
    if "replicas" in spec:
        spec["replicas"] = 1
    return True
