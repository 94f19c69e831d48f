"""Conditions follow the API conventions and the observed objects, and do not change at rest."""

import itertools
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.crd.cases import planned
from tests.operator.manifested import CASES, one, rendered, resource
from tests.operator.test_crd_agrees import complaints, root

from kvist_operator.errors import OperatorError, SpecError
from kvist_operator.manifests import Note, Site
from kvist_operator.plan import Plan
from kvist_operator.spec import Pool, read_pool
from kvist_operator.status import ObservedPool, Subject, Trouble, plan_status, status

Json = dict[str, Any]
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def pool(case: str) -> Pool:
    """Return a pool of tests/crd/valid."""
    return read_pool(resource(case))


PLANS: dict[str, Plan] = {case: planned(resource(case)) for case in CASES}


def subject(case: str = "minimal", **more: Any) -> Subject:
    """Return a subject with a plan."""
    notes = rendered(case).notes
    made = Subject(name="twig", generation=3, pool=pool(case), plan=PLANS[case], notes=notes)
    return replace(made, **more)


def workload(wanted: int = 2, **status_: Any) -> Json:
    """Return a Deployment with this status; by default all replicas are ready."""
    counts = {"replicas": wanted, "readyReplicas": wanted, "updatedReplicas": wanted}
    return {
        "kind": "Deployment",
        "metadata": {"name": "twig", "generation": 5},
        "spec": {"replicas": wanted},
        "status": counts | {"observedGeneration": 5} | status_,
    }


WELL = ObservedPool(workload=workload(), picker=workload(), envoy=workload())


def conditions(made: Json) -> dict[str, Json]:
    """Return the conditions by type."""
    return {each["type"]: each for each in made["conditions"]}


def told(observed: ObservedPool, what: Subject | None = None) -> dict[str, tuple[str, str]]:
    """Return status and reason of each condition."""
    made = status(what or subject(), observed, {}, NOW)
    return {each["type"]: (each["status"], each["reason"]) for each in made["conditions"]}


def test_all_is_well() -> None:
    """A complete pool is ready, and has no conditions that do not apply to it."""
    made = status(subject(), WELL, {}, NOW)

    assert told(WELL) == {
        "Ready": ("True", "AsAsked"),
        "Accepted": ("True", "Planned"),
        "Available": ("True", "Serving"),
        "Progressing": ("False", "Settled"),
        "Precise": ("True", "KvEvents"),
    }
    assert (made["replicas"], made["readyReplicas"], made["selector"]) == (2, 2, "kvist.dev/pool=twig")
    assert (made["url"], made["targetPorts"]) == ("http://twig.forest.svc:8000", [{"number": 8000}])
    assert made["plan"]["accelerator"]["summary"] == "1 × H100-80GB"


@pytest.mark.parametrize(
    ("observed", "ready", "available", "progressing"),
    [
        (ObservedPool(), ("False", "NotStarted"), "NoReplicaReady", ("False", "NotStarted")),
        (
            replace(WELL, workload=workload(updatedReplicas=1, readyReplicas=1)),
            ("False", "RollingOut"),
            "Serving",
            ("True", "RollingOut"),
        ),
        (
            replace(WELL, workload=workload(readyReplicas=1)),
            ("False", "Scaling"),
            "Serving",
            ("True", "Scaling"),
        ),
        (
            replace(WELL, workload=workload(observedGeneration=4)),
            ("False", "Scaling"),
            "Serving",
            ("True", "Scaling"),
        ),
        (
            replace(
                WELL,
                workload=workload(updatedReplicas=1, readyReplicas=1),
                troubles=[Trouble("ImagePull", "pull access denied")],
            ),
            ("False", "ImagePull"),
            "Serving",
            ("True", "ImagePull"),
        ),
        (
            replace(
                WELL,
                workload=workload(
                    updatedReplicas=1,
                    readyReplicas=0,
                    conditions=[{"type": "Progressing", "reason": "ProgressDeadlineExceeded"}],
                ),
            ),
            ("False", "DeadlineExceeded"),
            "NoReplicaReady",
            ("False", "DeadlineExceeded"),
        ),
        (replace(WELL, waits=["accelerators first"]), ("False", "Waiting"), "Serving", ("True", "Waiting")),
        (replace(WELL, workload=workload(0)), ("True", "ScaledToZero"), "ScaledToZero", ("False", "Settled")),
        (replace(WELL, picker=None), ("False", "PickerUnavailable"), "Serving", ("False", "Settled")),
        (
            replace(WELL, conflicts=["Service twig"]),
            ("False", "NameConflict"),
            "Serving",
            ("False", "Settled"),
        ),
    ],
)
def test_what_is_missing_is_the_reason(
    observed: ObservedPool, ready: tuple[str, str], available: str, progressing: tuple[str, str]
) -> None:
    """Ready names the first problem to solve; Available depends on the serving engines, of any generation."""
    found = told(observed)

    assert found["Ready"] == ready
    assert found["Available"][1] == available
    assert found["Progressing"] == progressing


