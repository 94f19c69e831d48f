"""Lists and watches against an API server that refuses, stalls, sends nonsense and dies."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.epp.endpoints.kubernetes.documents import PODS, pod
from tests.fakes.apiserver import ApiServer, api_server

from kvist_epp.endpoints.kubernetes.pod_endpoints import Pod
from kvist_kube.connection import Connection, find_cluster
from kvist_kube.informer import DEFAULT_TIMES, Informer, InformerTimes, Resource


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """Return a small API server with one pod."""
    async with api_server() as made:
        made.put(PODS, "a", **pod())
        yield made


class Watching:
    """A running informer, and a way to wait for it."""

    def __init__(self, connection: Connection, times: InformerTimes, *, optional: bool = False) -> None:
        self.told = 0
        selectors = (("labelSelector", "app=vllm"),)
        self.informer = Informer(
            connection,
            Resource("", "v1", "pods", "ns"),
            Pod,
            self.changed,
            selectors=selectors,
            optional=optional,
            times=times,
        )

    def changed(self) -> None:
        """Count the call."""
        self.told += 1

    @property
    def names(self) -> list[str]:
        """Names of the known pods."""
        return sorted(self.informer.objects)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; the test's time limit bounds it."""
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def watching(
    server: ApiServer, folder: Path, times: InformerTimes = DEFAULT_TIMES, *, optional: bool = False
) -> AsyncIterator[Watching]:
    """Follow the pods of ``server``."""
    api = Connection(find_cluster({"KUBECONFIG": str(server.kubeconfig(folder))}))
    made = Watching(api, times, optional=optional)
    task = asyncio.create_task(made.informer.run())
    try:
        yield made
    finally:
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()


async def test_a_list_and_then_every_change(server: ApiServer, tmp_path: Path) -> None:
    """A watch begins at the list's version, and additions, changes and deletions arrive in order."""
    async with watching(server, tmp_path) as seen:
        await seen.until(lambda: seen.informer.watching)
        assert (seen.names, server.watches) == (["a"], [str(server.version)])

        server.put(PODS, "b", **pod("b"))
        server.put(PODS, "a", **pod(ready=False))
        server.delete(PODS, "b")
        await seen.until(lambda: seen.told == 4)
        assert seen.names == ["a"]
        assert (server.lists, len(server.watches)) == (1, 1)
        assert all(query["labelSelector"] == "app=vllm" for _, query in server.asked)


async def test_a_list_in_pages(server: ApiServer, tmp_path: Path) -> None:
    """A long list is read page by page and replaces the objects when complete."""
    for number in range(600):
        server.put(PODS, f"p{number}", **pod(f"p{number}"))
    async with watching(server, tmp_path) as seen:
        await seen.until(lambda: seen.informer.listed)
        assert (len(seen.names), server.lists, seen.told) == (601, 3, 1)


async def test_an_expired_next_page_of_a_list(server: ApiServer, tmp_path: Path) -> None:
    """If the next page of a list has expired, the whole list is requested in one page."""
    for number in range(300):
        server.put(PODS, f"p{number}", **pod(f"p{number}"))
    server.expired_pages = 1
    async with watching(server, tmp_path) as seen:
        await seen.until(lambda: seen.informer.listed)
        assert (len(seen.names), server.lists) == (301, 3)
        assert "limit" not in server.asked[2][1]


