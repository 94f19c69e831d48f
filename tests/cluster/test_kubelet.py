"""The cluster of the tests keeps the promises that the other tests build on: Deployments and Services."""

from collections import Counter
from typing import Any

import aiohttp
from tests.cluster.cluster import Cluster
from tests.cluster.space import Space, ready, waiting
from tests.cluster.steady import Steady
from tests.cluster.workloads import HEALTH, container, deployment, pod, pod_spec, service

Json = dict[str, Any]


async def test_a_service_name_leads_to_every_pod_of_a_deployment(cluster: Cluster, room: Space) -> None:
    """Pods on both nodes become ready, and a client in the cluster reaches them all by one name."""
    await room.apply(service("web"), deployment("web", pod_spec(container()), replicas=3))
    await room.rolled_out("web")
    pods = await room.pods(app="web")

    assert {p["spec"]["nodeName"] for p in pods} == {node.name for node in cluster.nodes}
    wanted = {p["metadata"]["name"] for p in pods}
    seen: Counter[str] = Counter()

    async def all_seen() -> bool:
        seen.update([await ask(cluster, f"http://web.{room.name}.svc/")])
        return seen.keys() == wanted

    await room.until(all_seen, f"answers of {wanted}")


async def ask(cluster: Cluster, url: str) -> str:
    """The text at an address in the cluster; empty for anything but 200."""
    async with cluster.http(force_close=True) as http:
        try:
            async with http.get(url) as response:
                return await response.text() if response.status == 200 else ""
        except aiohttp.ClientError:
            return ""


async def test_a_rolling_update_behind_a_service_loses_nothing(cluster: Cluster, room: Space) -> None:
    """With a preStop sleep every request of a steady load is answered, while all pods are replaced."""
    sleep = {"preStop": {"sleep": {"seconds": 2}}}
    spec = pod_spec(container(lifecycle=sleep, env=[{"name": "GENERATION", "value": "1"}]))
    await room.apply(service("web"), deployment("web", spec, replicas=3))
    await room.rolled_out("web")
    before = {p["metadata"]["uid"] for p in await room.pods(app="web")}
    url = f"http://web.{room.name}.svc"
    await room.until(lambda: ask(cluster, f"{url}/env/GENERATION"))

    async with Steady(cluster, f"{url}/env/GENERATION") as load:
        newer = pod_spec(container(lifecycle=sleep, env=[{"name": "GENERATION", "value": "2"}]))
        await room.apply(deployment("web", newer, replicas=3))
        await room.rolled_out("web")
        await room.until(lambda: gone(room, before), "the old pods to be gone")

    assert load.failures == []
    assert set(load.answers) == {"1", "2"}


async def test_a_steady_load_notices_what_is_lost(cluster: Cluster, room: Space) -> None:
    """The load by which other tests judge fails while there is no server, and recovers."""
    await room.apply(service("web"), deployment("web", pod_spec(container())))
    await room.rolled_out("web")
    url = f"http://web.{room.name}.svc/"
    await room.until(lambda: ask(cluster, url))

    async with Steady(cluster, url) as load:
        await load.until(5)
        await room.patch("Deployment", "web", {"spec": {"replicas": 0}})

        async def lost() -> bool:
            return bool(load.failures)

        await room.until(lost, "a request that fails")
        await room.patch("Deployment", "web", {"spec": {"replicas": 1}})
        await load.until(5)


async def gone(room: Space, uids: set[str]) -> bool:
    """Whether none of these pods is there any more."""
    return not uids & {p["metadata"]["uid"] for p in await room.pods()}


async def test_a_rollout_stalls_at_a_pod_that_does_not_get_ready(cluster: Cluster, room: Space) -> None:
    """The new pod runs and is not ready, the old ones serve on; the old template ends it."""
    good = deployment("web", pod_spec(container()), replicas=2)
    await room.apply(service("web"), good)
    await room.rolled_out("web")
    never = {**HEALTH, "httpGet": {"path": "/never", "port": "http"}}
    await room.apply(deployment("web", pod_spec(container(readinessProbe=never)), replicas=2))

    async def stalled() -> bool:
        running = [p for p in await room.pods(app="web") if p["status"]["phase"] == "Running"]
        return [ready(p) for p in sorted(running, key=ready)] == [False, True, True]

    await room.until(stalled, "one new pod beside two old ones")
    assert await ask(cluster, f"http://web.{room.name}.svc/")
    await room.apply(good)
    await room.rolled_out("web")


