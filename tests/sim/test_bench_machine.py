"""Tests of what a benchmark says about its machine: revision of the code, other work on the cores."""

import subprocess
from pathlib import Path

import pytest

from kvist_sim.bench.harness.machine import BusyError, demand_quiet, revision


def git(repository: Path, *words: str) -> str:
    """Run git with an identity of its own."""
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    command = ["git", "-C", str(repository), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_revision_says_whether_files_differ_from_it(tmp_path: Path) -> None:
    """A change of the code shows; results written into docs/ and files that git does not know do not."""
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "docs/page.md"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "x")
    head = git(tmp_path, "rev-parse", "--short=7", "HEAD")

    (tmp_path / "docs/page.md").write_text("2")
    (tmp_path / "notes").write_text("2")
    assert revision.__wrapped__(tmp_path) == head
    (tmp_path / "code.py").write_text("2")
    assert revision.__wrapped__(tmp_path) == f"{head}+changes"


def test_without_a_repository_the_revision_is_unknown(tmp_path: Path) -> None:
    """An installed package has no history."""
    assert revision.__wrapped__(tmp_path) == "unknown"


def test_a_quiet_machine_is_accepted(tmp_path: Path) -> None:
    """Counters that stand still mean that nothing else runs; a kernel without them is not asked."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 0 5 100 3 0 0 0 0 0\n")

    demand_quiet(stat, seconds=0.01)
    demand_quiet(tmp_path / "absent", seconds=0.01)


def test_a_busy_machine_is_refused_with_its_share() -> None:
    """A process that computes all the time is other work: the error states the share and the remedy."""
    with subprocess.Popen(["python3", "-c", "while True: pass"]) as busy:
        try:
            with pytest.raises(BusyError, match=r"other processes use \d+% of a core .*--baseline"):
                demand_quiet(seconds=0.5)
        finally:
            busy.kill()
