"""``kubectl kvist`` with the real kubectl, API server and operator."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.charts.binaries import kubectl
from tests.cluster.client import Client, Namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operated import account, administrator, operating, pool, until_condition, with_crd

OURS = "inferencepools.kvist.dev"
SECONDS = 60


@dataclass
class Desk:
    """A shell whose PATH has kubectl and the plugin, and whose kubeconfig is about one namespace."""

    path: str
    kubeconfig: Path

    async def run(self, *words: str) -> tuple[int, str, str]:
        """Run kubectl with these words; return exit code, stdout and stderr."""
        environment = {**os.environ, "PATH": self.path, "KUBECONFIG": str(self.kubeconfig), "COLUMNS": "100"}
        process = await asyncio.create_subprocess_exec(
            *(str(kubectl()), *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        async with asyncio.timeout(SECONDS):
            out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()


def desk(plane: ControlPlane, space: Namespace, token: str = "") -> Desk:
    """Return the shell of the administrator, or of an account with this token."""
    named = plane.kubeconfig(f"desk-{space.name}", *([token] if token else []))
    document = json.loads(named.read_text())
    document["contexts"][0]["context"]["namespace"] = space.name
    named.write_text(json.dumps(document))
    scripts = Path(sys.executable).parent
    return Desk(f"{scripts}:{kubectl().parent}:/usr/bin:/bin", named)


@pytest.fixture
async def planned(plane: ControlPlane, admin: Client, space: Namespace, folder: Path) -> AsyncIterator[Desk]:
    """A namespace with a pool that the operator has planned."""
    await with_crd(admin)
    rights = await account(plane, admin, space.name)
    async with operating(folder, rights), administrator(plane) as server:
        path = space.of("kvist.dev", "v1alpha1", "inferencepools")
        await admin.collection(path)
        await admin.ask("POST", path, pool("twig", space.name))
        await until_condition(server, "twig", space.name, "Accepted", status="True")
        yield desk(plane, space)


async def test_kubectl_finds_the_plugin(plane: ControlPlane, space: Namespace) -> None:
    """``kubectl plugin list`` accepts it without a warning, and kubectl passes words and exit code on."""
    here = desk(plane, space)
    code, out, err = await here.run("plugin", "list")
    assert (code, err) == (0, "")
    assert f"{Path(sys.executable).parent}/kubectl-kvist" in out

    assert (await here.run("kvist", "--help"))[1].startswith("usage: kubectl kvist ")
    code, out, err = await here.run("kvist", "pools", "-A", "-n", "other")
    assert (code, out) == (2, "")
    assert "usage: kubectl kvist pools" in err


async def test_pools_and_why_read_what_the_operator_wrote(planned: Desk) -> None:
    """The namespace is that of the context, the only pool needs no name, and the plan has its reasons."""
    code, out, _ = await planned.run("kvist", "pools")
    assert code == 0
    header, line, *_ = out.splitlines()
    assert header.split()[:3] == ["NAME", "MODEL", "ACCELERATOR"]
    assert line.split()[:5] == ["twig", "Qwen/Qwen3-8B", "1", "×", "H100-80GB"]
    assert "[1] no picker runs; kvist why says what the pool waits for" in out

    code, out, _ = await planned.run("kvist", "why")
    assert code == 0
    assert "raise spec.replicas" in out
    assert "maxModelLen" in out.partition("\nwhy\n")[2]
    saved = (await planned.run("get", "kvp", "twig", "-o", "json"))[1]
    file = planned.kubeconfig.with_suffix(".pool")
    file.write_text(saved)
    assert (await planned.run("kvist", "why", "-f", str(file)))[1].partition("conditions")[
        0
    ] == out.partition("conditions")[0]

    completed = await planned.run("__complete", "kvist", "why", "tw")
    assert completed[1].splitlines()[:2] == ["twig", ":4"]


async def test_what_is_missing_is_said_in_one_line(
    plane: ControlPlane, admin: Client, space: Namespace
) -> None:
    """Without rights the line names the right and ``kubectl auth can-i``; without the CRD, the remedy."""
    await with_crd(admin)
    await admin.collection(space.of("kvist.dev", "v1alpha1", "inferencepools"))
    uid = await space.account("poor", [])
    poor = desk(plane, space, plane.keys.token(space.name, "poor", uid, 600))
    for words, verb in ((("pools",), "list"), (("why", "twig"), "get")):
        code, out, err = await poor.run("kvist", *words)
        assert (code, out) == (1, "")
        assert f"kubectl auth can-i {verb} {OURS} -n {space.name}" in err
        assert err.startswith(f"kvist: you may not {verb} {OURS}")

    here = desk(plane, space)
    code, _, err = await here.run("kvist", "why", "twig")
    assert (code, err.count("kvist: ")) == (1, 1)
    assert f"namespace {space.name} has no InferencePool twig" in err
    await admin.uninstall(OURS)
    for words in (("pools",), ("why", "twig")):
        code, _, err = await here.run("kvist", *words)
        assert code == 1
        assert f"kvist: the cluster has no {OURS}: install kvist's CRDs" in err
