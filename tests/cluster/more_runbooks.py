"""Runbooks followed on a real cluster, as in ``test_runbooks``, that take longer (``make bench-alerts``)."""

import asyncio
import base64
import datetime as dt
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio
from tests.cluster.cluster import Cluster
from tests.cluster.observed import SECRET, Observed, observed, operators, remove_certificate, scaled
from tests.cluster.pooled import NAME

from kvist_kube.certificates import CLIENT, SERVER, CertificateAuthority

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
Json = dict[str, Any]
NOWHERE: Final = "registry.example/nowhere/vllm:v0.33.0"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Observed]:
    """A pool under observation that has served."""
    async with observed(cluster, tmp_path_factory.mktemp("prometheus")) as made:
        async with made.twig.load() as load:
            await load.until(40)
        yield made


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def rested(seen: Observed) -> None:
    """Begin each test with a pool that raises no alert."""
    await seen.rested()


async def test_a_pool_at_zero_serves_again(seen: Observed) -> None:
    """A request to a pool without replicas waits and raises the alert; replicas end it and serve."""
    await scaled(seen, 0)

    async def empty() -> bool:
        return not await seen.pods("engine")

    await seen.twig.room.until(empty, "no engine")
    asked = asyncio.create_task(seen.twig.ask("Is there an engine?"))
    await seen.fires("KvistNoReadyEndpoint")
    await scaled(seen, 2)
    await seen.ends("KvistNoReadyEndpoint")
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await seen.twig.until_ready()
    await seen.twig.ask("Is there one now?")


def reading(rule: Json) -> list[str]:
    """Return the verbs of a rule without those that write Deployments."""
    written = {"create", "patch"} if "deployments" in rule["resources"] else set()
    return sorted(set(rule["verbs"]) - written)


async def test_a_right_that_is_missing_is_given_back(seen: Observed) -> None:
    """Without the right to write Deployments a changed pool cannot be reconciled, and a condition names the
    right; with it the pool follows."""
    room, path = seen.twig.room, f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{NAME}"
    role = await room.client.ask("GET", path)
    fewer = [rule | {"verbs": reading(rule)} for rule in role["rules"]]
    merge = {"Content-Type": "application/merge-patch+json"}
    await room.client.ask("PATCH", path, {"rules": fewer}, headers=merge)
    try:
        await seen.twig.patch(engine={"maxNumSeqs": 24})
        await seen.fires("KvistReconcileErrors")
        assert "deployments" in str((await seen.twig.get())["status"]["conditions"])
    finally:
        await room.client.ask("PATCH", path, {"rules": role["rules"]}, headers=merge)
    await seen.ends("KvistReconcileErrors", seconds=90)
    await seen.twig.until_ready()


async def test_a_bad_change_is_undone(seen: Observed) -> None:
    """An image that does not exist keeps the pool from becoming ready; the old image ends the alert."""
    engine = (await seen.twig.get())["spec"]["engine"]
    await seen.twig.patch(engine={"image": NOWHERE, "version": "0.33.0"})
    await seen.fires("KvistPoolNotReady", seconds=90)
    await seen.twig.patch(engine={"image": engine.get("image"), "version": engine.get("version")})
    await seen.ends("KvistPoolNotReady", seconds=90)


async def test_a_key_of_another_certificate_is_replaced(seen: Observed) -> None:
    """Pickers refuse a key that does not fit; the operator makes a pair that does for deleted ones."""
    now = dt.datetime.now(dt.UTC)
    authority = CertificateAuthority("other", now, dt.timedelta(days=3))
    _, key = authority.sign(["other"], now, dt.timedelta(days=3), (SERVER, CLIENT))
    await operators(seen, 0)
    data = {"tls.key": base64.b64encode(key).decode()}
    await seen.twig.room.patch("Secret", SECRET, {"data": data})
    await seen.fires("KvistCertificateRefused", seconds=90)
    await operators(seen, 1)
    await remove_certificate(seen)
    await seen.ends("KvistCertificateRefused", seconds=120)


async def test_an_engine_without_events_is_replaced(seen: Observed) -> None:
    """Engines whose pods say that they publish no KV events are picked by routing history; new pods have
    events again."""
    for pod in await seen.pods("engine"):
        body = {"metadata": {"annotations": {"kvist.dev/kv-events": "false"}}}
        await seen.twig.room.patch("Pod", pod["metadata"]["name"], body)
    await seen.fires("KvistIndexInaccurate")
    await seen.delete_pods("engine")
    async with seen.twig.load():
        await seen.ends("KvistIndexInaccurate", seconds=120)
    await seen.twig.until_ready()


async def test_a_tokenizer_that_cannot_be_had_is_corrected(seen: Observed) -> None:
    """Pickers without a tokenizer use routing history for all endpoints; the right one ends the alert."""
    await seen.twig.patch(picker={"tokenizer": "hf://nowhere/none"})
    await seen.fires("KvistTokenizerUnusable", seconds=120)
    await seen.twig.patch(picker={"tokenizer": None})
    await seen.ends("KvistTokenizerUnusable", seconds=120)
    await seen.twig.until_ready()


async def test_a_picker_without_rights_gets_them_back(seen: Observed) -> None:
    """New pickers without their RoleBinding cannot follow pods; the operator restores it, and they do."""
    await operators(seen, 0)
    await seen.twig.room.remove("RoleBinding", "twig-epp")
    await seen.delete_pods("picker")
    await seen.fires("KvistDiscoveryLost", seconds=90)
    await operators(seen, 1)
    await seen.ends("KvistDiscoveryLost", seconds=90)
    await seen.twig.until_ready()
