"""A release in a real API server: what is made, upgraded, left and taken over."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.charts.generate import CHART, CRD
from tests.charts.helm import FROZEN, RELEASE, Helm, HelmError, settings
from tests.cluster.client import Client, Namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.foreign import crds
from tests.cluster.operated import operating

from kvist_operator.process import selftest

pytestmark = pytest.mark.timeout(400)
Json = dict[str, Any]
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAME = "inferencepools.kvist.dev"
MERGE = {"Content-Type": "application/merge-patch+json"}
RESTRICTED = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}


class Release:
    """One release in one namespace of a test."""

    def __init__(self, helm: Helm, plane: ControlPlane, space: Namespace) -> None:
        self.space = space
        self._helm = replace(helm, kubeconfig=plane.kubeconfig(f"helm-{space.name}"))

    async def run(self, verb: str, *words: str) -> str:
        """A command about it. Raises HelmError."""
        where = ("--namespace", self.space.name)
        return await asyncio.to_thread(self._helm.run, verb, RELEASE, *words, *where)

    async def found(self, path: str, *, everywhere: bool = False) -> Json | None:
        """An object of a group and version, in the release's namespace or of the cluster; None: not there."""
        group, plural, name = path.rsplit("/", 2)
        within = "" if everywhere else f"/namespaces/{self.space.name}"
        answer = await self.space.client.ask("GET", f"/{group}{within}/{plural}/{name}", expect=(200, 404))
        return None if answer.get("code") == 404 else answer

    async def crd(self) -> Json | None:
        """Return the object in its present state."""
        answer = await self.space.client.ask("GET", f"{CRDS}/{NAME}", expect=(200, 404))
        return None if answer.get("code") == 404 else answer

    async def pool(self, name: str) -> Json:
        """A new pool."""
        path = self.space.of("kvist.dev", "v1alpha1", "inferencepools")
        await self.space.client.collection(path)
        body = {**selftest.SAMPLE_POOL, "metadata": {"name": name}}
        return await self.space.client.ask("POST", path, body, params={"fieldValidation": "Strict"})


@pytest.fixture
async def release(helm: Helm, plane: ControlPlane, space: Namespace, admin: Client) -> AsyncIterator[Release]:
    """Yield a release, not installed yet, in a namespace with Pod Security *restricted*; remove it later."""
    await admin.ask("PATCH", f"/api/v1/namespaces/{space.name}", RESTRICTED, headers=MERGE)
    made = Release(helm, plane, space)
    yield made
    await made.run("uninstall", "--ignore-not-found")
    await admin.uninstall(NAME)
    await admin.uninstall("inferencepoolpresets.kvist.dev")


DEPLOYMENT = "apis/apps/v1/deployments/kvist-operator"
MADE = (
    *(DEPLOYMENT, "api/v1/services/kvist-operator", "api/v1/serviceaccounts/kvist-operator"),
    "apis/networking.k8s.io/v1/networkpolicies/kvist-operator",
)
CLUSTER = (
    "apis/rbac.authorization.k8s.io/v1/clusterroles/kvist-operator",
    "apis/rbac.authorization.k8s.io/v1/clusterrolebindings/kvist-operator",
    "apis/rbac.authorization.k8s.io/v1/clusterroles/kvist-edit",
)


async def there(release: Release) -> list[bool]:
    """Whether each object of it is."""
    own = [await release.found(path) for path in MADE]
    return [
        found is not None for found in [*own, *[await release.found(p, everywhere=True) for p in CLUSTER]]
    ]


async def test_a_release_comes_changes_and_goes(release: Release, helm: Helm) -> None:
    """Everything is made and its pod admitted under *restricted*; an upgrade changes what was said and no
    more; afterwards CRD and pools are left, and the next release takes them over."""
    await release.run("install", str(CHART))
    assert all(await there(release))
    crd = await release.crd()
    assert crd is not None
    assert (
        crd["spec"]["versions"][0]["schema"]
        == yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]
    )
    first = await release.found(DEPLOYMENT)
    assert first is not None
    await admitted(release.space, first)
    assert {entry["operation"] for entry in first["metadata"]["managedFields"]} == {operation(helm)}

    pool = await release.pool("twig")
    await release.run("upgrade", str(CHART), *settings(log__level="debug"))
    second = await release.found(DEPLOYMENT)
    assert second is not None
    assert "--log-level=debug" in second["spec"]["template"]["spec"]["containers"][0]["args"]
    assert second["metadata"]["generation"] == first["metadata"]["generation"] + 1
    after = await release.crd()
    assert after is not None
    assert after["metadata"]["generation"] == crd["metadata"]["generation"]

    assert "inferencepools.kvist.dev" in await release.run("uninstall")
    assert not any(await there(release))
    kept = await release.found("apis/kvist.dev/v1alpha1/inferencepools/twig")
    assert kept is not None
    assert kept["metadata"]["uid"] == pool["metadata"]["uid"]

    await release.run("install", str(CHART))
    again = await release.found("apis/kvist.dev/v1alpha1/inferencepools/twig")
    assert again is not None
    assert again["metadata"]["uid"] == pool["metadata"]["uid"]