async def test_a_new_secret_and_configmap_reach_running_pods(cluster: Cluster, room: Space) -> None:
    """Files change under a process that goes on; variables stay as they were."""

    def data(kind: str, text: str) -> Json:
        return {"apiVersion": "v1", "kind": kind, "metadata": {"name": "d"}, key(kind): {"word": text}}

    def key(kind: str) -> str:
        return "stringData" if kind == "Secret" else "data"

    volumes = [{"name": "s", "secret": {"secretName": "d"}}, {"name": "c", "configMap": {"name": "d"}}]
    web = container(
        env=[{"name": "WORD", "valueFrom": {"configMapKeyRef": {"name": "d", "key": "word"}}}],
        volumeMounts=[{"name": v["name"], "mountPath": f"/data/{v['name']}"} for v in volumes],
    )
    await room.apply(data("Secret", "one"), service("web"), deployment("web", pod_spec(web, volumes=volumes)))
    await room.until(lambda: mounting(room), "an event about the ConfigMap that is missing")
    await room.apply(data("ConfigMap", "one"))
    await room.rolled_out("web")
    url = f"http://web.{room.name}.svc"
    [before] = await room.pods(app="web")
    await room.apply(data("Secret", "two"), data("ConfigMap", "two"))
    for path in ("file/data/s/word", "file/data/c/word"):
        await room.until(lambda path=path: said(cluster, f"{url}/{path}", "two"), path)  # type: ignore[misc]

    assert await ask(cluster, f"{url}/env/WORD") == "one"
    [after] = await room.pods(app="web")
    assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]


async def said(cluster: Cluster, url: str, text: str) -> bool:
    """Whether this is what stands there."""
    return await ask(cluster, url) == text


async def mounting(room: Space) -> bool:
    """Whether a pod waits for a volume."""
    return any(e["reason"] == "FailedMount" for e in await room.all_of("Event"))


async def test_gpu_pods_wait_for_accelerators(room: Space) -> None:
    """Two nodes of eight GPUs run two pods of six; the third is scheduled when one has gone."""
    gpus = {"limits": {"nvidia.com/gpu": "6"}}
    await room.apply(*(pod(name, pod_spec(container(resources=gpus))) for name in "abc"))

    async def split() -> tuple[list[str], list[str]] | None:
        pods = await room.pods()
        running = [p["metadata"]["name"] for p in pods if ready(p)]
        stuck = [p["metadata"]["name"] for p in pods if "Insufficient nvidia.com/gpu" in str(p["status"])]
        return (running, stuck) if len(running) == 2 and len(stuck) == 1 else None

    found = await room.until(split, "two pods that run and one that waits")
    assert found is not None
    running, [last] = found
    await room.remove("Pod", running[0])

    async def serves() -> bool:
        return ready(await room.get("Pod", last))

    await room.until(serves, "the pod that waited")


async def test_pods_that_are_not_restricted_are_refused(room: Space) -> None:
    """The namespace enforces Pod Security; the Deployment says so, and has no pod."""
    bad = container(securityContext={})
    await room.apply(deployment("web", {"containers": [bad]}))

    async def refused() -> str:
        found = await room.get("Deployment", "web")
        conditions = found.get("status", {}).get("conditions", [])
        return next((c["message"] for c in conditions if c["type"] == "ReplicaFailure"), "")

    message = await room.until(refused, "a condition ReplicaFailure")
    assert 'violates PodSecurity "restricted:latest"' in message
    assert await room.pods() == []


async def test_an_image_that_is_nowhere_is_not_pulled(room: Space) -> None:
    """The container waits with the reasons that a kubelet gives, first for the failure, then for the wait."""
    await room.apply(pod("web", pod_spec(container(image="registry.example/nowhere:1"))))

    async def backs_off() -> bool:
        return waiting(await room.get("Pod", "web")) == {"web": "ImagePullBackOff"}

    async def is_named() -> bool:
        found = [e for e in await room.all_of("Event") if e["involvedObject"]["name"] == "web"]
        return any("not found" in e["message"] and e["type"] == "Warning" for e in found)

    await room.until(backs_off, "ImagePullBackOff")
    await room.until(is_named, "a warning that names the reason")