@pytest.mark.parametrize("told", ["status", "event"])
async def test_gone_means_a_new_list(server: ApiServer, tmp_path: Path, told: str) -> None:
    """A 410, as an answer or as the last event of a watch, leads to a list at once, which removes deleted
    objects."""
    async with watching(server, tmp_path) as seen:
        await seen.until(lambda: seen.informer.watching)
        server.put(PODS, "b", silently=True, **pod("b"))
        server.delete(PODS, "a", silently=True)
        server.forget()
        if told == "event":
            server.say({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
        else:
            server.end()
        await seen.until(lambda: seen.names == ["b"])
        await seen.until(lambda: seen.informer.watching)
        assert seen.informer.errors["410"] == 1
        assert seen.informer.problem == ""
        assert server.lists == 2


@pytest.mark.parametrize(
    "line", [b"{\n", b'{"type":"MODIFIED","object":7}\n', b'{"type":"ADDED"}\n', b"\xff\xfe\n"]
)
async def test_a_line_that_is_no_event(server: ApiServer, tmp_path: Path, line: bytes) -> None:
    """A line that is not an event ends the watch and leads to a list; the objects stay."""
    async with watching(server, tmp_path) as seen:
        await seen.until(lambda: seen.informer.watching)
        server.say(line)
        await seen.until(lambda: server.lists == 2 and seen.informer.watching)
        assert (seen.names, seen.informer.problem) == (["a"], "")


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, ""), (200, "[]"), (200, '{"metadata":{}}'), (200, '{"items":[]}'), (500, "etcdserver: no leader")],
)
async def test_a_list_that_is_none_takes_nothing_away(
    server: ApiServer, tmp_path: Path, status: int, body: str
) -> None:
    """An invalid answer to a list changes no object, and the next valid one counts."""
    async with watching(server, tmp_path) as seen:
        await seen.until(lambda: seen.informer.watching)
        server.answers.extend([(status, body)] * 2)
        server.forget()
        server.say({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
        await seen.until(lambda: seen.informer.problem != "")
        assert seen.names == ["a"]
        await seen.until(lambda: seen.informer.watching)
        assert (seen.names, seen.informer.problem) == (["a"], "")


async def test_an_empty_list_is_the_truth(server: ApiServer, tmp_path: Path) -> None:
    """An empty list removes all objects."""
    async with watching(server, tmp_path) as seen:
        await seen.until(lambda: seen.informer.watching)
        server.delete(PODS, "a")
        await seen.until(lambda: seen.names == [])


async def test_a_silent_watch_is_opened_again(server: ApiServer, tmp_path: Path) -> None:
    """A watch without any message, even a bookmark, is closed; the next one continues from its version."""
    async with watching(server, tmp_path, InformerTimes(silence=0.2)) as seen:
        await seen.until(lambda: seen.informer.watching)
        server.mute = True
        server.put(PODS, "b", **pod("b"))
        await seen.until(lambda: len(server.watches) == 2)
        server.mute = False
        server.end()
        await seen.until(lambda: seen.names == ["a", "b"])
        assert (server.lists, set(server.watches)) == (1, {"101"})


async def test_bookmarks_move_the_version_on(server: ApiServer, tmp_path: Path) -> None:
    """After a bookmark the next watch begins at its version, and no object has changed."""
    async with watching(server, tmp_path) as seen:
        await seen.until(lambda: seen.informer.watching)
        server.bookmark()
        await seen.until(lambda: seen.informer.cache.bookmarks == 1)
        server.end()
        await seen.until(lambda: len(server.watches) == 2)
        assert server.watches == ["101", "102"]


async def test_a_watch_that_ends_at_once_is_not_hammered(server: ApiServer, tmp_path: Path) -> None:
    """A proxy that ends every watch at once leads to growing pauses, not to thousands of requests."""
    async with watching(server, tmp_path) as seen:
        for _ in range(3):
            await seen.until(lambda: seen.informer.watching)
            begun = len(server.watches)
            server.end()
            await seen.until(lambda: len(server.watches) > begun)  # noqa: B023
        assert seen.informer.errors == {"connection": 3}
        assert seen.names == ["a"]


async def test_the_server_dies_and_comes_back(server: ApiServer, tmp_path: Path) -> None:
    """An absent server is reported once; objects stay, and the watch continues when it is back."""
    async with watching(server, tmp_path) as seen:
        await seen.until(lambda: seen.informer.watching)
        await server.stop()
        await seen.until(lambda: seen.informer.errors.get("connection", 0) >= 3)
        assert (seen.names, seen.informer.watching) == (["a"], False)

        server.put(PODS, "b", **pod("b"))
        await server.start()
        await seen.until(lambda: seen.names == ["a", "b"])
        assert server.lists == 1


async def test_a_list_is_due_now_and_then(server: ApiServer, tmp_path: Path) -> None:
    """A change that a watch did not report is found by the next periodic list."""
    async with watching(server, tmp_path, InformerTimes(resync=1.0, watch=0.1)) as seen:
        await seen.until(lambda: seen.informer.watching)
        server.put(PODS, "b", silently=True, **pod("b"))
        while seen.names == ["a"]:
            server.end()
            await asyncio.sleep(0.05)
        assert (seen.names, server.lists) == (["a", "b"], 2)


async def test_what_is_refused_is_reported_once(
    server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A repeated refusal is counted each time and logged once, with the rule that is missing."""
    server.answers.extend([(403, json.dumps({"code": 403, "message": "pods is forbidden"}))] * 3)
    async with watching(server, tmp_path) as seen:
        await seen.until(lambda: seen.informer.errors == {"403": 3})
        await seen.until(lambda: seen.informer.watching)
    warned = [
        r.getMessage()
        for r in caplog.records
        if "the watch of" in r.getMessage() and "is lost" in r.getMessage()
    ]
    assert len(warned) == 1
    assert 'resources: ["pods"], verbs: ["list", "watch"]' in warned[0]


@pytest.mark.parametrize("status", [403, 404])
async def test_what_is_optional_is_left_alone(server: ApiServer, tmp_path: Path, status: int) -> None:
    """An optional API that is absent or forbidden is tried again at the next resync, not before."""
    server.answers.extend([(status, "")] * 2)
    async with watching(server, tmp_path, InformerTimes(resync=0.3), optional=True) as seen:
        await seen.until(lambda: seen.informer.listed)
        assert (seen.informer.errors, server.lists) == ({str(status): 2}, 3)


async def test_unknown_tokens_are_read_again_at_once(server: ApiServer, tmp_path: Path) -> None:
    """After a 401 the credentials are loaded again before the next request, without a pause."""
    server.answers.append((401, "Unauthorized"))
    async with watching(server, tmp_path) as seen:
        await seen.until(lambda: seen.informer.watching)
        assert (seen.informer.errors, seen.informer._connection.renewals) == ({"401": 1}, 1)


async def test_a_line_without_end(server: ApiServer, tmp_path: Path) -> None:
    """A line longer than any object ends the watch, and the objects stay."""
    async with watching(server, tmp_path) as seen:
        await seen.until(lambda: seen.informer.watching)
        server.say(b"x" * (5 << 20))
        await seen.until(lambda: "longer than any object" in seen.informer.problem)
        assert seen.names == ["a"]
        await seen.until(lambda: seen.informer.watching)


async def test_it_can_be_cancelled_wherever_it_is(server: ApiServer, tmp_path: Path) -> None:
    """Cancelling at any point of a list or a watch leaves nothing open."""
    for turns in range(0, 60, 3):
        api = Connection(find_cluster({"KUBECONFIG": str(server.kubeconfig(tmp_path))}))
        task = asyncio.create_task(Watching(api, DEFAULT_TIMES).informer.run())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()
        assert task.cancelled()