def test_a_broken_image_leaves_the_old_generation_serving_and_says_why() -> None:
    """Progressing and Ready quote the kubelet."""
    observed = replace(
        WELL,
        workload=workload(updatedReplicas=1, readyReplicas=1),
        troubles=[Trouble("ImagePull", "vllm/vllm-openai:v9: not found")],
    )
    found = conditions(status(subject(), observed, {}, NOW))

    assert found["Available"]["status"] == "True"
    assert "vllm/vllm-openai:v9: not found" in found["Ready"]["message"]


def test_a_spec_that_cannot_be_read_keeps_what_runs() -> None:
    """An unreadable spec leaves the plan and the address of the last good one, and Available true."""
    old = status(subject(), WELL, {}, NOW)
    error = SpecError("spec.engine.maxModelLen", "is a string")
    made = status(Subject(name="twig", generation=4, error=error), WELL, old, NOW)
    found = conditions(made)

    assert (made["plan"], made["url"]) == (old["plan"], old["url"])
    assert (found["Accepted"]["status"], found["Accepted"]["reason"]) == ("False", "InvalidSpec")
    assert found["Ready"]["message"] == "spec.engine.maxModelLen: is a string"
    assert found["Available"]["status"] == "True"


def test_a_refused_plan_is_shown_until_something_runs() -> None:
    """The refusal is the message; the plan of running engines is not overwritten by a refused one."""
    found = resource("minimal")
    found["spec"] |= {
        "model": {"source": "hf://meta-llama/Llama-3.1-405B-Instruct"},
        "accelerator": {"product": "L4", "count": 1},
    }
    refused = replace(subject(), plan=planned(found))
    made = status(refused, ObservedPool(), {}, NOW)

    assert conditions(made)["Accepted"]["reason"] == "DoesNotFit"
    assert "lack" in conditions(made)["Ready"]["message"]
    assert made["plan"]["verdict"] == "refused"
    old = status(subject(), WELL, {}, NOW)
    assert status(refused, WELL, old, NOW)["plan"] == old["plan"]


def test_an_unverified_plan_says_its_doubts() -> None:
    """An unverified plan is accepted, with its doubts as the message."""
    found = conditions(status(subject("speculative"), WELL, {}, NOW))["Accepted"]

    assert (found["status"], found["reason"]) == ("True", "Unverified")
    assert "Future-GPU" in found["message"]


PARENT = {
    "group": "gateway.networking.k8s.io",
    "kind": "Gateway",
    "name": "edge",
    "namespace": "gateways",
    "sectionName": "http",
}


def route(*said: Json) -> Json:
    """Return the rendered HTTPRoute with these conditions of controllers."""
    made = one(rendered("route"), "HTTPRoute", "twig")
    return made | {"status": {"parents": list(said)}}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([], ("Unknown", "NoAnswer")),
        (
            [
                {
                    "parentRef": PARENT | {"name": "other"},
                    "conditions": [{"type": "Accepted", "status": "True"}],
                }
            ],
            ("Unknown", "NoAnswer"),
        ),
        (
            [
                {
                    "parentRef": PARENT,
                    "conditions": [
                        {"type": "Accepted", "status": "True"},
                        {"type": "ResolvedRefs", "status": "True"},
                    ],
                }
            ],
            ("True", "RouteAccepted"),
        ),
        (
            [
                {
                    "parentRef": PARENT,
                    "conditions": [
                        {"type": "Accepted", "status": "False", "reason": "NotAllowedByListeners"}
                    ],
                }
            ],
            ("False", "NotAllowedByListeners"),
        ),
        (
            [
                {
                    "parentRef": PARENT,
                    "conditions": [
                        {"type": "Accepted", "status": "True"},
                        {"type": "ResolvedRefs", "status": "False", "reason": "BackendNotFound"},
                    ],
                }
            ],
            ("False", "BackendNotFound"),
        ),
    ],
)
def test_a_route_is_attached_when_its_gateway_says_so(said: list[Json], expected: tuple[str, str]) -> None:
    """A route without a status is not attached, and the status of another Gateway does not count."""
    observed = replace(WELL, route=route(*said))

    found = told(observed, subject("route"))
    assert found["GatewayAttached"] == expected
    assert found["Ready"][0] == ("True" if expected[0] == "True" else "False")


