"""Tests of the prewarming benchmark's arithmetic, and of the pool during its rollout."""

import asyncio
import json
from pathlib import Path

import pytest

from kvist_sim import launch
from kvist_sim.bench.harness.records import Record
from kvist_sim.bench.prewarm.report import PrewarmReport, avoided, avoided_over_sockets
from kvist_sim.bench.prewarm.sockets import Rollout, Run, judged
from kvist_sim.bench.prewarm.virtual import ENGINES, PREWARMED, ROLLOUT, STEADY, Cell, Workload
from kvist_sim.load import OK
from kvist_sim.virtual.judge import Verdict


def verdict(p90: float) -> Verdict:
    """Return a verdict with this p90."""
    return Verdict(
        requests=1,
        goodput=1.0,
        good_per_second=1.0,
        ttft_p50=0.1,
        ttft_p90=p90,
        ttft_p99=1.0,
        tpot_p50=0.0,
        tpot_p90=0.0,
        hit_ratio=0.8,
        tokens_per_second=1.0,
        lost=0,
        preemptions=0,
        spread=1.0,
    )


def workload(*p90s: tuple[float, float, float]) -> Workload:
    """Return a workload from the p90s by seed: without a rollout, with one, with prewarming; in any order."""
    cells = [
        Cell(kind, seed, verdict(p90))
        for seed, three in enumerate(p90s)
        for kind, p90 in zip((STEADY, ROLLOUT, PREWARMED), three, strict=True)
    ]
    return Workload("some", 10.0, cells[::-1])


def run(kind: str, p90: float, failed: int = 0) -> Run:
    """Return a run with this p90 and number of failures."""
    return Run(kind, 100, failed, 0.1, p90, 1.0, 1000, 800)


def test_what_is_gone_is_a_share_of_what_was_added() -> None:
    """Pairs have one seed; the share is of the means, so that a seed with nothing added does no harm."""
    found = workload((0.1, 0.3, 0.2), (0.2, 0.4, 0.25), (0.2, 0.2, 0.2))
    assert found.added(ROLLOUT) == pytest.approx([0.2, 0.2, 0.0])
    assert found.added(PREWARMED) == pytest.approx([0.1, 0.05, 0.0])
    assert avoided(found) == pytest.approx(1 - 0.15 / 0.4)
    assert avoided_over_sockets([run(STEADY, 1.0), run(ROLLOUT, 2.0), run(PREWARMED, 1.2)]) == pytest.approx(
        0.8
    )


@pytest.mark.parametrize(("p90", "failed", "broken"), [(1.5, 0, 0), (1.51, 0, 1), (1.2, 1, 1)])
def test_bounds(p90: float, failed: int, broken: int) -> None:
    """At least half is avoided, and no request fails."""
    runs = [run(STEADY, 1.0), run(ROLLOUT, 2.0), run(PREWARMED, p90, failed)]
    good = workload((0.1, 0.3, 0.19))
    bad = workload((0.1, 0.3, 0.21))
    assert len(PrewarmReport([good], runs, {}).broken()) == broken
    assert len(PrewarmReport([bad], runs, {}).broken()) == broken + 1


def test_only_answers_count_for_times() -> None:
    """Failed requests count as failed and not in the times."""
    good = Record("a", 1.0, token=1.5, status=OK, whole=True, prompt=100, cached=80)
    cut = Record("b", 1.0, token=9.0, status=OK)
    found = judged(PREWARMED, [good, cut], 7)
    assert (found.requests, found.failed, found.p90, found.prompt, found.cached) == (2, 1, 0.5, 100, 80)


async def test_pods_are_replaced_one_by_one(tmp_path: Path) -> None:
    """Seven or eight are in the file at any time; in the end all are new."""
    file = tmp_path / "endpoints.json"
    engines = [launch.EnginePorts(number, number, number) for number in range(1, 2 * ENGINES + 1)]
    rollout, seen = Rollout(file, engines), list[frozenset[str]]()

    async def watch() -> None:
        while True:
            names = frozenset(one["name"] for one in json.loads(file.read_text())["endpoints"])
            if not seen or seen[-1] != names:
                seen.append(names)
            await asyncio.sleep(0.002)

    task = asyncio.create_task(watch())
    await rollout.run(0.02, 0.05)
    await asyncio.sleep(0.02)
    task.cancel()
    assert [len(names) for names in seen] == [8] + [7, 8] * ENGINES
    assert seen[0] == {f"engine-{number}" for number in range(ENGINES)}
    assert seen[-1] == {f"engine-{number}" for number in range(ENGINES, 2 * ENGINES)}
