"""Runbooks followed on a real cluster: a fault is injected, the alert fires in a real Prometheus, the steps
of docs/guides/alerts.md are taken, and the alert ends.

Rules run in quick motion (``prometheus.QUICK``). The tests share one pool, in order, and each leaves it as it
was.
"""

import base64
import datetime as dt
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.cluster.cluster import Cluster
from tests.cluster.observed import SECRET, Observed, long_requests, observed, operators, remove_certificate

from kvist_kube.certificates import CLIENT, SERVER, CertificateAuthority
from kvist_operator.manifests.envoy import CONFIG_FILE

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
Json = dict[str, Any]


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


async def test_full_kv_caches_are_relieved(seen: Observed) -> None:
    """Outputs without an end fill batch and KV cache of both engines, so that the picker holds requests back;
    clients that set max_tokens end all three alerts."""
    async with long_requests(seen, 40, 1500):
        await seen.fires("KvistKvCacheHigh", seconds=90)
        await seen.fires("KvistKvCacheCritical")
        await seen.fires("KvistNoRoom")
    async with long_requests(seen, 10, 10):
        for alert in ("KvistNoRoom", "KvistKvCacheCritical", "KvistKvCacheHigh"):
            await seen.ends(alert)


async def test_a_hanging_engine_is_replaced(seen: Observed) -> None:
    """An engine that stops answering is unreachable; deleting its pod brings another one."""
    assert seen.signal(signal.SIGSTOP, "kvist_sim.engine", 1) == 1
    await seen.fires("KvistEndpointUnreachable")
    await seen.delete_pods("engine")
    await seen.ends("KvistEndpointUnreachable")
    await seen.twig.until_ready()


async def test_pickers_that_hang_are_replaced(seen: Observed) -> None:
    """Pickers that stop answering are gone for Prometheus, and Envoy routes without them; deleting their pods
    ends both alerts."""
    async with seen.twig.load():
        assert seen.signal(signal.SIGSTOP, "-m kvist_epp ") == 2
        await seen.fires("KvistPickerDown")
        await seen.fires("KvistGatewayWithoutPicker")
        await seen.delete_pods("picker")
        await seen.ends("KvistPickerDown")
        await seen.ends("KvistGatewayWithoutPicker")
    await seen.twig.until_ready()


async def test_an_operator_that_is_gone_comes_back(seen: Observed) -> None:
    """Without an operator the alert fires; scaling its Deployment ends it."""
    await operators(seen, 0)
    await seen.fires("KvistOperatorDown")
    await operators(seen, 1)
    await seen.ends("KvistOperatorDown")


async def test_a_certificate_is_renewed(seen: Observed) -> None:
    """A certificate of three days raises the alert; the operator makes another for deleted ones."""
    now = dt.datetime.now(dt.UTC)
    secret = await seen.twig.room.get("Secret", SECRET)
    names = [f"twig-epp.{seen.twig.room.name}.svc", f"twig-epp-peers.{seen.twig.room.name}.svc"]
    authority = CertificateAuthority("kvist pickers", now, dt.timedelta(days=3))
    leaf, key = authority.sign(names, now, dt.timedelta(days=3), (SERVER, CLIENT))
    old = base64.b64decode(secret["data"]["ca.crt"])
    made = {"tls.crt": leaf, "tls.key": key, "ca.crt": authority.pem + old}
    data = {name: base64.b64encode(content).decode() for name, content in made.items()}
    await seen.twig.room.patch("Secret", SECRET, {"data": data})
    await seen.fires("KvistCertificateExpires", seconds=90)
    await remove_certificate(seen)
    await seen.ends("KvistCertificateExpires", seconds=90)


async def test_a_lost_access_log_is_restored(seen: Observed) -> None:
    """Envoys whose configuration was changed by hand send no access log; the operator restores it, and new
    Envoys report again."""
    await operators(seen, 0)
    found = await seen.twig.room.get("ConfigMap", "twig-envoy")
    whole = json.loads(found["data"][CONFIG_FILE])
    for listener in whole["static_resources"]["listeners"]:
        listener["filter_chains"][0]["filters"][0]["typed_config"].pop("access_log", None)
    changed = {"data": {CONFIG_FILE: json.dumps(whole)}}
    await seen.twig.room.patch("ConfigMap", "twig-envoy", changed)

    async def restored() -> bool:
        now = await seen.twig.room.get("ConfigMap", "twig-envoy")
        return bool(now["data"] == found["data"])

    await seen.delete_pods("envoy")
    await seen.delete_pods("picker")
    async with seen.twig.load():
        await seen.fires("KvistAccessLogMissing", seconds=120)
        await operators(seen, 1)
        await seen.twig.room.until(restored, "the operator's configuration")
        await seen.delete_pods("envoy")
        await seen.ends("KvistAccessLogMissing", seconds=120)


async def test_targets_that_cannot_be_met_are_corrected(seen: Observed) -> None:
    """Targets below what the engine needs raise both alerts, and prompts that share nothing a third one;
    correcting spec.workload ends them."""
    await seen.twig.patch(workload={"ttftMilliseconds": 10, "tpotMilliseconds": 10})
    async with long_requests(seen, 6, 30):
        await seen.fires("KvistDecodeOverTarget", seconds=120)
        await seen.fires("KvistTimeToFirstTokenOverTarget", seconds=120)
        await seen.fires("KvistHitRateBelowWorkload", seconds=120)
        workload = {"ttftMilliseconds": 60000, "tpotMilliseconds": 5000, "sharedPrefixTokens": 0}
        await seen.twig.patch(workload=workload)
        for alert in ("DecodeOverTarget", "TimeToFirstTokenOverTarget", "HitRateBelowWorkload"):
            await seen.ends(f"Kvist{alert}", seconds=120)
