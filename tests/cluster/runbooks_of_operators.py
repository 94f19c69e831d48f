"""Runbooks of the operator's alerts followed on a real cluster, as in ``test_runbooks`` (``make
bench-alerts``)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from tests.cluster import observed
from tests.cluster.faults import cut, filtered, processes
from tests.cluster.observed import Observed, scaled
from tests.cluster.pooled import NAME

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
Json = dict[str, Any]
seen, rested = observed.seen, observed.rested
NOWHERE: Final = "registry.example/nowhere/vllm:v0.33.0"
ROLE: Final = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{NAME}"
RESTARTS: Final = "kvist_operator_watch_restarts_total"
API_PORT: Final = 443
"""Of the Service by which pods reach the API server."""


@asynccontextmanager
async def fewer_rights(seen: Observed, resource: str, *verbs: str) -> AsyncIterator[None]:
    """Take verbs on a resource from the operator's ClusterRole; give them back in the end."""
    client, merge = seen.twig.room.client, {"Content-Type": "application/merge-patch+json"}
    rules = (await client.ask("GET", ROLE))["rules"]
    fewer = [
        rule | {"verbs": sorted(set(rule["verbs"]) - set(verbs))} if resource in rule["resources"] else rule
        for rule in rules
    ]
    await client.ask("PATCH", ROLE, {"rules": fewer}, headers=merge)
    try:
        yield
    finally:
        await client.ask("PATCH", ROLE, {"rules": rules}, headers=merge)


def process(seen: Observed) -> int:
    """Return the operator's process."""
    [found] = processes(seen.twig.cluster, "-m kvist_operator")
    return found


async def restart(seen: Observed) -> None:
    """Do what ``kubectl rollout restart deploy/kvist-operator`` does."""
    annotations = {"kubectl.kubernetes.io/restartedAt": "2026-01-01T00:00:00Z"}
    template = {"spec": {"template": {"metadata": {"annotations": annotations}}}}
    await seen.twig.operator.patch("Deployment", NAME, template)
    await seen.twig.operator.rolled_out(NAME)


async def log_of(seen: Observed) -> str:
    """Return what ``kubectl logs deploy/kvist-operator`` does."""
    [pod] = await seen.twig.operator.pods()
    return await seen.twig.operator.log(pod["metadata"]["name"])


async def test_an_operator_whose_calls_hang_is_restarted(seen: Observed) -> None:
    """An operator whose connections lead nowhere reconciles nothing; a restart gives it new ones."""
    with filtered(process(seen), leaving=f"tcp dport {API_PORT} drop"):
        await seen.fires("KvistOperatorNotReconciling")
        await restart(seen)
    await seen.ends("KvistOperatorNotReconciling")


async def test_a_resync_that_is_too_rare_is_corrected(seen: Observed) -> None:
    """An operator that looks at pools less often than the alert expects raises it at rest; a shorter
    ``--resync`` ends it."""
    [container] = (await seen.twig.operator.get("Deployment", NAME))["spec"]["template"]["spec"]["containers"]
    usual = container["args"]
    rare = [arg for arg in usual if not arg.startswith("--resync")] + ["--resync=3600"]
    await observed.restarted(seen.twig.operator, rare)
    await seen.fires("KvistOperatorNotReconciling")
    await observed.restarted(seen.twig.operator, usual)
    await seen.ends("KvistOperatorNotReconciling")


async def test_a_right_to_watch_that_is_missing_is_given_back(seen: Observed) -> None:
    """Without the right to watch Services the watch ends again and again, and the log names the right; with
    it the watch lasts. Connections are cut, as the API server does it after five minutes."""
    async with fewer_rights(seen, "services", "watch"):
        cut(process(seen), API_PORT)
        await seen.fires("KvistOperatorWatchRestarts")
        assert 'cannot watch resource \\"' in await log_of(seen)
    await seen.ends("KvistOperatorWatchRestarts")


async def test_connections_that_are_cut_end_no_watch(seen: Observed) -> None:
    """A proxy that cuts all connections again and again costs no watch: the next one goes on where the last
    one was, and changes are followed."""
    before = await seen.prometheus.query(RESTARTS)
    for replicas in (3, 2, 3, 2):
        cut(process(seen), API_PORT)
        await scaled(seen, replicas)
        await seen.twig.until_ready()
    after = await seen.prometheus.query(RESTARTS)
    assert [each["value"][1] for each in after] == [each["value"][1] for each in before]


async def test_a_right_that_is_missing_is_given_back(seen: Observed) -> None:
    """Without the right to write Deployments a changed pool cannot be reconciled, and a condition names the
    right; with it the pool follows."""
    async with fewer_rights(seen, "deployments", "create", "patch"):
        await seen.twig.patch(engine={"maxNumSeqs": 24})
        await seen.fires("KvistReconcileErrors")
        assert "deployments" in str((await seen.twig.get())["status"]["conditions"])
    await seen.ends("KvistReconcileErrors", seconds=90)
    await seen.twig.until_ready()


async def test_a_bad_change_is_undone(seen: Observed) -> None:
    """An image that does not exist keeps the pool from becoming ready; the old image ends the alert."""
    engine = (await seen.twig.get())["spec"]["engine"]
    await seen.twig.patch(engine={"image": NOWHERE, "version": "0.33.0"})
    await seen.fires("KvistPoolNotReady", seconds=90)
    await seen.twig.patch(engine={"image": engine.get("image"), "version": engine.get("version")})
    await seen.ends("KvistPoolNotReady", seconds=90)
