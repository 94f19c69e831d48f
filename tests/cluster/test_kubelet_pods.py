"""The cluster of the tests keeps the promises that the other tests build on: single pods."""

import asyncio
import functools
import json
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import START_SECONDS, Cluster
from tests.cluster.node.box import READY
from tests.cluster.space import Space, ready, waiting
from tests.cluster.test_kubelet import ask
from tests.cluster.workloads import IMAGE, RESTRICTED, USER, container, pod, pod_spec

from kvist_sim.processes import Children

Json = dict[str, Any]


async def serving(room: Space, spec: Json, name: str = "one") -> Json:
    """A pod of this spec, once it is ready."""
    await room.apply(pod(name, spec))

    async def found() -> Json | None:
        there = await room.get("Pod", name)
        return there if ready(there) else None

    made = await room.until(found, name)
    assert made is not None
    return made


def at(made: Json, path: str) -> str:
    """An address in a pod."""
    return f"http://{made['status']['podIP']}:8000/{path}"


async def test_a_container_has_the_identity_of_its_security_context(cluster: Cluster, room: Space) -> None:
    """User, groups, no capabilities, a root it cannot write, volumes it can, and no process but its own."""
    mounts = [{"name": "data", "mountPath": "/data"}, {"name": "data", "mountPath": "/tmp"}]
    spec = pod_spec(container(volumeMounts=mounts), volumes=[{"name": "data", "emptyDir": {}}])
    made = await serving(room, spec)
    found = json.loads(await ask(cluster, at(made, "whoami")))

    assert found == {
        "user": USER,
        "group": USER,
        "groups": [4321],
        "pid": 1,
        "host": "one",
        "capabilities": "0000000000000000",
        "privileges": "1",
        "writes": ["/tmp", "/data"],
        "processes": [1],
    }


