"""Rights of the picker at a real API server: the guide's Role, tokens that expire, authorities that
change."""

import asyncio
import itertools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import keys as pki
from tests.cluster.client import GAIE, Client, Namespace
from tests.cluster.control_plane import HOST, ControlPlane
from tests.cluster.following import PODS, POOL, VLLM, Seen, following
from tests.cluster.keys import LEEWAY_SECONDS

from kvist_epp.endpoints.kubernetes.pod_discovery import PodDiscovery
from kvist_kube.connection import Connection, find_cluster, own_namespace
from kvist_kube.informer import InformerTimes

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "kubernetes.md"
OBJECTIVES = "inferenceobjectives.llm-d.ai"
_SERIAL = itertools.count()


def rules_of_the_guide(pool: str) -> list[dict[str, Any]]:
    """The rules of the Role in docs/guides/kubernetes.md, for this pool."""
    found = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    documents = [document for text in found for document in yaml.safe_load_all(text)]
    [role] = [document for document in documents if document["kind"] == "Role"]
    rules: list[dict[str, Any]] = role["rules"]
    for rule in rules:
        if "resourceNames" in rule:
            rule["resourceNames"] = [pool]
    return rules


def token_file(plane: ControlPlane, token: str) -> Path:
    """A file with a token, as a pod has it mounted."""
    path = plane.folder / f"token-{next(_SERIAL)}"
    path.write_text(token)
    return path


async def test_the_role_of_the_guide_is_enough_and_no_more(
    plane: ControlPlane, space: Namespace, admin: Client
) -> None:
    """A service account with exactly the documented rules follows pool, pods and objectives, and can do
    nothing else."""
    await admin.install(GAIE, OBJECTIVES)
    await space.pod("a", "10.0.0.1")
    await space.pool("pool", {"app": "vllm"}, 8000)
    uid = await space.account("kvist-epp", rules_of_the_guide("pool"))
    token = plane.keys.token(space.name, "kvist-epp", uid, 600)
    async with following(plane.kubeconfig("role", token), space, POOL) as seen:
        await seen.stands({"a": ""})
        resources = ("pods", GAIE, OBJECTIVES)
        await seen.until(lambda: all(seen.watch(resource)["watching"] for resource in resources))
        assert [seen.watch(resource)["errors"] for resource in resources] == [{}, {}, {}]
    for path, status in (
        (f"{space.path}/secrets", 403),
        ("/api/v1/namespaces/default/pods", 403),
        (f"{space.path}/pods/a", 403),
        (f"{space.path}/pods", 200),
    ):
        headers = {"Authorization": f"Bearer {token}"}
        await admin.ask("GET", path, expect=(status,), headers=headers)


async def test_a_missing_rule_is_named(
    plane: ControlPlane, space: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the right to list pods the problem names account, rule and namespace; granted, it goes on."""
    await space.pod("a", "10.0.0.1")
    uid = await space.account("poor", [])
    token = plane.keys.token(space.name, "poor", uid, 600)
    async with following(plane.kubeconfig("poor", token), space) as seen:
        await seen.until(lambda: seen.discovery.problem != "")
        problem = seen.discovery.problem
        assert f"system:serviceaccount:{space.name}:poor" in problem
        assert 'apiGroups: [""], resources: ["pods"], verbs: ["list", "watch"]' in problem
        assert seen.fleets == []

        await seen.until(lambda: seen.watch()["errors"]["403"] >= 3)
        warned = [r for r in caplog.records if r.levelno >= logging.WARNING and "pods" in r.message]
        assert len(warned) == 1

        await space.rules("poor", [PODS])
        await seen.stands({"a": ""})
        await seen.until(lambda: seen.discovery.problem == "")


async def test_without_the_right_to_watch_lists_do(plane: ControlPlane, space: Namespace) -> None:
    """A Role with list alone still gives a fleet, by lists, and says what is missing."""
    uid = await space.account("lister", [PODS | {"verbs": ["list"]}])
    token = plane.keys.token(space.name, "lister", uid, 600)
    async with following(plane.kubeconfig("lister", token), space) as seen:
        await seen.until(lambda: "cannot watch resource" in seen.discovery.problem)
        await space.pod("a", "10.0.0.1")
        await seen.stands({"a": ""})


async def test_a_right_that_is_taken_away_takes_no_endpoint_away(
    plane: ControlPlane, space: Namespace
) -> None:
    """Forbidden from one moment to the next, the picker serves on with what it knows."""
    await space.pod("a", "10.0.0.1")
    uid = await space.account("fallen", [PODS])
    token = plane.keys.token(space.name, "fallen", uid, 600)
    async with following(plane.kubeconfig("fallen", token), space, times=InformerTimes(watch=1.0)) as seen:
        await seen.stands({"a": ""})
        await space.rules("fallen", [])
        await seen.until(lambda: "403" in seen.discovery.problem)
        assert [len(fleet) for fleet in seen.fleets] == [1]


async def test_an_expired_token_is_read_again(plane: ControlPlane, space: Namespace) -> None:
    """A token that really expires is a 401 for the next request; the file is read again at once and the fleet
    goes on."""
    await space.pod("a", "10.0.0.1")
    uid = await space.account("short", [PODS])
    file = token_file(plane, plane.keys.token(space.name, "short", uid, 3 - LEEWAY_SECONDS))
    async with following(plane.kubeconfig("short", file), space, times=InformerTimes(watch=1.0)) as seen:
        await seen.stands({"a": ""})
        await seen.until(lambda: "401" in seen.watch()["errors"])
        assert "401" in seen.discovery.problem
        assert [len(fleet) for fleet in seen.fleets] == [1]

        file.write_text(plane.keys.token(space.name, "short", uid, 600))
        await seen.until(lambda: seen.watch()["watching"])
        await space.status("a", ready=False)
        await seen.stands({"a": "not ready"})
        assert seen.discovery.describe()["credentials_renewed"] >= 1


async def test_as_a_pod(plane: ControlPlane, space: Namespace, folder: Path) -> None:
    """In a cluster everything comes from the service account's folder and two variables."""
    uid = await space.account("pod", [PODS])
    await space.pod("a", "10.0.0.1")
    (folder / "token").write_text(plane.keys.token(space.name, "pod", uid, 600))
    (folder / "ca.crt").write_bytes(plane.keys.ca.read_bytes())
    (folder / "namespace").write_text(space.name)
    environment = {"KUBERNETES_SERVICE_HOST": HOST, "KUBERNETES_SERVICE_PORT": str(plane.port)}
    seen = Seen()
    api = Connection(find_cluster(environment, account=folder))
    try:
        discovery = PodDiscovery(api, own_namespace({}, account=folder), VLLM, seen.fleets.append)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(discovery.run())
            await seen.stands({"a": ""})
            task.cancel()
    finally:
        await api.close()


async def test_another_authority(plane: ControlPlane, space: Namespace, folder: Path) -> None:
    """A server of an authority we do not know is a problem, not a fleet; the right one, put in place,
    heals."""
    await space.pod("a", "10.0.0.1")
    other = pki.make(folder)
    way = plane.kubeconfig("stranger")
    document = json.loads(way.read_text())
    document["clusters"][0]["cluster"]["certificate-authority"] = str(other.ca)
    way.write_text(json.dumps(document))
    async with following(way, space) as seen:
        await seen.until(lambda: "certificate" in seen.discovery.problem)
        assert seen.fleets == []

        other.ca.write_bytes(plane.keys.ca.read_bytes())
        await seen.stands({"a": ""})