def says(name: str, kind: str, status: str, reason: str = "", **ref: str) -> Json:
    """Return what one Gateway reports on an InferencePool."""
    condition = {"type": kind, "status": status, "reason": reason, "message": f"{reason} here"}
    return {"parentRef": PARENT | {"name": name} | ref, "conditions": [condition]}


@pytest.mark.parametrize(
    ("said", "expected", "fit", "message"),
    [
        ([], ("Unknown", "NoRoute"), "True", "InferencePool twig of inference.networking.k8s.io"),
        ([{"parentRef": {"kind": "Status", "name": "default"}}], ("Unknown", "NoRoute"), "True", "create it"),
        ([{"parentRef": None}, {}], ("Unknown", "NoRoute"), "True", "create it"),
        ([{"parentRef": PARENT}], ("True", "RouteAccepted"), "True", "gateways/edge"),
        (
            [
                says("b", "ResolvedRefs", "False", "NoPicker", namespace="forest"),
                says("a", "Accepted", "True"),
            ],
            ("True", "RouteAccepted"),
            "True",
            "gateways/a; b: NoPicker here",
        ),
        (
            [says("a", "Accepted", "False", "NoRoute")],
            ("False", "NoRoute"),
            "False",
            "gateways/a: NoRoute here",
        ),
        ([says("a", "Accepted", "Unknown", "Pending")], ("Unknown", "Pending"), "False", "Pending here"),
    ],
)
def test_without_a_route_the_gateways_that_name_the_pool_say_so(
    said: list[Json], expected: tuple[str, str], fit: str, message: str
) -> None:
    """A pool without a route is attached when one Gateway accepts its InferencePool, and Ready waits for no
    report: some gateways write none."""
    extension = one(rendered("named-by-routes"), "InferencePool", "twig") | {"status": {"parents": said}}

    observed = replace(WELL, extension=extension)
    found = told(observed, subject("named-by-routes"))
    assert found["GatewayAttached"] == expected
    assert found["Ready"][0] == fit
    whole = conditions(status(subject("named-by-routes"), observed, {}, NOW))
    assert message in whole["GatewayAttached"]["message"]


def test_a_missing_api_is_a_condition() -> None:
    """Missing APIs of the gateway or of monitoring are conditions, as is a picker without tokenizer, with a
    remedy."""
    bare = Site(apis=frozenset())
    notes = [
        *rendered("agents", bare).notes,
        *rendered("route", bare).notes,
        *rendered("claim", Site(), picker={}).notes,
    ]
    found = told(WELL, subject("route", notes=notes))

    assert found["GatewayAttached"] == ("False", "ApiMissing")
    assert found["Monitored"] == ("False", "ApiMissing")
    assert found["Precise"] == ("False", "NoTokenizer")
    assert any(
        "no node label" in line for line in status(subject("route", notes=notes), WELL, {}, NOW)["advice"]
    )


