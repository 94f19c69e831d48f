"""Promises about broken pods: the condition names the pod, quotes the cause, and says what to do."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.broken import CASE, NAMES, NOW, Broken, gallery, healthy, merged, told, workload
from tests.operator.manifested import rendered, resource
from tests.operator.test_status import WELL, subject

from kvist_operator.manifests.object_names import ENGINE, KV_CLEANER, LMCACHE, PICKER, PLAN
from kvist_operator.spec import read_pool
from kvist_operator.spec.pool import COMPONENT
from kvist_operator.status import ObservedPool, Subject, status
from kvist_operator.status.container_diagnosis import PARTS
from kvist_operator.status.diagnosis import ORDER, newest, troubles
from kvist_operator.status.pod_diagnosis import scheduling_remedy

GALLERY = gallery()
BY_NAME = {broken.name: broken for broken in GALLERY}


@pytest.mark.parametrize("broken", GALLERY, ids=lambda broken: broken.name)
def test_a_broken_pod_is_explained(broken: Broken) -> None:
    """The reason and the whole message of Ready are those of the file."""
    found = told(broken)

    assert broken.message, "python -m tests.operator.broken"
    assert (found["Ready"]["reason"], found["Ready"]["message"]) == (broken.reason, broken.message)
    assert found["Ready"]["status"] == "False"
    other = {"engine": "Progressing", "envoy": "GatewayAttached"}.get(broken.component)
    if other:
        assert found[other]["message"] == broken.message


@pytest.mark.parametrize("broken", GALLERY, ids=lambda broken: broken.name)
def test_messages_can_be_acted_on(broken: Broken) -> None:
    """A message names the pod and an action, a field of the spec or a step on the cluster, and no token."""
    said = broken.message
    actions = ("spec.", "kubectl", "Secret", "node", "operator", "queue")

    assert NAMES[broken.component] in said
    assert any(word in said.partition(NAMES[broken.component])[2] for word in actions)
    assert len(said) < 1200
    assert "hf_a" not in said


def test_there_are_enough_of_them() -> None:
    """The gallery of broken pods covers nearly every reason."""
    seen = {found.reason for broken in GALLERY for found in troubles([broken.pod], broken.events)}

    assert len(GALLERY) >= 25
    assert set(ORDER) - seen <= {"PodsRefused", "CannotWrite", "CommunicationFailed"}


def test_a_healthy_pod_has_no_problem() -> None:
    """A pod that is ready, queued, being created, loading or being deleted has no problem."""
    ready = merged(healthy("engine"), {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    creating = {
        "name": "engine",
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": {"reason": "ContainerCreating"}},
    }
    making = merged(healthy("engine"), {"status": {"containerStatuses": [creating]}})
    loads = creating | {"started": False, "state": {"running": {"startedAt": "2026-11-21T11:40:02Z"}}}
    loading = merged(healthy("engine"), {"status": {"phase": "Running", "containerStatuses": [loads]}})
    probe = {
        "involvedObject": {"name": NAMES["engine"]},
        "reason": "Unhealthy",
        "message": "Startup probe failed: connection refused",
    }
    leaving = merged(
        BY_NAME["image-not-found"].pod, {"metadata": {"deletionTimestamp": "2026-11-21T11:59:00Z"}}
    )

    for pod in (ready, making, loading, leaving, healthy("engine")):
        assert troubles([pod], [probe]) == ()


def test_several_pods_with_one_problem_are_one_sentence() -> None:
    """The first pod by name is described, with the number of pods that share its problem; another problem is
    a separate sentence."""
    pods = [
        merged(BY_NAME[case].pod, {"metadata": {"name": name}})
        for name, case in (
            ("twig-c", "image-not-found"),
            ("twig-a", "image-not-found"),
            ("twig-b", "no-free-gpu"),
        )
    ]
    first, second = troubles(pods)

    assert (first.reason, second.reason) == ("ImagePull", "Unschedulable")
    assert first.message.startswith("pod twig-a (and 1 more): failed to pull")


def test_only_the_newest_generation_counts() -> None:
    """Pods of older generations are ignored, also those of a generation that was rolled back."""
    broken = BY_NAME["unknown-flag"].pod
    old = {
        "creationTimestamp": "2026-11-20T11:39:58Z",
        "labels": {"pod-template-hash": "old"},
        "name": "twig-old",
    }
    assert troubles([healthy("engine"), merged(broken, {"metadata": old})]) == ()
    assert troubles([merged(healthy("engine"), {"metadata": old}), broken])[0].reason == "BadArguments"

    going = {"deletionTimestamp": "2026-11-21T11:59:00Z", "labels": {"pod-template-hash": "taken-back"}}
    back = [
        merged(broken, {"metadata": going | {"name": "x"}}),
        merged(BY_NAME["no-free-gpu"].pod, {"metadata": old}),
    ]
    assert [found.reason for found in troubles(back)] == ["Unschedulable"]


def test_leaders_and_followers_are_of_one_generation() -> None:
    """Pods of a LeaderWorkerSet's roles have different templates and belong together by the plan's hash."""
    leader = healthy("engine", "twig-0")
    follower = merged(BY_NAME["no-free-gpu"].pod, {"metadata": {"name": "twig-0-1"}})
    for pod in (leader, follower):
        del pod["metadata"]["labels"]["pod-template-hash"]
    assert leader["metadata"]["annotations"][PLAN] == follower["metadata"]["annotations"][PLAN]

    assert len(newest([leader, follower])) == 2
    assert troubles([leader, follower])[0].message.startswith("pod twig-0-1: ")


def test_a_sick_picker_beside_a_well_one_is_mentioned() -> None:
    """Ready stays true while requests are routed, and its message names the picker's problem."""
    broken = BY_NAME["picker-out-of-memory"]
    observed = ObservedPool(
        workload=workload(2, 2), picker=workload(2, 1), envoy=workload(2, 2), troubles=troubles([broken.pod])
    )
    ready = status(_subject(), observed, {}, NOW)["conditions"][0]

    assert (ready["status"], ready["reason"]) == ("True", "AsAsked")
    assert "8Gi" in ready["message"]
    assert "spec.picker.resources" in ready["message"]


