"""Endpoints of pods: which pods count, refusals, event addresses."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.endpoints.kubernetes.documents import parsed, pod

from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.kubernetes import pod_endpoints as pods


def made(document: dict[str, Any], *ports: int) -> list[Endpoint]:
    """Return the endpoints of a pod without complaints."""
    complaints: list[str] = []
    found = pods.endpoints_of(parsed(document), ports or (8000,), complaints.append)
    assert complaints == []
    return list(found)


def test_a_ready_pod_is_an_endpoint() -> None:
    """All fields of an endpoint are read from its pod."""
    labels = {"app": "vllm", "kvist.dev/role": "decode"}
    assert made(pod(labels=labels)) == [
        Endpoint(
            name="a",
            namespace="ns",
            address="10.0.0.1",
            port=8000,
            labels=labels,
            kv_events="tcp://10.0.0.1:5557",
            kv_replay="tcp://10.0.0.1:5657",
            uid="uid-a",
        )
    ]


@pytest.mark.parametrize(
    "document",
    [pod(phase="Pending"), pod(phase="Failed"), pod(phase="Succeeded"), pod(address=""), pod(address="host")],
)
def test_what_does_not_run_is_not_there(document: dict[str, Any]) -> None:
    """A pod that is not running, or has no usable address, is not an endpoint."""
    assert made(document) == []


@pytest.mark.parametrize(
    ("document", "refusal"),
    [
        (pod(ready=False), "not ready"),
        (pod() | {"status": {"phase": "Running", "podIP": "10.0.0.1"}}, "not ready"),
        (pod(deletionTimestamp="2026-01-01T00:00:00Z"), "terminating"),
        (pod(ready=False, deletionTimestamp="2026-01-01T00:00:00Z"), "terminating"),
        (pod(), ""),
    ],
)
def test_objections(document: dict[str, Any], refusal: str) -> None:
    """A pod has no refusal only if its Ready condition is true and it is not terminating."""
    [endpoint] = made(document)
    assert endpoint.refusal == refusal


def test_several_ports_are_several_endpoints() -> None:
    """Each port has its own name, rank and event ports, and no two share a publisher."""
    found = made(pod(address="fd00::1"), 8000, 8001)

    assert [e.name for e in found] == ["a-rank-0", "a-rank-1"]
    assert [e.hostport for e in found] == ["[fd00::1]:8000", "[fd00::1]:8001"]
    sources = [source for e in found for source in e.sources]
    assert [(s.publisher, s.rank, s.events, s.replay) for s in sources] == [
        ("uid-a/0", 0, "tcp://[fd00::1]:5557", "tcp://[fd00::1]:5657"),
        ("uid-a/1", 1, "tcp://[fd00::1]:5558", "tcp://[fd00::1]:5658"),
    ]
    assert {name for e in found for name in e.aliases} == {"a", "ns/a", "[fd00::1]:8000"}


@pytest.mark.parametrize(
    ("labels", "annotations", "expected"),
    [
        ({"kvist.dev/kv-storage-namespace": "a"}, {}, "a"),
        ({}, {"kvist.dev/kv-storage-namespace": "b"}, "b"),
        ({"kvist.dev/kv-storage-namespace": "a"}, {"kvist.dev/kv-storage-namespace": "b"}, "b"),
        ({}, {}, ""),
    ],
)
def test_the_storage_that_an_engine_shares_has_a_name(
    labels: dict[str, str], annotations: dict[str, str], expected: str
) -> None:
    """The name comes from an annotation of the pod, else from its label; without both it shares none by
    name."""
    [endpoint] = made(pod(labels=labels, annotations=annotations))

    assert endpoint.storage_namespace == expected


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({"kvist.dev/kv-tiers": "lmcache", "kvist.dev/kv-storage-namespace": "a"}, "lmcache/a"),
        ({"kvist.dev/kv-tiers": "host,lmcache"}, "lmcache/ns/a"),
        ({"kvist.dev/kv-tiers": "host", "kvist.dev/kv-storage-namespace": "a"}, "a"),
        ({"kvist.dev/kv-storage-scope": "node", "kvist.dev/kv-storage-namespace": "a"}, "a@n1"),
        ({"kvist.dev/kv-storage-scope": "node"}, ""),
        ({"kvist.dev/kv-storage-scope": "moon", "kvist.dev/kv-storage-namespace": "a"}, "a"),
    ],
)
def test_a_server_of_lmcache_has_a_name_of_its_own(annotations: dict[str, str], expected: str) -> None:
    """A server is no volume, whatever its name; without one no other endpoint shares it. Where each node has
    a storage of the name, the node's name is added."""
    described = pod(annotations=annotations)
    described["spec"] = {"nodeName": "n1"}
    [endpoint] = made(described)

    assert endpoint.storage_namespace == expected


