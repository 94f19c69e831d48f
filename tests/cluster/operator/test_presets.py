"""Presets on a real API server, under the rights that are shipped."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.client import Client, Namespace, namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operated import QUICK, account, administrator, operating, pool, until_condition, with_crd
from tests.crd.presets import PRESETS

from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.cluster_api import Json
from kvist_operator.cluster.kinds import DEPLOYMENT, POOL, PRESET, Target

pytestmark = pytest.mark.timeout(60)
OLD, NEW = "registry/vllm:v0.32.0", "registry/vllm:v0.33.0"


def preset(space: str, **spec: Any) -> Json:
    """Return a preset that names image and accelerator."""
    return {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "InferencePoolPreset",
        "metadata": {"name": "h100", "namespace": space},
        "spec": {"accelerator": {"product": "H100-80GB"}, **spec},
    }


async def image(server: ApiServer, space: str) -> str:
    """Return the image of the engines as soon as they are there."""
    while True:
        found = await server.get(Target(DEPLOYMENT, space, "twig"))
        if found is not None:
            containers = found["spec"]["template"]["spec"]["containers"]
            return str(next(each["image"] for each in containers if each["name"] == "engine"))
        await asyncio.sleep(0.05)


async def test_an_operator_of_one_namespace_reads_presets_of_its_own(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """With a Role in the team's namespace and the release's Role in its own, the preset is found, a change of
    it waits as pending, and without it the pool says what is missing while its engines stay."""
    await with_crd(admin)
    await admin.install_crds(yaml.safe_load(PRESETS.read_text()))
    team = f"{space.name}-team"
    await namespace(admin, team)
    kubeconfig = await account(plane, admin, space.name, [team])
    flags = (f"--namespaces={team}", f"--lease={space.name}/kvist", *QUICK)
    async with administrator(plane) as server:
        await server.apply(preset(space.name, engine={"image": OLD}))
        made = pool("twig", team, presetRef={"name": "h100"})
        del made["spec"]["accelerator"]
        await server.apply(made)
        async with operating(tmp_path, kubeconfig, *flags):
            assert await image(server, team) == OLD
            await server.apply(preset(space.name, engine={"image": NEW}))
            await until_condition(server, "twig", team, "UpgradePending", reason="WaitingForApproval")
            assert await image(server, team) == OLD
            found = await server.get(Target(POOL, team, "twig"))
            assert found is not None
            [change] = found["status"]["pendingPlan"]["changes"]
            assert change.endswith(f"image: {OLD} → {NEW}")

            await admin.ask("DELETE", PRESET.path(space.name, "h100"))
            await until_condition(server, "twig", team, "Accepted", reason="InvalidSpec")
            assert await image(server, team) == OLD
