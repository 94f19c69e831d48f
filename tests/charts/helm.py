"""Runs helm: on the chart alone, or against a cluster."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from tests import examples
from tests.charts import binaries
from tests.charts.generate import CHART

Json = dict[str, Any]
SECONDS: Final = 240
FROZEN: Final = tuple(sorted((Path(__file__).parent / "fixtures").glob("kvist-*.tgz")))
"""Charts as they were released, the oldest first: ``helm package charts/kvist -d tests/charts/fixtures``."""
VALUES: Final = (*sorted((CHART / "ci").glob("*-values.yaml")), *examples.VALUES)
NAMESPACE: Final = "kvist-system"
RELEASE: Final = "kvist"
COMPONENT: Final = "app.kubernetes.io/component"
OPERATOR: Final = "operator"
MODEL_HEADER: Final = "model-header"
"""Components of the chart; `helm test` has one more."""


class HelmError(AssertionError):
    """An error of helm; fails a test that does not expect it."""


def printed(
    command: Sequence[str], environment: Mapping[str, str], seconds: float, error: type[AssertionError]
) -> str:
    """Return the output of a command. Raises ``error`` with the whole output if it fails, TimeoutExpired."""
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    if done.returncode:
        raise error(done.stderr + done.stdout)
    return done.stdout


@dataclass(frozen=True)
class Helm:
    """One major version."""

    major: int
    home: Path
    """What helm keeps."""
    kubeconfig: Path | None = None
    before: Sequence[str] = field(default=())
    """Command that runs it, such as ``nsenter``."""

    def run(self, *words: str) -> str:
        """Return the output of a helm command. Raises HelmError."""
        environment = binaries.environment(self.home)
        if self.kubeconfig:
            environment["KUBECONFIG"] = str(self.kubeconfig)
        command = [*self.before, str(binaries.helm(self.major)), *words]
        return printed(command, environment, SECONDS, HelmError)

    def template(
        self, *words: str, chart: Path = CHART, kubernetes: str = "1.36", release: str = RELEASE
    ) -> list[Json]:
        """Every object, hooks too, as documents; ``kubernetes``: the version it is rendered for."""
        where = ("--namespace", NAMESPACE, "--kube-version", kubernetes)
        return documents(self.run("template", release, str(chart), *where, *words))


def documents(text: str) -> list[Json]:
    """Return the documents of a YAML stream, without empty ones."""
    return [one for one in yaml.safe_load_all(text) if one]


def of_kind(objects: Sequence[Json], kind: str) -> list[Json]:
    """Return the objects of a kind."""
    return [one for one in objects if one["kind"] == kind]


def one(objects: Sequence[Json], kind: str, component: str = OPERATOR) -> Json:
    """The only one of a kind that a component has."""
    [found] = [made for made in of_kind(objects, kind) if made["metadata"]["labels"][COMPONENT] == component]
    return found


def hook(made: Json) -> bool:
    """Whether it is there for ``helm test`` alone."""
    return "helm.sh/hook" in (made["metadata"].get("annotations") or {})


def settings(**values: Any) -> tuple[str, ...]:
    """``--set-json`` for each; ``a__b`` is ``a.b``."""
    return tuple(
        word
        for name, value in values.items()
        for word in ("--set-json", f"{name.replace('__', '.')}={json.dumps(value)}")
    )
