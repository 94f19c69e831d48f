"""Tests of ``kvist bench traces --instructions``: its bounds, and comparing with an older revision."""

import argparse
from pathlib import Path

import pytest

from kvist_sim.bench import trace_instructions
from kvist_sim.bench.harness.proof import FAILED
from kvist_sim.bench.trace_instructions import InstructionsOfWay, InstructionsReport


def report(way: str, rise: float, baseline: str = "") -> InstructionsReport:
    """Return a report of one way beside what it is compared with."""
    beside = InstructionsOfWay(baseline or "off", 1000.0, 0.0, 0, 0.0)
    ways = [beside, InstructionsOfWay(way, 1000.0 * (1 + rise), rise, 0, 0.0)]
    return InstructionsReport(ways, 2560, baseline)


def test_a_tenth_of_the_requests_may_cost_a_little_more_when_traced() -> None:
    """At most 3 % more than without traces, and other shares have no bound."""
    assert not report("10 % sampled", 0.029).broken()
    assert report("10 % sampled", 0.031).broken() == [
        "10 % sampled: 3.1% more instructions per request than without traces"
    ]
    assert not report("all sampled", 0.3).broken()


def test_a_rise_over_an_older_revision_is_bounded() -> None:
    """At most 5 % more instructions than that revision needs."""
    assert not report("off", 0.049, "93d577c").broken()
    assert report("off", 0.051, "93d577c").broken() == [
        "off: 5.1% more instructions per request than in 93d577c"
    ]


def test_the_older_revision_is_named_in_the_table() -> None:
    """The first row is the older revision, and the column names what is compared."""
    found = trace_instructions.table(report("off", 0.02, "93d577c"))
    assert [str(column.header) for column in found.columns][2] == "more than 93d577c"
    assert list(found.columns[0].cells) == ["93d577c", "off"]


def options(**given: object) -> argparse.Namespace:
    """Return the options of a run."""
    return argparse.Namespace(**{"baseline": "", "write_docs": None, "json": None, **given})


@pytest.fixture
def valgrind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a ``valgrind`` on the path that counts nothing."""
    program = tmp_path / "valgrind"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return program


@pytest.mark.usefixtures("valgrind")
def test_a_missing_revision_ends_the_command_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """A revision that is not in the history is named, with how to get it."""
    assert trace_instructions.main(options(baseline="0123abc")) == FAILED
    assert "--baseline 0123abc" in capsys.readouterr().err


@pytest.mark.usefixtures("valgrind")
def test_a_revision_that_cannot_replay_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A revision older than the replay of requests is an error that names it."""
    assert trace_instructions.main(options(baseline="1fa2aaf")) == FAILED
    assert "--baseline 1fa2aaf: it cannot replay requests" in capsys.readouterr().err


@pytest.mark.usefixtures("valgrind")
def test_a_comparison_has_no_place_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    """``--write-docs`` with ``--baseline`` is refused before anything is counted."""
    chosen = options(baseline="93d577c", write_docs="docs/benchmarks.md")
    assert trace_instructions.main(chosen) == FAILED
    assert "use --json" in capsys.readouterr().err
