"""Commands that an administrator types: helm and kubectl, in the cluster's network."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.charts import binaries
from tests.charts.generate import ROOT
from tests.charts.helm import Helm, printed
from tests.cluster.cluster import Cluster

Json = dict[str, Any]
EXAMPLES: Final = ROOT / "examples"
SECONDS: Final = 120


class CommandError(AssertionError):
    """Output of a failed command; it fails a test that does not expect it."""


@dataclass(frozen=True)
class Commands:
    """Commands of one administrator of one cluster."""

    cluster: Cluster
    home: Path

    async def helm(self, *words: str) -> str:
        """Run helm and return its output. Raises HelmError."""
        made = Helm(4, self.home, self.kubeconfig, before=self.inside)
        return await asyncio.to_thread(made.run, *words)

    async def kubectl(self, *words: str) -> str:
        """Run kubectl and return its output. Raises CommandError."""
        command = [*self.inside, str(binaries.kubectl()), f"--kubeconfig={self.kubeconfig}", *words]
        environment = binaries.environment(self.home)
        return await asyncio.to_thread(printed, command, environment, SECONDS, CommandError)

    async def apply(self, example: str, namespace: str, *patches: Json) -> str:
        """``kubectl apply`` of a folder below examples/, with patches of kustomize over it."""
        folder = self.home / namespace / example
        ignored = shutil.ignore_patterns("README.md", "*-*")
        shutil.copytree(EXAMPLES / example, folder, ignore=ignored, dirs_exist_ok=True)
        files = sorted(path.name for path in folder.glob("*.yaml"))
        (folder / "kustomization.yaml").write_text(json.dumps({"resources": files, "patches": patches}))
        return await self.kubectl("apply", f"--namespace={namespace}", "-k", str(folder))

    @property
    def inside(self) -> Sequence[str]:
        """Return the words that run a command in the cluster's network."""
        return ("nsenter", "--target", str(self.cluster.first), "--net")

    @property
    def kubeconfig(self) -> Path:
        """Return the path of an administrator's kubeconfig."""
        return self.cluster.folder / "components.kubeconfig"


def patch(kind: str, **values: Any) -> Json:
    """A patch of kustomize for every object of a kind: ``a__b`` is ``/a/b``, there or not."""
    steps = [
        {"op": "add", "path": f"/{name.replace('__', '/')}", "value": value} for name, value in values.items()
    ]
    return {"target": {"kind": kind}, "patch": json.dumps(steps)}
