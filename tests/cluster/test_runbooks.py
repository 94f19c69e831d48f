"""Runbooks followed on a real cluster: a fault is injected, the alert fires in a real Prometheus, the steps
of docs/guides/alerts.md are taken, and the alert ends.

Rules run in quick motion (``prometheus.QUICK``). The tests share one pool, in order, and each leaves it as it
was.
"""

import base64
import datetime as dt
import json
import signal
from pathlib import Path
from typing import Any, Final

import pytest
from tests.cluster import observed, workloads
from tests.cluster.faults import filtered, processes, send
from tests.cluster.observed import SECRET, Observed, long_requests, operators, remove_certificate

from kvist_kube.certificates import CLIENT, SERVER, CertificateAuthority
from kvist_operator.manifests.envoy import CONFIG_FILE
from kvist_operator.manifests.object_names import ENGINE_PORT, GRPC_PORT, PEER_PORT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
Json = dict[str, Any]
seen, rested = observed.seen, observed.rested
PICKER: Final = "-m kvist_epp "
"""In the command line of every picker."""
BABBLING: Final = Path(__file__).with_name("babbling.py")


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
    assert send(signal.SIGSTOP, processes(seen.twig.cluster, "kvist_sim.engine")[:1]) == 1
    await seen.fires("KvistEndpointUnreachable")
    await seen.delete_pods("engine")
    await seen.ends("KvistEndpointUnreachable")
    await seen.twig.until_ready()


async def test_pickers_that_hang_are_replaced(seen: Observed) -> None:
    """Pickers that stop answering are gone for Prometheus, and Envoy routes without them; deleting their pods
    ends both alerts."""
    async with seen.twig.load():
        assert send(signal.SIGSTOP, processes(seen.twig.cluster, PICKER)) == 2
        await seen.fires("KvistPickerDown")
        await seen.fires("KvistGatewayWithoutPicker")
        await seen.delete_pods("picker")
        await seen.ends("KvistPickerDown")
        await seen.ends("KvistGatewayWithoutPicker")
    await seen.twig.until_ready()


async def test_a_port_between_replicas_is_allowed_again(seen: Observed) -> None:
    """A replica whose port is closed to the others is heard by none, and /debug/peers says that messages do
    not arrive; with the port open all hear each other."""
    pod, *_ = await seen.pods("picker")
    [pid] = processes(seen.twig.cluster, PICKER, pod["status"]["podIP"])
    closed = f"tcp dport {PEER_PORT} drop"
    with filtered(pid, arriving=closed, leaving=closed):
        await seen.fires("KvistPickerReplicasApart")
        shown = json.loads(await seen.page(pod, "/debug/peers"))
        assert {"a message could not be sent for 2 s", ""} == {each["problem"] for each in shown["addresses"]}
    await seen.ends("KvistPickerReplicasApart")


async def test_an_engine_that_the_gateway_cannot_reach_is_opened(seen: Observed) -> None:
    """Requests for an engine that refuses Envoy's connections are served by another one, and the metric names
    the picked one; with the port open picks are followed."""
    pod, *_ = await seen.pods("engine")
    address = pod["status"]["podIP"]
    [pid] = processes(seen.twig.cluster, "kvist_sim.engine", address)
    envoys = ",".join(each["status"]["podIP"] for each in await seen.pods("envoy"))
    refused = f"ip saddr {{ {envoys} }} tcp dport {ENGINE_PORT} reject with tcp reset"
    async with seen.twig.load():
        with filtered(pid, arriving=refused):
            await seen.fires("KvistPicksNotFollowed")
            elsewhere = await seen.prometheus.query("kvist_epp_served_elsewhere_total > 0")
            assert {each["metric"]["endpoint"] for each in elsewhere} == {f"{address}:{ENGINE_PORT}"}
        await seen.ends("KvistPicksNotFollowed")


async def test_a_client_of_another_protocol_is_found_by_the_log(seen: Observed) -> None:
    """A pod that sends other messages to the picker's port raises the alert; the picker's log names its
    address, and without the pod the alert ends."""
    target = f"twig-epp.{seen.twig.room.name}.svc:{GRPC_PORT}"
    babbler = workloads.container(
        name="babbler",
        command=["python3", str(BABBLING), target, "/ca/ca.crt"],
        volumeMounts=[{"name": "ca", "mountPath": "/ca"}],
        readinessProbe=None,
    )
    volumes = [{"name": "ca", "configMap": {"name": "twig-epp-ca"}}]
    await seen.twig.room.apply(workloads.pod("babbler", workloads.pod_spec(babbler, volumes=volumes)))
    await seen.fires("KvistProtocolErrors")
    address = (await seen.twig.room.get("Pod", "babbler"))["status"]["podIP"]
    logs = [await seen.twig.room.log(pod["metadata"]["name"]) for pod in await seen.pods("picker")]
    assert f"from {address}: ext_proc message of" in "".join(logs)
    await seen.twig.room.remove("Pod", "babbler")
    await seen.ends("KvistProtocolErrors")


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