def _subject() -> Subject:
    from tests.crd.cases import planned

    found = resource(CASE)
    return Subject(
        name="twig", generation=3, pool=read_pool(found), plan=planned(found), notes=rendered(CASE).notes
    )


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (
            'pods "twig-7d" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=2',
            "Raise the",
        ),
        (
            'pods "twig-7d" is forbidden: violates PodSecurity "restricted:latest": hostPath',
            "spec.podTemplate",
        ),
        (
            'pods "twig-7d" is forbidden: error looking up account: serviceaccount "x" not found',
            "that ServiceAccount",
        ),
        ('admission webhook "policy.example.com" denied the request: no team label', "spec.podTemplate"),
    ],
)
def test_pods_that_are_never_made_are_explained(message: str, remedy: str) -> None:
    """The message quotes the Deployment when its pods cannot be created."""
    failed = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    engines = merged(workload(2, 0), {"status": {"replicas": 0, "conditions": [failed]}})
    observed = ObservedPool(workload=engines, picker=workload(2, 2), envoy=workload(2, 2))
    ready = status(_subject(), observed, {}, NOW)["conditions"][0]

    assert ready["reason"] == "PodsRefused"
    assert message in ready["message"]
    assert remedy in ready["message"].replace(message, "")


def test_a_continuing_problem_is_not_written_again() -> None:
    """While an image pull and its back-off alternate, the condition and its time stay as they are."""
    waiting = BY_NAME["image-not-found"].pod
    said = waiting["status"]["containerStatuses"][0]["state"]["waiting"]["message"]
    again = {"reason": "ErrImagePull", "message": said.partition("ErrImagePull: ")[2]}
    pulling = json.loads(json.dumps(waiting))
    pulling["status"]["containerStatuses"][0]["state"]["waiting"] = again
    first = status(_subject(), _troubled(waiting), {}, NOW)

    assert status(_subject(), _troubled(pulling), first, NOW + timedelta(minutes=5)) == first


def _troubled(pod: Any) -> ObservedPool:
    return ObservedPool(
        workload=workload(2, 0), picker=workload(2, 2), envoy=workload(2, 2), troubles=troubles([pod])
    )


TEXT = st.text(max_size=200)
TERMINATED = st.fixed_dictionaries(
    {},
    optional={
        "exitCode": st.integers(0, 255),
        "reason": st.sampled_from(["Error", "OOMKilled", "Completed", "ContainerCannotRun", "StartError"]),
        "message": TEXT,
        "startedAt": st.just("2026-11-21T11:40:02Z"),
        "finishedAt": st.just("2026-11-21T12:40:02Z"),
    },
)
WAITING = st.fixed_dictionaries(
    {},
    optional={
        "reason": st.sampled_from(
            [
                "ErrImagePull",
                "CrashLoopBackOff",
                "CreateContainerConfigError",
                "CreateContainerError",
                "PodInitializing",
            ]
        ),
        "message": TEXT,
    },
)
CONTAINER: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"name": st.sampled_from(["engine", "picker", "envoy", "sidecar"])},
    optional={
        "ready": st.booleans(),
        "restartCount": st.integers(0, 9),
        "state": st.one_of(
            st.none(),
            st.fixed_dictionaries({"waiting": WAITING}),
            st.fixed_dictionaries({"terminated": TERMINATED}),
            st.just({"running": {}}),
        ),
        "lastState": st.one_of(st.none(), st.fixed_dictionaries({"terminated": TERMINATED})),
    },
)
CONDITION = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["Ready", "PodScheduled", "DisruptionTarget"]),
        "status": st.sampled_from(["True", "False"]),
    },
    optional={
        "reason": st.sampled_from(["Unschedulable", "SchedulingGated", "DeletionByTaintManager"]),
        "message": TEXT,
    },
)
STATUS = st.fixed_dictionaries(
    {},
    optional={
        "phase": st.sampled_from(["Pending", "Running", "Failed", "Succeeded", "Unknown"]),
        "reason": st.sampled_from(
            ["Evicted", "NodeLost", "UnexpectedAdmissionError", "OutOfcpu", "Preempting"]
        ),
        "message": TEXT,
        "conditions": st.one_of(st.none(), st.lists(CONDITION, max_size=3)),
        "containerStatuses": st.one_of(st.none(), st.lists(CONTAINER, max_size=2)),
        "initContainerStatuses": st.one_of(st.none(), st.lists(CONTAINER, max_size=1)),
    },
)