def operation(helm: Helm) -> str:
    """Return how helm writes: server-side apply since helm 4."""
    return "Apply" if helm.major == 4 else "Update"


async def admitted(space: Namespace, deployment: Json) -> None:
    """The API server takes a pod of this template."""
    body = {**deployment["spec"]["template"], "apiVersion": "v1", "kind": "Pod"}
    body["metadata"] = {**body["metadata"], "name": "trial"}
    await space.client.ask("POST", f"{space.path}/pods", body, params={"dryRun": "All"})


async def test_a_release_with_a_crd_that_it_does_not_own(release: Release, admin: Client) -> None:
    """A CRD that was applied by hand is refused, by its name; left alone with crds.enabled=false; taken over
    when asked for, pools and all."""
    await admin.install_crds(yaml.safe_load(CRD.read_text()))
    with pytest.raises(HelmError, match=r"inferencepools\.kvist\.dev"):
        await release.run("install", str(CHART))
    await release.run("uninstall", "--ignore-not-found")
    await release.run("install", str(CHART), *settings(crds__enabled=False))
    await release.pool("twig")
    untouched = await release.crd()
    assert untouched is not None
    assert "annotations" not in untouched["metadata"]

    await release.run("upgrade", str(CHART), "--take-ownership", *settings(crds__enabled=True))
    taken = await release.crd()
    assert taken is not None
    assert taken["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    await release.run("upgrade", str(CHART), *settings(crds__enabled=False))
    assert await release.found("apis/kvist.dev/v1alpha1/inferencepools/twig")


async def test_what_is_installed_is_enough_for_the_operator(
    release: Release, plane: ControlPlane, space: Namespace, folder: Path
) -> None:
    """With the token of its account and the flags of its pod the real operator becomes ready and writes the
    status of a pool; in one namespace alone, without a ClusterRole, too."""
    for values in (settings(), settings(watchNamespaces=[space.name])):
        await release.run("upgrade", str(CHART), "--install", *values)
        account = await release.found("api/v1/serviceaccounts/kvist-operator")
        deployment = await release.found(DEPLOYMENT)
        assert account is not None
        assert deployment is not None
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        flags = [flag for flag in container["args"] if not flag.startswith("--metrics-port=")]
        token = plane.keys.token(space.name, "kvist-operator", str(account["metadata"]["uid"]), 3000)
        name = f"pool-{len(values)}"
        await release.pool(name)
        async with operating(folder, plane.kubeconfig("operator", token), *flags):
            while not await planned(release, name):
                await asyncio.sleep(0.1)


async def planned(release: Release, name: str) -> bool:
    """Whether a pool has been looked at."""
    found = await release.found(f"apis/kvist.dev/v1alpha1/inferencepools/{name}")
    assert found is not None
    return bool(found.get("status", {}).get("conditions"))


async def test_a_podmonitor_is_made_where_there_is_one(release: Release, admin: Client) -> None:
    """In a cluster with the Prometheus operator's own CRD, without being asked for; taken away when it is
    not wanted."""
    [monitors] = [crd for crd in crds() if crd["spec"]["names"]["kind"] == "PodMonitor"]
    path = "apis/monitoring.coreos.com/v1/podmonitors/kvist-operator"
    await admin.install_crds(monitors)
    try:
        await release.run("install", str(CHART), *settings(metrics__podMonitorLabels={"prometheus": "main"}))
        found = await release.found(path)
        assert found is not None
        assert found["metadata"]["labels"]["prometheus"] == "main"
        await release.run("upgrade", str(CHART), *settings(metrics__podMonitor="Disabled"))
        assert await release.found(path) is None
    finally:
        await admin.uninstall(monitors["metadata"]["name"])


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda file: file.stem)
async def test_an_older_release_is_upgraded(release: Release, frozen: Path, helm: Helm) -> None:
    """From each chart that was ever released: nothing immutable has changed, the CRD is brought up to date,
    and pools are the same objects as before. A rollback works as well."""
    await release.run("install", str(frozen))
    pool = await release.pool("twig")
    await release.run("upgrade", str(CHART), "--reset-then-reuse-values")
    assert all(await there(release))
    crd = await release.crd()
    assert crd is not None
    assert crd["spec"]["versions"] == served(crd, CRD)
    await release.run("rollback", "1")
    found = await release.found("apis/kvist.dev/v1alpha1/inferencepools/twig")
    assert found is not None
    assert (found["metadata"]["uid"], found["spec"]) == (pool["metadata"]["uid"], pool["spec"])


def served(crd: Json, file: Path) -> list[Json]:
    """The versions of a file, as the API server would hand them out: what it adds is taken from there."""
    wanted = yaml.safe_load(file.read_text())["spec"]["versions"]
    return [{**there, **want} for there, want in zip(crd["spec"]["versions"], wanted, strict=True)]


def test_there_is_an_older_release() -> None:
    """Else the test above would be empty; what was released is never changed."""
    assert [file.name for file in FROZEN][:1] == ["kvist-0.1.0.tgz"]
