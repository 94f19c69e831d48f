"""A release in a whole cluster: its pod runs, its test passes, and pools serve whatever becomes of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.charts.generate import CHART
from tests.charts.helm import FROZEN, RELEASE, Helm, HelmError, settings
from tests.cluster.cluster import Cluster
from tests.cluster.pooled import Served, pool, until_ready
from tests.cluster.space import Space

pytestmark = pytest.mark.timeout(600)
Json = dict[str, Any]
WAIT = ("--wait", "--timeout", "180s")
QUICK = settings(extraArgs=["--discovery-interval=2"])


class Installed:
    """A release in a namespace that admits restricted pods alone."""

    def __init__(self, helm: Helm, cluster: Cluster, space: Space) -> None:
        self.space = space
        inside = ("nsenter", "--target", str(cluster.first), "--net")
        self._helm = replace(helm, before=inside, kubeconfig=cluster.folder / "components.kubeconfig")

    async def run(self, verb: str, *words: str) -> str:
        """A command about it. Raises HelmError."""
        where = ("--namespace", self.space.name)
        return await asyncio.to_thread(self._helm.run, verb, RELEASE, *words, *where)

    async def upgrade(self, chart: Path, *words: str) -> None:
        """Installed, or something else than before; its pod is ready."""
        await self.run("upgrade", str(chart), "--install", *WAIT, *QUICK, *words)
        await self.space.rolled_out("kvist-operator")


@asynccontextmanager
async def released(helm: Helm, cluster: Cluster) -> AsyncIterator[Installed]:
    """Nothing is installed yet; in the end nothing is left but the CRD."""
    async with cluster.client() as admin, cluster.space(admin) as space:
        made = Installed(helm, cluster, space)
        try:
            yield made
        finally:
            await made.run("uninstall", "--ignore-not-found")
            await admin.uninstall("inferencepools.kvist.dev")
            await admin.uninstall("inferencepoolpresets.kvist.dev")


async def test_pools_serve_through_install_upgrade_and_uninstall(helm: Helm, cluster: Cluster) -> None:
    """From the oldest release on: its operator makes a pool, `helm test` passes, and from the first answer on
    no request fails, while the chart of today is put in its place and taken away again."""
    async with released(helm, cluster) as release:
        await release.upgrade(FROZEN[0])
        assert "Phase:          Succeeded" in await release.run("test", "--timeout", "120s")
        assert [
            p["metadata"]["name"] for p in await release.space.pods() if "test" in p["metadata"]["name"]
        ] == []
        client = release.space.client
        async with cluster.space(client) as room:
            await room.apply(pool("twig"))
            await until_ready(room, "twig")
            twig = Served(cluster, room, release.space)
            before = {pod["metadata"]["uid"] for pod in await twig.engines()}
            async with twig.load() as load:
                await load.until(20)
                await release.upgrade(CHART)
                await load.until(20)
                assert "Phase:          Succeeded" in await release.run("test", "--timeout", "120s")
                await release.run("uninstall", "--wait")
                await load.until(20)
            assert load.failures == []
            assert {pod["metadata"]["uid"] for pod in await twig.engines()} == before


async def test_the_test_fails_where_no_pool_can_be_made(helm4: Helm, cluster: Cluster) -> None:
    """Without the CRD the operator is not ready and says so; `helm test` fails and says why."""
    async with released(helm4, cluster) as release:
        await release.run("install", str(CHART), *settings(crds__enabled=False))
        with pytest.raises(HelmError):
            await release.run("test", "--timeout", "150s")

        async def told() -> bool:
            said = "\n".join(release.space.tail("kvist-test"))
            return "not ready within" in said

        await release.space.until(told, "why the test failed")


async def test_those_who_may_edit_a_namespace_may_make_pools(helm4: Helm, cluster: Cluster) -> None:
    """The cluster's own roles take in the chart's: `edit` writes pools, `view` reads them."""
    async with released(helm4, cluster) as release:
        await release.upgrade(CHART)
        for role in ("edit", "view"):
            await release.space.apply(bound(role))
        for role, verb, wanted in (
            ("edit", "create", True),
            ("view", "list", True),
            ("view", "create", False),
        ):

            async def judged(role: str = role, verb: str = verb, wanted: bool = wanted) -> bool:
                return await may(release.space, role, verb) is wanted

            await release.space.until(judged, f"{role} may {verb}: {wanted}")


def bound(role: str) -> Json:
    """The user of the same name has this ClusterRole in the namespace."""
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": role},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": group, "kind": "User", "name": role}],
    }


async def may(space: Space, user: str, verb: str) -> bool:
    """Return whether the API server allows the verb on pools to the user."""
    attributes = {"namespace": space.name, "group": "kvist.dev", "resource": "inferencepools", "verb": verb}
    body = {"spec": {"user": user, "resourceAttributes": attributes}}
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool((await space.client.ask("POST", path, body))["status"]["allowed"])