@given(st.lists(st.tuples(st.sampled_from(["engine", PICKER]), STATUS), max_size=3))
def test_nothing_that_a_pod_may_say_breaks_the_status(said: list[tuple[str, Any]]) -> None:
    """Absent fields, empty messages and odd texts give a known reason, in order, on one bounded line."""
    pods = [merged(healthy(part, f"twig-{i}"), {"status": found}) for i, (part, found) in enumerate(said)]
    found = troubles(pods)

    ranks = [ORDER.index(each.reason) for each in found]
    assert ranks == sorted(ranks)
    for each in found:
        assert each.message.isprintable()
        assert len(each.message) < 1200


@pytest.mark.parametrize(
    ("lacking", "limits", "field"),
    [
        ("rdma/hca", {"nvidia.com/gpu": "8", "rdma/hca": "1"}, "spec.interconnect.rdma.resourceName"),
        ("nvidia.com/roce", {"nvidia.com/gpu": "8", "nvidia.com/roce": "1"}, "spec.interconnect.rdma"),
        ("vendor.example/rdma_a", {"vendor.example/npu": "8"}, "spec.interconnect.rdma.resourceName"),
        ("nvidia.com/gpu", {"nvidia.com/gpu": "8", "rdma/hca": "1"}, "spec.accelerator"),
        ("nvidia.com/mig-1g", {"nvidia.com/mig-1g": "1", "rdma/hca": "1"}, "spec.accelerator"),
    ],
)
def test_a_network_card_that_nodes_lack_is_no_accelerator(
    lacking: str, limits: dict[str, str], field: str
) -> None:
    """A pod that waits for RDMA devices gets another remedy than one that waits for accelerators."""
    message = f"0/2 nodes are available: 2 Insufficient {lacking}."
    pod = {"spec": {"containers": [{"resources": {"limits": {"memory": "1Gi", **limits}}}]}}
    found = scheduling_remedy(message, pod, PARTS[ENGINE])
    assert field in found
    assert ("spec.accelerator" in found) == (field == "spec.accelerator")


@pytest.mark.parametrize(
    ("component", "secret"),
    [(KV_CLEANER, "spec.picker.podTemplate.spec"), (LMCACHE, "spec.podTemplate.spec")],
)
def test_a_pod_beside_the_engines_hides_no_trouble_of_theirs(component: str, secret: str) -> None:
    """The cleaner's pod, or a server of LMCache, is no newer generation of the engines: the troubles of both
    are in the status, each with the fields of its own component."""
    engine = BY_NAME["image-private"].pod
    beside = merged(
        engine,
        {
            "metadata": {
                "name": "twig-beside",
                "creationTimestamp": "2026-11-21T11:59:00Z",
                "labels": {COMPONENT: component, "pod-template-hash": "another"},
            }
        },
    )
    found = troubles([engine, beside])

    assert {each.component for each in found} == {ENGINE, component}
    ours = next(each for each in found if each.component == component)
    assert f"{secret}.imagePullSecrets" in ours.message
    made = status(subject("agents"), replace(WELL, troubles=found), {}, NOW)
    ready = next(each for each in made["conditions"] if each["type"] == "Ready")
    assert "twig-beside" in ready["message"]


def test_what_refuses_the_pickers_pods_explains_a_download_that_does_not_begin() -> None:
    """A Job says nothing of pods that are refused: the wait for it has the cause of refused pickers."""
    message = 'container "istio-init" must not'
    failed = {"type": "ReplicaFailure", "status": "True", "message": message}
    picker = merged(workload(2, 0), {"status": {"conditions": [failed]}})
    waits, job = ("Job a has to download first",), {"metadata": {"name": "a"}, "spec": {}, "status": {}}
    observed = replace(WELL, workload=None, waits=waits, picker=picker, download=job)
    ready = status(subject(), observed, {}, NOW)["conditions"][0]

    assert (ready["type"], ready["reason"]) == ("Ready", "PodsRefused")
    assert ready["message"].startswith("Job a has to download first; ")
    assert 'sidecar.istio.io/inject: "false"` in spec.picker.podTemplate' in ready["message"]