@pytest.mark.parametrize(("text", "tokens"), [("48000", 48_000), ("0", None), ("many", None)])
def test_a_server_s_size_is_read(text: str, tokens: int | None) -> None:
    """Tokens that a server of LMCache can hold; anything but a positive number is not known."""
    [endpoint] = made(pod(annotations={"kvist.dev/kv-storage-tokens": text}))

    assert endpoint.storage_tokens == tokens


def test_annotations_win_over_labels() -> None:
    """Event ports come from labels or annotations; annotations take precedence."""
    labels = {"kvist.dev/kv-events-port": "7000", "kvist.dev/data-parallel-size": "2"}
    annotations = {"kvist.dev/kv-events-port": "6000", "kvist.dev/kv-replay-port": "none", "other": "x"}
    [endpoint] = made(pod(labels=labels, annotations=annotations))

    assert (endpoint.kv_events, endpoint.kv_replay, endpoint.ranks) == ("tcp://10.0.0.1:6000", None, 2)


def test_an_engine_without_events() -> None:
    """A pod can declare that its engine publishes no events."""
    [endpoint] = made(pod(annotations={"kvist.dev/kv-events": "false"}))
    assert endpoint.sources == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kv-events-port", "many"),
        ("kv-events-port", "0"),
        ("kv-replay-port", "65536"),
        ("data-parallel-size", "-1"),
        ("data-parallel-size", "٣"),
        ("kv-events", "maybe"),
    ],
)
def test_nonsense_is_named_and_passed_over(name: str, text: str) -> None:
    """An unreadable setting is reported by pod, name and text, and its default is used."""
    complaints: list[str] = []
    document = pod(annotations={f"kvist.dev/{name}": text})
    found = pods.endpoints_of(parsed(document), (8000,), complaints.append)

    assert list(found) == made(pod())
    [complaint] = complaints
    assert all(part in complaint for part in ("a: ", f"kvist.dev/{name}", repr(text)))


def test_a_second_family_has_no_effect() -> None:
    """The first address of a dual-stack pod counts, as for gateways; podIPs where podIP is missing."""
    status = {"phase": "Running", "podIPs": [{"ip": "FD00::0:1"}, {"ip": "10.0.0.1"}]}
    [endpoint] = made(pod() | {"status": status})
    assert endpoint.address == "fd00::1"


def fleet_of(*documents: dict[str, Any]) -> EndpointSet:
    """Return the endpoint set of these pods."""
    found = [parsed(document) for document in documents]
    return pods.endpoint_set((pods.pod_age(one), pods.endpoints_of(one, (8000,), print)) for one in found)


def test_two_pods_at_one_address() -> None:
    """A pod left behind by a lost node does not hide the pod that has its address now."""
    left = pod("old", creationTimestamp="2026-01-01T00:00:00Z", deletionTimestamp="2026-01-02T00:00:00Z")
    now = pod("new", creationTimestamp="2026-01-03T00:00:00Z")
    assert [e.name for e in fleet_of(left, now)] == ["new"]
    assert [e.name for e in fleet_of(now, left)] == ["new"]

    younger = pod("younger", creationTimestamp="2026-01-04T00:00:00Z")
    assert [e.name for e in fleet_of(younger, now)] == ["younger"]


PODS = st.lists(
    st.builds(
        pod,
        name=st.sampled_from("abcdef"),
        address=st.sampled_from(["10.0.0.1", "10.0.0.2", "fd00::1", ""]),
        ready=st.booleans(),
        uid=st.uuids().map(str),
    ),
    unique_by=lambda document: str(document["metadata"]["name"]),
)


@given(PODS)
def test_a_fleet_has_each_address_once(documents: list[dict[str, Any]]) -> None:
    """Any pods give one endpoint for each address, a ready one if there is any, sorted by name."""
    fleet = fleet_of(*documents)
    addresses = {d["status"]["podIP"] for d in documents if "podIP" in d["status"]}
    ready = {e.address for d in documents for e in made(d) if not e.refusal}

    assert [e.key for e in fleet] == sorted(e.key for e in fleet)
    assert sorted(e.address for e in fleet) == sorted(addresses)
    assert {e.address for e in fleet if not e.refusal} == ready
