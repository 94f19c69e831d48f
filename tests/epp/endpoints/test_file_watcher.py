"""The watched endpoints file: changes, bad files, swaps and absence, on a real file system."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvist_epp.endpoints.endpoint import EndpointSet
from kvist_epp.endpoints.endpoints_file import EndpointsFileWatcher


def text(*names: str) -> str:
    lines = [f"- {{name: {n}, address: 10.0.0.{i + 1}, port: 8000}}" for i, n in enumerate(names)]
    return "endpoints:\n" + "\n".join(lines)


def put(path: Path, content: str) -> None:
    path.write_text(content)


def remove(path: Path) -> None:
    path.unlink()


def status(path: Path) -> os.stat_result:
    return path.stat()


class Seen:
    """Callbacks of a watcher."""

    def __init__(self, path: Path) -> None:
        self.fleets: list[list[str]] = []
        self.problems: list[str] = []
        self.watch = EndpointsFileWatcher(path, self.changed, self.problems.append, interval=0.01)

    def changed(self, fleet: EndpointSet) -> None:
        self.fleets.append([endpoint.name for endpoint in fleet])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "endpoints.yaml"


async def test_a_change_is_reported_once(path: Path) -> None:
    """Each new content is published once; polling again publishes nothing."""
    seen = Seen(path)
    put(path, text("a"))
    await seen.watch.poll()
    await seen.watch.poll()
    put(path, text("a", "b"))
    await seen.watch.poll()
    put(path, text("a", "b") + "\n# a comment\n")
    await seen.watch.poll()

    assert seen.fleets == [["a"], ["a", "b"]]


async def test_a_change_of_equal_size_within_a_clock_tick_is_seen(path: Path) -> None:
    """A fresh file with an unchanged stat is read again, because file systems have coarse clocks."""
    seen = Seen(path)
    put(path, text("a"))
    before = status(path)
    await seen.watch.poll()
    put(path, text("b"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    await seen.watch.poll()

    assert seen.fleets == [["a"], ["b"]]


async def test_a_bad_file_keeps_the_fleet_and_says_why_once(path: Path) -> None:
    """A bad file keeps the old endpoints and is reported and counted once; a good file clears the problem."""
    seen = Seen(path)
    put(path, text("a"))
    await seen.watch.poll()
    put(path, "endpoints: 7")
    await seen.watch.poll()
    await seen.watch.poll()

    assert seen.problems == [f"{path}: `endpoints` must be a list, not a number"]
    assert (seen.watch.bad_files, seen.watch.problem) == (1, seen.problems[0])
    assert seen.watch.endpoints is not None
    assert [e.name for e in seen.watch.endpoints] == ["a"]

    put(path, text("a"))
    await seen.watch.poll()

    assert (seen.watch.problem, seen.fleets) == ("", [["a"]])


async def test_an_absent_file_is_waited_for(path: Path) -> None:
    """Before the file exists the endpoints are None and the problem says so; creating the file is enough."""
    seen = Seen(path)
    await seen.watch.poll()

    assert (seen.watch.endpoints, seen.problems) == (None, [f"{path}: No such file or directory"])

    put(path, text("a"))
    await seen.watch.poll()

    assert (seen.fleets, seen.watch.problem) == ([["a"]], "")


async def test_a_file_that_goes_keeps_the_fleet_until_it_is_back(path: Path) -> None:
    """A deleted file is a problem, not an empty set of endpoints."""
    seen = Seen(path)
    put(path, text("a"))
    await seen.watch.poll()
    remove(path)
    await seen.watch.poll()
    problem = seen.watch.problem
    put(path, text("a"))
    await seen.watch.poll()

    assert (problem, seen.watch.problem, seen.fleets) == (f"{path}: No such file or directory", "", [["a"]])


def configmap(tmp_path: Path) -> Path:
    for number, name in enumerate("ab"):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "endpoints.yaml").write_text(text(name))
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "endpoints.yaml").symlink_to("..data/endpoints.yaml")
    return tmp_path / "endpoints.yaml"


def swap(tmp_path: Path) -> None:
    (tmp_path / "..tmp").symlink_to("..1")
    (tmp_path / "..tmp").rename(tmp_path / "..data")


async def test_a_configmap_swap_is_seen(tmp_path: Path) -> None:
    """A swap of Kubernetes' nested symlinks is seen."""
    seen = Seen(configmap(tmp_path))
    await seen.watch.poll()
    swap(tmp_path)
    await seen.watch.poll()

    assert seen.fleets == [["a"], ["b"]]


async def test_a_half_written_file_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is still being written is not used, even if its first half is valid."""
    seen = Seen(path)
    put(path, text("a"))
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def meanwhile(seconds: float) -> None:
        put(path, text("a", "b"))
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", meanwhile)
    await seen.watch.poll()

    assert seen.fleets == [["a", "b"]]


async def test_run_follows_the_file(path: Path) -> None:
    """The running watcher publishes a change by itself."""
    told = asyncio.Event()
    watch = EndpointsFileWatcher(path, lambda _: told.set(), interval=0.01)
    running = asyncio.create_task(watch.run())
    put(path, text("a"))
    await asyncio.wait_for(told.wait(), 10)
    running.cancel()

    assert watch.endpoints is not None