async def test_a_container_that_ends_is_started_again(cluster: Cluster, room: Space) -> None:
    """A container that ends is restarted under the same address; its termination message and exit code are
    reported."""
    words = "/dev/termination-log"
    made = await serving(room, pod_spec(container(env=[{"name": "LAST_WORDS", "value": words}])))
    await ask(cluster, at(made, "exit/3"))

    async def again() -> Json | None:
        there = await room.get("Pod", "one")
        [status] = there["status"]["containerStatuses"]
        return status if status["restartCount"] == 1 and ready(there) else None

    status = await room.until(again, "a second start")
    assert status is not None
    ended = status["lastState"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (3, "Error", "asked to exit")
    assert await ask(cluster, at(made, "")) == "one"


async def test_a_container_that_always_fails_is_in_a_crash_loop(room: Space) -> None:
    """The state says CrashLoopBackOff, the last state why, in the words of its log."""
    bad = container(
        command=["python3", "-c", "import sys; sys.exit('no such model')"],
        terminationMessagePolicy="FallbackToLogsOnError",
    )
    await room.apply(pod("one", pod_spec(bad)))

    async def loops() -> Json | None:
        there = await room.get("Pod", "one")
        return there if waiting(there) == {"web": "CrashLoopBackOff"} else None

    found = await room.until(loops, "CrashLoopBackOff")
    assert found is not None
    [status] = found["status"]["containerStatuses"]
    ended = status["lastState"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (1, "no such model\n")
    assert await room.log("one", previous=True) == "no such model\n"


@pytest.mark.parametrize(
    ("code", "told"),
    [("sys.exit(137)", (137, "OOMKilled")), ("sys.exit(1)", (1, "Error"))],
    ids=["memory", "exit"],
)
async def test_the_way_a_container_ended_is_reported(room: Space, code: str, told: tuple[int, str]) -> None:
    """137 stands for a container that its memory limit ended; a pod that is not restarted has failed."""
    bad = container(command=["python3", "-c", f"import sys; {code}"])
    await room.apply(pod("one", pod_spec(bad, restartPolicy="Never")))

    async def failed() -> Json | None:
        there = await room.get("Pod", "one")
        return there if there["status"]["phase"] == "Failed" else None

    found = await room.until(failed, "a failed pod")
    assert found is not None
    [status] = found["status"]["containerStatuses"]
    ended = status["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == told


async def test_init_containers_come_first(cluster: Cluster, room: Space) -> None:
    """Files that init containers leave in a volume are there when the other containers start."""
    mounts = [{"name": "data", "mountPath": "/data"}]
    first = {
        "name": "first",
        "image": IMAGE,
        "command": ["sh", "-c", "echo $(WORD) >/data/word"],
        "env": [{"name": "WORD", "value": "before"}],
        "securityContext": RESTRICTED,
        "volumeMounts": mounts,
    }
    spec = pod_spec(
        container(volumeMounts=mounts), initContainers=[first], volumes=[{"name": "data", "emptyDir": {}}]
    )
    made = await serving(room, spec)

    assert await ask(cluster, at(made, "file/data/word")) == "before\n"


async def test_a_sidecar_starts_first_and_runs_beside_the_others(cluster: Cluster, room: Space) -> None:
    """An init container with ``restartPolicy: Always`` holds no other container back, and goes on writing."""
    mounts = [{"name": "data", "mountPath": "/data"}]
    beside = {
        "name": "beside",
        "image": IMAGE,
        "restartPolicy": "Always",
        "command": [
            "sh",
            "-c",
            "while :; do date +%s%N >/data/new; mv /data/new /data/word; sleep 0.1; done",
        ],
        "securityContext": RESTRICTED,
        "volumeMounts": mounts,
    }
    spec = pod_spec(
        container(volumeMounts=mounts), initContainers=[beside], volumes=[{"name": "data", "emptyDir": {}}]
    )
    made = await serving(room, spec)

    [status] = (await room.get("Pod", "one") or {})["status"]["initContainerStatuses"]
    assert "running" in status["state"]
    before = await ask(cluster, at(made, "file/data/word"))
    while await ask(cluster, at(made, "file/data/word")) == before:
        await asyncio.sleep(0.05)


async def test_a_claim_is_one_folder_for_all_nodes(cluster: Cluster, room: Space) -> None:
    """A file that one pod writes to a claim is read by another pod, and outlives the first."""
    name = f"volume-{room.name}"
    size = {"storage": "1Gi"}
    shared: Json = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {**shared, "capacity": size, "hostPath": {"path": "/nowhere"}}
    claim = {**shared, "volumeName": name, "resources": {"requests": size}}
    objects = [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "c"}, "spec": claim},
    ]
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]
    mounts = [{"name": "data", "mountPath": "/data"}]
    writing = container(command=["sh", "-c", "echo kept >/data/word"], volumeMounts=mounts)
    try:
        await room.apply(*objects)
        await room.apply(pod("first", pod_spec(writing, volumes=volumes, restartPolicy="Never")))
        made = await serving(room, pod_spec(container(volumeMounts=mounts), volumes=volumes))

        async def kept() -> bool:
            return await ask(cluster, at(made, "file/data/word")) == "kept\n"

        await room.until(kept, "what the first pod wrote")
    finally:
        await room.remove("PersistentVolume", name)


@pytest.mark.parametrize(
    ("probe", "lives"),
    [
        ({"tcpSocket": {"port": "http"}}, True),
        ({"exec": {"command": ["test", "-d", "/proc/1"]}}, True),
        ({"exec": {"command": ["false"]}}, False),
        ({"grpc": {"port": 8000}}, False),
    ],
    ids=["tcp", "exec", "exec-false", "not-grpc"],
)
async def test_a_liveness_probe_decides_on_a_restart(room: Space, probe: Json, lives: bool) -> None:
    """A container whose probe fails is started again, and only such a one."""
    liveness = {**probe, "periodSeconds": 1, "failureThreshold": 1}
    made = await serving(room, pod_spec(container(livenessProbe=liveness)))

    async def judged() -> bool:
        there = await room.get("Pod", "one")
        [status] = there["status"]["containerStatuses"]
        return bool(status["restartCount"]) != lives

    if lives:
        await serving(room, pod_spec(container(livenessProbe=liveness)), "two")  # time for a probe or two
        await serving(room, pod_spec(container(livenessProbe=liveness)), "three")
    await room.until(judged, f"lives: {lives}")
    assert made["status"]["podIP"]


def deaf(**more: Any) -> Json:
    """A container that ignores SIGTERM."""
    made = container(command=["sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 1; done"], **more)
    del made["readinessProbe"]
    return made


