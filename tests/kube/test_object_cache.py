"""Objects after lists and watch events."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.endpoints.kubernetes.documents import pod

from kvist_epp.endpoints.kubernetes.pod_endpoints import Pod
from kvist_kube.errors import ApiError
from kvist_kube.informer import recovery
from kvist_kube.object_cache import ListPage, ObjectCache, decode


def page(version: int, *documents: dict[str, Any], token: str = "") -> ListPage:
    """Return a page of a list."""
    meta = {"resourceVersion": str(version), "continue": token}
    return decode(json.dumps({"metadata": meta, "items": documents}).encode(), ListPage)


def event(kind: str, document: dict[str, Any], version: int) -> bytes:
    """Return a line of a watch."""
    head = document.get("metadata", {}) | {"resourceVersion": str(version)}
    return json.dumps({"type": kind, "object": document | {"metadata": head}}).encode()


def addresses(cache: ObjectCache[Pod]) -> dict[str, str]:
    """Return the address of each object."""
    return {name: found.status.pod_ip for name, found in cache.objects.items()}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete", "list", "bookmark"]), st.sampled_from("abc"), st.integers(1, 9)
    )
)


@given(STEPS)
def test_any_history_ends_as_the_cluster_is(steps: list[tuple[str, str, int]]) -> None:
    """After any sequence of changes, lists and bookmarks the cache equals the cluster, at its version."""
    cluster: dict[str, dict[str, Any]] = {}
    cache = ObjectCache(Pod)
    cache.replace([page(0)])
    for version, (step, name, number) in enumerate(steps, 1):
        if step == "put":
            kind = "MODIFIED" if name in cluster else "ADDED"
            cluster[name] = pod(name, f"10.0.0.{number}")
            cache.on_line(event(kind, cluster[name], version))
        elif step == "delete" and name in cluster:
            cache.on_line(event("DELETED", cluster.pop(name), version))
        elif step == "list":
            found = list(cluster.values())
            cache.replace([page(version, *found[:1], token="more"), page(version, *found[1:])])
        else:
            cache.on_line(event("BOOKMARK", {}, version))
        assert cache.version == str(version)
    assert addresses(cache) == {name: found["status"]["podIP"] for name, found in cluster.items()}


def test_unchanged_objects_stay_the_same_ones() -> None:
    """A list with an unchanged object keeps the same Python object."""
    cache = ObjectCache(Pod)
    cache.replace([page(1, pod("a"), pod("b"))])
    first = dict(cache.objects)
    cache.replace([page(2, pod("a"), pod("b", "10.0.0.9"))])

    assert cache.objects["a"] is first["a"]
    assert cache.objects["b"] is not first["b"]


def test_an_object_that_cannot_be_read_keeps_what_was_known() -> None:
    """An unreadable pod is named and keeps its last state; other pods are not affected."""
    cache = ObjectCache(Pod)
    cache.replace([page(1, pod("a"), pod("b"))])
    strange = pod("a") | {"status": {"phase": 7}}
    cache.on_line(event("MODIFIED", strange, 2))
    assert sorted(addresses(cache)) == ["a", "b"]
    assert "phase" in cache.unreadable["a"]

    cache.replace([page(3, strange, pod("b"))])
    assert sorted(addresses(cache)) == ["a", "b"]

    cache.on_line(event("MODIFIED", pod("a"), 4))
    assert cache.unreadable == {}
    cache.replace([page(5, strange)])
    cache.replace([page(6)])
    assert (addresses(cache), cache.unreadable) == ({}, {})


def test_the_end_of_a_watch_is_distinguished() -> None:
    """An ERROR event returns the status that ends the watch, and changes nothing."""
    cache = ObjectCache(Pod)
    cache.replace([page(1, pod("a"))])
    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
    failure = cache.on_line(json.dumps(gone).encode())

    assert failure is not None
    assert (failure.code, cache.version, sorted(addresses(cache))) == (410, "1", ["a"])


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b'{"type":"ADDED"}', b'{"type":"ADDED","object":[]}', b"\xff"]
)
def test_garbage_is_no_event(line: bytes) -> None:
    """A line that is not an event raises ValueError, and the cache stays as it was."""
    cache = ObjectCache(Pod)
    cache.replace([page(1, pod("a"))])
    with pytest.raises(ValueError, match="not a"):
        cache.on_line(line)
    assert (cache.version, sorted(addresses(cache))) == ("1", ["a"])


def test_a_list_counts_whole_or_not_at_all() -> None:
    """An item that is not an object invalidates the whole list, and the cache stays as it was."""
    cache = ObjectCache(Pod)
    cache.replace([page(1, pod("a"))])
    with pytest.raises(ValueError, match="not a"):
        cache.replace([page(2, {"metadata": 3})])
    assert (cache.version, sorted(addresses(cache))) == ("1", ["a"])


@pytest.mark.parametrize(
    ("status", "failures", "at_once", "relist"),
    [
        (0, 1, False, False),
        (401, 1, True, False),
        (401, 2, False, False),
        (410, 1, True, True),
        (410, 2, False, True),
        (403, 1, False, True),
        (429, 1, False, False),
        (500, 1, False, True),
        (504, 1, False, True),
    ],
)
def test_what_to_do_about_a_failure(status: int, failures: int, *, at_once: bool, relist: bool) -> None:
    """The first 401 or 410 is retried at once, a second one is not; only refusals invalidate the version."""
    todo = recovery(ApiError("x", status), failures, lambda: 0.0)
    assert (todo.pause == 0.0, todo.relist) == (at_once, relist)


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 60))
def test_pauses_grow_and_end(failures: int, chance: float, wanted: float) -> None:
    """A pause is between 0.1 and 10 seconds, but never shorter than the server asks for."""
    pause = recovery(ApiError("x", 503, retry_after=wanted), failures, lambda: chance).pause
    assert pause == wanted if wanted > 10.0 else 0.1 <= pause <= 10.0
    assert pause >= wanted
