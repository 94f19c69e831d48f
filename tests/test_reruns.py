"""Files that a tier runs again are counted and named."""

import json
from pathlib import Path

from tests.reruns import note, summary


def test_files_that_were_run_again_are_counted_once_for_each_tier(tmp_path: Path) -> None:
    """Two failed tests of one file are one file; without notes the count is 0."""
    failed, notes = tmp_path / "lastfailed", tmp_path / "build" / "reruns.txt"
    assert summary(notes) == "0 test files were run again after a failure\n"

    failed.write_text(json.dumps({"tests/a.py::one": True, "tests/a.py::two": True, "tests/b.py::x": True}))
    note("test-engine", failed, notes)
    assert summary(notes).splitlines() == [
        "2 test files were run again after a failure",
        "- test-engine: tests/a.py",
        "- test-engine: tests/b.py",
    ]
