"""Parts of the kubelet that need no cluster."""

import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cluster.inside import question, records
from tests.cluster.node.errors import WaitingError
from tests.cluster.node.eviction import DiskUse, eviction_message
from tests.cluster.node.facts import Facts, environment, expanded
from tests.cluster.node.follow import Json
from tests.cluster.node.images import repository
from tests.cluster.node.sandbox import Identity, identity
from tests.cluster.node.status import Condition, PodCondition, terminated
from tests.cluster.node.volumes import File, swap

NAMES = st.text("abc/", min_size=1).filter(lambda n: "//" not in n and n.strip("/") == n)
PAYLOADS = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.binary(max_size=9))


@given(generations=st.lists(PAYLOADS, min_size=1, max_size=4))
def test_a_volume_shows_the_last_generation_and_nothing_else(
    generations: list[dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever came before: the names are those of the last payload, with its data, and old data are gone."""
    home = tmp_path_factory.mktemp("volume")
    for data in generations:
        swap(home, {name: File(value) for name, value in data.items()})

    assert {p.name: p.read_bytes() for p in home.iterdir() if not p.name.startswith("..")} == generations[-1]
    assert len(list(home.iterdir())) == len(generations[-1]) + 2


def test_a_volume_changes_by_one_rename(tmp_path: Path) -> None:
    """A folder that was opened before the change still shows what belongs together."""
    swap(tmp_path, {"a": File(b"1"), "sub/b": File(b"1")})
    before = (tmp_path / "..data").resolve()
    names = {name: (tmp_path / name).readlink() for name in ("a", "sub")}
    swap(tmp_path, {"a": File(b"2"), "sub/b": File(b"2", 0o600)})

    assert (tmp_path / "..data").resolve() != before
    assert {name: (tmp_path / name).readlink() for name in ("a", "sub")} == names
    assert (tmp_path / "sub/b").read_bytes() == b"2"
    assert (tmp_path / "sub/b").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("$(A)-$(B)", "1-$(B)"), ("$$(A)", "$(A)"), ("$(A", "$(A"), ("$A", "$A"), ("", "")],
)
def test_references_are_expanded_as_kubernetes_does(text: str, wanted: str) -> None:
    """Known names only; ``$$`` escapes."""
    assert expanded(text, {"A": "1"}) == wanted


class Given:
    """A store with one Secret and one ConfigMap."""

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """``d`` in ``n``."""
        held = {"secrets": {"data": {"k": "djE="}}, "configmaps": {"data": {"k": "v2"}}}
        return held[kind] if (namespace, name) == ("n", "d") else None


def facts(**meta: Any) -> Facts:
    """Return the facts of a pod ``n/p``."""
    pod = {"metadata": {"name": "p", "namespace": "n", "uid": "u", **meta}, "spec": {}}
    return Facts(pod, "node", "10.0.0.1", Given(), "10.0.0.2")  # type: ignore[arg-type]


def variable(name: str, **source: Any) -> Json:
    """One ``env`` entry."""
    return {"name": name, "valueFrom": source}


def test_variables_come_from_fields_resources_secrets_and_configmaps() -> None:
    """In order, each seeing those before it; what is optional and missing is left out, and a limit that is
    not set is the one of containers without limits."""
    entries = [
        variable("IP", fieldRef={"fieldPath": "status.podIP"}),
        variable("LABEL", fieldRef={"fieldPath": "metadata.labels['a/b']"}),
        variable("LABELS", fieldRef={"fieldPath": "metadata.labels"}),
        variable("CPUS", resourceFieldRef={"resource": "limits.cpu", "divisor": "0"}),
        variable("MIB", resourceFieldRef={"resource": "requests.memory", "divisor": "1Mi"}),
        variable("FREE", resourceFieldRef={"resource": "limits.memory", "divisor": "1Gi"}),
        variable("SECRET", secretKeyRef={"name": "d", "key": "k"}),
        variable("CONFIG", configMapKeyRef={"name": "d", "key": "k"}),
        variable("NOT", secretKeyRef={"name": "other", "key": "k", "optional": True}),
        variable("NOR", secretKeyRef={"name": "d", "key": "other", "optional": True}),
        {"name": "URL", "value": "http://$(IP)/$(LATER)"},
    ]
    made = environment(
        {
            "env": entries,
            "envFrom": [{"configMapRef": {"name": "d"}}],
            "resources": {"limits": {"cpu": "1500m"}, "requests": {"memory": "64Mi"}},
        },
        facts(labels={"a/b": "c"}),
        {"PATH": "/bin"},
    )

    own = {"HOSTNAME": "p", "KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert made == own | {
        "PATH": "/bin",
        "k": "v2",
        "IP": "10.0.0.2",
        "LABEL": "c",
        "LABELS": 'a/b="c"',
        "CPUS": "2",
        "MIB": "64",
        "FREE": "8",
        "SECRET": "v1",
        "CONFIG": "v2",
        "URL": "http://10.0.0.2/$(LATER)",
    }


@pytest.mark.parametrize(
    "source",
    [
        {"secretKeyRef": {"name": "other", "key": "k"}},
        {"configMapKeyRef": {"name": "d", "key": "other"}},
        {"fieldRef": {"fieldPath": "status.qosClass"}},
        {"resourceFieldRef": {"resource": "limits.ephemeral-storage"}},
    ],
)
def test_what_is_missing_keeps_a_container_waiting(source: Json) -> None:
    """With the reason that a kubelet gives."""
    with pytest.raises(WaitingError) as caught:
        environment({"env": [variable("X", **source)]}, facts(), {})
    assert caught.value.reason == "CreateContainerConfigError"


@pytest.mark.parametrize(
    ("reference", "wanted"),
    [
        ("vllm/vllm-openai:v0.33.0", "vllm/vllm-openai"),
        ("localhost:5000/a/b", "localhost:5000/a/b"),
        ("r.example/a@sha256:00", "r.example/a"),
        ("a", "a"),
        ("docker.io/envoyproxy/envoy:v1", "envoyproxy/envoy"),
    ],
)
def test_an_image_is_found_by_its_repository(reference: str, wanted: str) -> None:
    """Tag, digest and the usual registry are taken off; the port of a registry is not a tag."""
    assert repository(reference) == wanted


def test_the_containers_identity_overrides_the_pods() -> None:
    """The container's identity overrides the pod's; root is refused where it is not allowed, also as the
    image's user."""
    pod = {"spec": {"securityContext": {"runAsNonRoot": True, "runAsUser": 5, "fsGroup": 7}}}
    assert identity(pod, {}, 0) == Identity(5, 5, (7,))
    strict = {"runAsUser": 6, "capabilities": {"drop": ["ALL"]}, "allowPrivilegeEscalation": False}
    assert identity(pod, {"securityContext": strict}, 0) == Identity(6, 6, (7,), True, True)
    with pytest.raises(WaitingError):
        identity({"spec": {"securityContext": {"runAsNonRoot": True}}}, {}, 0)


def test_the_state_of_a_container_is_always_one_of_three() -> None:
    """Waiting, running, ended, waiting for its next start with the end as its last state."""
    it = Condition("c", "i")
    assert it.json()["state"] == {"waiting": {"reason": "ContainerCreating"}}
    it.waiting, it.running = ("", ""), "t0"
    assert it.json()["state"] == {"running": {"startedAt": "t0"}}
    it.running, it.ended = "", terminated(-9, began="t0", message="", killed_by_us=False)
    assert it.json()["state"]["terminated"]["exitCode"] == 137
    assert it.json()["lastState"] == {}
    it.waiting = ("CrashLoopBackOff", "back-off")
    assert it.json()["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert it.json()["lastState"]["terminated"]["reason"] == "Error"


def test_times_of_conditions_change_with_them_alone() -> None:
    """Telling the same again is the same text, so that it need not be written."""
    pod = PodCondition("10.0.0.1", "10.0.0.2", initialized=True, containers=[Condition("c", "i")])
    first = pod.json("Always")
    assert pod.json("Always") == first
    pod.containers[0].running = "t0"
    assert [c["status"] for c in pod.json("Always")["conditions"]] == ["True", "True", "False", "False"]
    pod.containers[0].ready = True
    assert [c["status"] for c in pod.json("Always")["conditions"]] == ["True"] * 4


def test_an_answer_of_the_cluster_dns_is_read() -> None:
    """Two addresses behind an alias, names written as pointers (RFC 1035, 4.1.4)."""
    asked = question(7, "a.bc.")
    alias = struct.pack("!HHHIH", 0xC00C, 5, 1, 30, 2) + b"\xc0\x0e"
    address = b"\xc0\x0e" + struct.pack("!HHIH", 1, 1, 30, 4) + socket.inet_aton("10.0.0.9")
    answer = asked[:6] + struct.pack("!H", 3) + asked[8:] + alias + address + address

    assert list(records(answer)) == ["10.0.0.9", "10.0.0.9"]


MIB = 1 << 20
FULL = {
    "volumes": [
        {"name": "data", "emptyDir": {"sizeLimit": "1Mi"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "a"}},
    ],
    "initContainers": [
        {"name": "once", "resources": {"limits": {"ephemeral-storage": "9Mi"}}},
        {
            "name": "beside",
            "restartPolicy": "Always",
            "resources": {"limits": {"ephemeral-storage": "1Mi"}},
        },
    ],
    "containers": [{"name": "web", "resources": {"limits": {"ephemeral-storage": "2Mi"}}}],
}


@pytest.mark.parametrize(
    ("volumes", "logs", "expected"),
    [
        ({"data": MIB, "tmp": MIB}, {"web": MIB}, ""),
        ({"data": MIB + 1}, {}, 'Usage of EmptyDir volume "data" exceeds the limit "1Mi". '),
        (
            {"data": MIB, "tmp": 2 * MIB, "shm": 9 * MIB},
            {"web": 1},
            f"Pod ephemeral local storage usage exceeds the total limit of containers {3 * MIB}. ",
        ),
        ({"shm": 9 * MIB}, {}, ""),
        (
            {},
            {"web": 2 * MIB + 1},
            'Container web exceeded its local ephemeral storage limit "2Mi". ',
        ),
    ],
)
def test_a_pod_is_evicted_for_what_the_kubelet_counts(
    volumes: dict[str, int], logs: dict[str, int], expected: str
) -> None:
    """First the limit of each volume, then the sum of containers and sidecars for volumes on disk and logs,
    then the limit of each container."""
    assert eviction_message(FULL, DiskUse(volumes, logs)) == expected