ERRORS: list[OperatorError | None] = [None, SpecError("spec.x", "is wrong")]
NOTES = [
    Note("", "NodesUnknown", "say which"),
    Note("Precise", "NoTokenizer", "set it"),
    Note("GatewayAttached", "ApiMissing", "install it"),
]
NUMBER = st.integers(0, 3)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Subject, ObservedPool]:
    """Generate any combination of inputs."""
    case = draw(st.sampled_from(sorted(CASES)))
    error = draw(st.sampled_from(ERRORS))
    known = error is None or draw(st.booleans())
    what = Subject(
        name="twig",
        generation=draw(st.integers(1, 9)),
        pool=pool(case) if known else None,
        plan=PLANS[case] if error is None else None,
        error=error,
        notes=draw(st.lists(st.sampled_from(NOTES), unique=True)),
    )
    return what, ObservedPool(
        workload=draw(st.none() | st.builds(_workload, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER)),
        picker=draw(st.none() | st.just(workload())),
        envoy=draw(st.none() | st.just(workload())),
        route=draw(st.none() | st.just(route())),
        troubles=draw(st.lists(st.just(Trouble("CrashLoop", "x" * 9000)), max_size=1)),
        conflicts=draw(st.lists(st.just("Service twig"), max_size=1)),
        waits=draw(st.lists(st.just("something"), max_size=1)),
        kv_tokens=draw(st.none() | st.just(1000)),
    )


def _workload(replicas: int, there: int, ready: int, updated: int, seen: int) -> Json:
    return workload(
        replicas, replicas=there, readyReplicas=ready, updatedReplicas=updated, observedGeneration=seen + 2
    )


@pytest.mark.parametrize(
    ("available", "serving", "done"),
    [(0, "JustReady", "JustReady"), (1, "Serving", "JustReady"), (2, "Serving", "AsAsked")],
)
def test_a_replica_counts_once_gateways_can_know_it(available: int, serving: str, done: str) -> None:
    """A replica counts after ``minReadySeconds``, since an Envoy resolves names every two seconds: one such
    replica makes the pool available, all of them make it ready."""
    made = workload(availableReplicas=available)
    made["spec"]["minReadySeconds"] = 10

    found = told(replace(WELL, workload=made))

    assert found["Available"][1] == serving
    assert found["Ready"] == ("True" if done == "AsAsked" else "False", done)


@given(situations(), situations(), st.integers(0, 9999))
def test_whatever_happens_conditions_follow_the_conventions(
    first: tuple[Subject, ObservedPool], second: tuple[Subject, ObservedPool], later: int
) -> None:
    """Each condition has status, reason, message and generation, and its time changes only with its status;
    the status fits the CRD, and the same input later gives the same status."""
    old = status(*first, {}, NOW)
    now = NOW + timedelta(seconds=later)
    made = status(*second, old, now)

    before = conditions(old)
    for kind, each in conditions(made).items():
        assert each["observedGeneration"] == second[0].generation
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]*", each["reason"])
        assert each["message"]
        stays = kind in before and before[kind]["status"] == each["status"]
        expected = before[kind]["lastTransitionTime"] if stays else now.strftime("%Y-%m-%dT%H:%M:%SZ")
        assert each["lastTransitionTime"] == expected
    assert list(complaints(made, root()["properties"]["status"])) == []
    assert status(*second, made, now + timedelta(days=1)) == made


@given(situations())
def test_ready_is_never_claimed_wrongly(situation: tuple[Subject, ObservedPool]) -> None:
    """Ready implies accepted, attached, settled, and served unless no replica is requested."""
    found = conditions(status(*situation, {}, NOW))
    if found["Ready"]["status"] == "True":
        assert found["Accepted"]["status"] == "True"
        assert found["Progressing"]["reason"] == "Settled"
        assert found.get("GatewayAttached", {"status": "True"})["status"] == "True"
        assert "True" in (found["Available"]["status"], str(found["Available"]["reason"] == "ScaledToZero"))
        assert not situation[1].conflicts


def test_a_plan_in_the_status_has_the_facts_of_the_command() -> None:
    """The plan in the status equals that of the command, with keys in camelCase except names of variables."""
    plan = PLANS["agents"]
    shown, told_ = plan_status(plan), plan.to_dict()

    assert shown["memory"]["kvTokens"] == told_["memory"]["kv_tokens"]
    assert shown["env"] == told_["env"]
    assert shown["args"] == told_["args"]
    assert [c["field"] for c in shown["choices"]] == [c["field"] for c in told_["choices"]]
    keys = itertools.chain(shown, *(v for k, v in shown.items() if isinstance(v, dict) and k != "env"))
    assert [key for key in keys if "_" in key] == []
