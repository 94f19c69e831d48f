"""Finding the cluster, and requests to its API server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.epp.endpoints.kubernetes.documents import PODS, pod
from tests.fakes.apiserver import ApiServer, api_server

from kvist_kube.connection import Connection, find_cluster, own_namespace, retry_after_seconds
from kvist_kube.errors import ApiError, ClusterNotFound


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """Return a small API server with one pod."""
    async with api_server() as made:
        made.put(PODS, "a", **pod())
        yield made


def test_without_a_cluster_the_remedies_are_named(tmp_path: Path) -> None:
    """Without a cluster and a kubeconfig the error lists everything that was tried."""
    with pytest.raises(ClusterNotFound, match=r"KUBERNETES_SERVICE_HOST.*KUBECONFIG.*--endpoints-file"):
        find_cluster({}, home=tmp_path / "none")


async def test_a_kubeconfig_that_is_none_is_a_problem(tmp_path: Path) -> None:
    """A missing or broken kubeconfig fails the request, not the program: it may be corrected later."""
    file = tmp_path / "kubeconfig"
    for text in (None, "", "[]", "a: b", "{"):
        if text is not None:
            file.write_text(text)
        api = Connection(find_cluster({"KUBECONFIG": str(file)}))
        with pytest.raises(ApiError):
            await api.get("/api", [])
        await api.close()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"POD_NAMESPACE": "a", "NAMESPACE": "b"}, "a"),
        ({"NAMESPACE": "b"}, "b"),
        ({}, "c"),
    ],
)
def test_the_namespace_is_our_own(tmp_path: Path, environment: dict[str, str], expected: str) -> None:
    """The namespace is POD_NAMESPACE, llm-d's NAMESPACE, the service account's, else ``default``, in this
    order."""
    (tmp_path / "namespace").write_text("c\n")
    assert own_namespace(environment, account=tmp_path) == expected
    assert own_namespace({}, account=tmp_path / "none") == "default"


async def test_a_token_that_is_no_header(server: ApiServer, tmp_path: Path) -> None:
    """A token that is not a valid header fails the request with a message."""
    api = Connection(find_cluster({"KUBECONFIG": str(server.kubeconfig(tmp_path, token="t\n"))}))
    with pytest.raises(ApiError, match="ValueError"):
        await api.get(PODS, [])
    await api.close()


async def test_requests_are_counted_and_answers_are_whole(server: ApiServer, tmp_path: Path) -> None:
    """A failure is an answer like any other; each one is counted by method and status."""
    connection = Connection(find_cluster({"KUBECONFIG": str(server.kubeconfig(tmp_path))}))
    server.answers.extend([(503, "busy"), (401, "Unauthorized")])
    busy = await connection.request("GET", PODS)
    unknown = await connection.request("GET", PODS)
    found = await connection.request("GET", PODS)
    await connection.close()

    assert (busy.status, busy.body, busy.retry_after) == (503, b"busy", 0.0)
    assert (unknown.status, connection.renewals) == (401, 1)
    assert found.status == 200
    assert connection.requests == {"GET 503": 1, "GET 401": 1, "GET 200": 1}


@pytest.mark.parametrize(
    ("header", "seconds"), [("", 0.0), ("7", 7.0), ("600", 60.0), ("-1", 0.0), ("Fri, 31 Dec 1999", 0.0)]
)
def test_retry_after_is_bounded(header: str, seconds: float) -> None:
    """Seconds count up to a minute; dates and nonsense count as absent."""
    assert retry_after_seconds(header) == seconds
