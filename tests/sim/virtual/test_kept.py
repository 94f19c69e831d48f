"""Runs that are kept in a file, and races of which only the promising go on."""

from pathlib import Path

import pytest

from kvist_sim.virtual import ideal, kept
from kvist_sim.virtual.judge import Verdict
from kvist_sim.virtual.kept import Kept
from kvist_sim.virtual.report import best_ratios, contenders
from kvist_sim.virtual.runner import Cell, Job, Result

JOB = Job(engines=2, requests=10)


def result(policy: str, goodput: float = 0.5, *, seed: int = 1) -> Result:
    verdict = Verdict(10, goodput, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0, 0, 1.0)
    return Result(Cell("chat", 1.0, policy, seed), 7.5, verdict, [(1.0, (2, 3))])


def test_a_run_is_there_again(tmp_path: Path) -> None:
    """Results added by one process are found by the next, complete; other cells are not."""
    Kept(tmp_path / "runs", JOB).add(result("kvist"))
    again = Kept(tmp_path / "runs", JOB)

    assert again.of([result("kvist").cell, result("kvist", seed=2).cell]) == [result("kvist")]


def test_another_job_is_another_run(tmp_path: Path) -> None:
    """More engines or requests, another setting: nothing of the file counts."""
    Kept(tmp_path / "runs", JOB).add(result("kvist"))

    assert Kept(tmp_path / "runs", Job(engines=3, requests=10)).of([result("kvist").cell]) == []


def test_other_code_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of ours does not count once the picker is another one; a run of others still does."""
    file = Kept(tmp_path / "runs", JOB)
    for policy in ("kvist", "lmetric"):
        file.add(result(policy))
    before = kept.code("kvist")
    monkeypatch.setattr(kept, "PICKER", (*kept.PICKER, "names.py"))
    kept.code.cache_clear()
    cells = [result("kvist").cell, result("lmetric").cell]

    assert kept.code("kvist") != before
    assert Kept(tmp_path / "runs", JOB).of(cells) == [result("lmetric")]

    monkeypatch.undo()
    kept.code.cache_clear()


def test_every_file_that_decides_a_run_is_there() -> None:
    """A name that was moved would silently not be looked at any more."""
    assert all((kept.SIM / name).exists() for name in kept.WORLD)
    assert all((kept.EPP / name).exists() for name in kept.PICKER)


def test_every_file_that_decides_a_capacity_is_there() -> None:
    """Capacities are measured again when one of these files changes, so each of them must exist."""
    folder = Path(ideal.__file__).parent
    assert [name for name in ideal._SOURCES if not (folder / name).is_file()] == []


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    """A file of something else is not overwritten, and the error says where."""
    (tmp_path / "runs").write_text("hello\n")

    with pytest.raises(ValueError, match="runs, line 1: "):
        Kept(tmp_path / "runs", JOB)


def test_only_those_near_the_best_go_on() -> None:
    """Our policy always goes on, and those that it may not be worse than while they are close to it."""
    goodputs = {
        "kvist": 0.2,
        "round-robin": 0.11,
        "least-requests": 0.09,
        "lmetric": 0.9,
        "dynamo": 0.81,
        "random": 0.79,
        "ideal": 1.0,
    }
    found = contenders([result(policy, goodput) for policy, goodput in goodputs.items()])

    assert {policy for _, _, policy in found} == {"kvist", "round-robin", "lmetric", "dynamo", "ideal"}


def test_of_many_near_the_best_two_go_on() -> None:
    """Far below capacity nearly all are as good, and each pair takes its time."""
    goodputs = {"kvist": 1.0, "lmetric": 0.98, "dynamo": 0.99, "random": 1.0, "cache-aware": 0.98}
    found = contenders([result(policy, goodput) for policy, goodput in goodputs.items()])

    assert {policy for _, _, policy in found} == {"kvist", "random", "dynamo"}


def test_the_best_other_goes_on_however_far_ahead_ours_is() -> None:
    """By how much is shown with an interval, so it needs all pairs."""
    goodputs = {"kvist": 0.99, "lmetric": 0.60, "dynamo": 0.51, "random": 0.49}
    found = contenders([result(policy, goodput) for policy, goodput in goodputs.items()])

    assert {policy for _, _, policy in found} == {"kvist", "lmetric", "dynamo"}


def test_beyond_capacity_those_near_the_best_are_fewer() -> None:
    """If the best policy serves a fifth, one that is ten points behind serves nearly nothing."""
    goodputs = {"kvist": 0.0, "lmetric": 0.20, "dynamo": 0.16, "random": 0.14}
    found = contenders([result(policy, goodput) for policy, goodput in goodputs.items()])

    assert {policy for _, _, policy in found} == {"kvist", "lmetric", "dynamo"}


def test_of_fixed_roles_the_best_ratio_goes_on() -> None:
    """Each rule with fixed roles is compared at its best ratio; policies without one always go on."""
    goodputs = {
        "kvist": 0.9,
        "kvist-fluid": 0.5,
        "kvist-pd-1:1": 0.3,
        "kvist-pd-1:3": 0.4,
        "llm-d-pd-1:1": 0.1,
        "llm-d-pd-7:1": 0.0,
    }
    found = best_ratios([result(policy, goodput) for policy, goodput in goodputs.items()])

    assert {policy for _, _, policy in found} == {"kvist", "kvist-fluid", "kvist-pd-1:3", "llm-d-pd-1:1"}


@pytest.mark.parametrize("policy", ["kvist-fluid", "kvist-pd-1:1", "no-tiers"])
def test_every_run_of_our_picker_is_made_again_when_it_changes(policy: str) -> None:
    """A run with disaggregation is one of the picker, too: its code decides which kept runs count."""
    assert kept.code(policy) == kept.code("kvist") != kept.code("dynamo-pd-1:1")
