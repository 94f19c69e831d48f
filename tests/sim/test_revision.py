"""Tests of ``kvist bench epp --baseline``: pickers of older revisions still start."""

import json
import subprocess
from pathlib import Path

import pytest

from kvist_sim import launch
from kvist_sim.bench.epp.revision import RevisionError, accepted_arguments, picker_of_revision
from kvist_sim.http1 import get
from kvist_sim.processes import Children

OLD_REVISIONS = ("1fa2aaf", "4ff51b7")
"""The first with benchmarks, and the last before the packages were reordered."""


def commit(repository: Path) -> None:
    """Commit everything in a folder."""
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "x")):
        subprocess.run(["git", "-C", str(repository), *identity, *words], check=True)


def test_a_revision_is_extracted_with_all_its_packages(tmp_path: Path) -> None:
    """The folders that the revision has come before the installed packages."""
    repository = tmp_path / "repository"
    for name in ("epp", "common"):
        (repository / name).mkdir(parents=True)
        (repository / name / "old.py").write_text("x = 1")
    commit(repository)
    command = picker_of_revision("HEAD", tmp_path, repository)

    place = tmp_path / "revision-HEAD"
    assert (place / "epp" / "old.py").read_text() == "x = 1"
    assert command[1] == f"PYTHONPATH={place / 'epp'}:{place / 'common'}"


def test_a_missing_revision_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    """A clone without the history says which command fetches it."""
    (tmp_path / "file").write_text("x")
    commit(tmp_path)
    with pytest.raises(RevisionError, match=r"(?s)^--baseline 1fa2aaf: .*git fetch --unshallow"):
        picker_of_revision("1fa2aaf", tmp_path, tmp_path)


@pytest.mark.parametrize("revision", OLD_REVISIONS)
async def test_the_picker_of_an_old_revision_becomes_ready(revision: str, tmp_path: Path) -> None:
    """On an endpoints file, in approximate mode; a clone without the history fails with the way to get it."""
    program = picker_of_revision(revision, tmp_path)
    file = tmp_path / "endpoints.json"
    file.write_text(json.dumps(launch.endpoints_file(launch.engine_ports(1))))
    arguments = accepted_arguments(revision, program, ["--transport=fast"])
    async with Children(tmp_path, grace_seconds=10) as children:
        picker = await launch.start_picker(children, file, "", program=program, arguments=arguments)
        status, _ = await get(launch.HOST, picker.metrics_port, "/readyz")
    assert status == 200


def test_flags_have_the_names_of_the_revision(tmp_path: Path) -> None:
    """A renamed flag is given by its old name, and a flag that did not exist is refused."""
    program = picker_of_revision("4ff51b7", tmp_path)
    assert accepted_arguments("4ff51b7", program, ["--warmup-timeout=3"]) == ["--warm-seconds=3"]
    with pytest.raises(RevisionError, match="no flag --no-such-flag"):
        accepted_arguments("4ff51b7", program, ["--no-such-flag=1"])