async def test_a_container_that_ignores_sigterm_is_killed_for_its_probe(room: Space) -> None:
    """The container is killed when the pod's grace is over; the code is 137, but the reason is not a lack of
    memory."""
    never = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}
    await room.apply(pod("one", pod_spec(deaf(livenessProbe=never), terminationGracePeriodSeconds=1)))

    async def ended() -> Json | None:
        [status] = (await room.get("Pod", "one"))["status"].get("containerStatuses", [{}])
        found: Json | None = status.get("lastState", {}).get("terminated")
        return found

    found = await room.until(ended, "the end of the first start")
    assert found is not None
    assert (found["exitCode"], found["reason"]) == (137, "Error")


async def test_a_pod_that_is_deleted_ends_in_order(room: Space) -> None:
    """A deleted pod gets preStop, then SIGTERM; a process that ignores SIGTERM is killed."""
    before = {"preStop": {"exec": {"command": ["sh", "-c", "echo before >>/proc/1/fd/1"]}}}
    await serving(room, pod_spec(container(lifecycle=before)), "good")
    await serving(room, pod_spec(deaf(), terminationGracePeriodSeconds=1), "deaf")
    for name in ("good", "deaf"):
        await room.remove("Pod", name)

    async def none() -> bool:
        return not await room.pods()

    await room.until(none, "both pods to be gone")
    said = [[line.rpartition("| ")[2] for line in room.tail(name)] for name in ("good", "deaf")]
    assert said == [["serving", "before", "bye"], ["deaf"]]


async def test_nothing_is_left_when_the_test_is_killed(tmp_path: Path) -> None:
    """If the process that started the cluster dies by SIGKILL, every process in its namespaces dies with it;
    network and mounts go with the last of them."""
    async with Children(tmp_path) as children:
        made = children.start("cluster", [sys.executable, "-m", "tests.cluster.cluster", str(tmp_path)])
        await children.ready(
            made, functools.partial(asyncio.to_thread, (tmp_path / READY).exists), START_SECONDS
        )
        namespaces = {of for of, _ in members(tmp_path)} - {own(Path("/proc/self"))}
        assert len(namespaces) == 1
        inside = [pid for of, pid in members() if of in namespaces]
        assert len(inside) >= len(("box", "etcd", "apiserver", "manager", "scheduler", "proxy", "coredns"))
        await children.end(made, signal.SIGKILL, 10)
        async with asyncio.timeout(30):
            while any(of in namespaces for of, _ in members()):
                await asyncio.sleep(0.05)


def members(named: Path | None = None) -> list[tuple[str, int]]:
    """Processes with their namespace of process ids; ``named``: those that have it in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if named is None or str(named).encode() in (entry / "cmdline").read_bytes():
                found.append((own(entry), int(entry.name)))
    return found


def own(entry: Path) -> str:
    """The namespace of a process."""
    return str((entry / "ns/pid").readlink())


async def test_a_pod_that_fills_its_volume_is_evicted(room: Space) -> None:
    """The pod fails with the kubelet's reason and message, its containers are killed, and it stays until
    it is deleted."""
    greedy = container(
        command=["python3", "-c", "open('/data/x', 'wb').write(bytes(3 << 20)); import time; time.sleep(99)"],
        volumeMounts=[{"name": "data", "mountPath": "/data"}],
        readinessProbe={"exec": {"command": ["true"]}, "periodSeconds": 1},
    )
    volumes = [{"name": "data", "emptyDir": {"sizeLimit": "1Mi"}}]
    await room.apply(pod("one", pod_spec(greedy, volumes=volumes)))

    async def failed() -> Json | None:
        there = await room.get("Pod", "one")
        ended = [c["state"].get("terminated") for c in there["status"].get("containerStatuses", ())]
        return there if there["status"]["phase"] == "Failed" and all(ended) else None

    found = await room.until(failed, "an evicted pod")
    assert found is not None
    status = found["status"]
    message = 'Usage of EmptyDir volume "data" exceeds the limit "1Mi". '
    assert (status["reason"], status["message"]) == ("Evicted", message)
    assert not ready(found)
    await asyncio.sleep(1)
    assert (await room.get("Pod", "one"))["status"]["reason"] == "Evicted"
    await room.remove("Pod", "one")

    async def gone() -> bool | None:
        return True if await room.found("Pod", "one") is None else None

    assert await room.until(gone, "the end of the pod")
