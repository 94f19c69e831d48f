"""The table of disaggregation in docs/benchmarks.md."""

from typing import Any

from kvist_sim.bench.route.disaggregation import table, verdict

FIGURES = {"ttft_p90": 1.234, "tpot_p90": 0.0301}


def found(goodputs: dict[str, list[float]]) -> dict[str, Any]:
    """A document of one workload and load, with the goodput of each policy by seed."""
    rows = [
        {
            "case": "pd-mixed",
            "load": 1.3,
            "policy": name,
            "seeds": len(shares),
            "goodput": {"mean": sum(shares) / len(shares)},
            **FIGURES,
        }
        for name, shares in goodputs.items()
    ]
    runs = [
        {
            "cell": {"case": "pd-mixed", "load": 1.3, "policy": name, "seed": seed},
            "verdict": {"goodput": share},
        }
        for name, shares in goodputs.items()
        for seed, share in enumerate(shares)
    ]
    return {"rows": rows, "runs": runs}


FOUND = found(
    {
        "kvist": [0.90, 0.80],
        "kvist-fluid": [0.91, 0.84],
        "kvist-pd-1:1": [0.70, 0.60],
        "kvist-pd-1:3": [0.69],
        "llm-d-pd-1:1": [0.5, 0.5],
        "dynamo-pd-3:1": [0.92, 0.94],
        "dynamo-pd-1:1": [0.99],
    }
)


def test_a_row_has_every_rule_at_its_best_ratio() -> None:
    """A row shows the ratio of each rule that has most seeds, and of these the best; the gain over aggregated
    serving has its range over seeds."""
    [_, _, row] = table(FOUND).splitlines()

    assert row == (
        "| pd-mixed | 130% | 85.0 (1.23, 30) | 87.5 (1.23, 30) | +2.5 (+1.0 to +4.0) | 65.0 (1.23, 30) 1:1 "
        "| 50.0 (1.23, 30) 1:1 | 93.0 (1.23, 30) 3:1 |"
    )


def test_rows_that_miss_are_named() -> None:
    """The text names the rows in which another policy with as many seeds is more than 2 % ahead, and those in
    which aggregated serving is."""
    assert "pd-mixed at 130% (87.5 against 93.0 of dynamo-pd-3:1)" in verdict(FOUND)
    assert "worse than aggregated serving: none." in verdict(FOUND)

    harmed = found({"kvist": [0.9], "kvist-fluid": [0.8]})
    assert "aggregated serving: pd-mixed at 130%." in verdict(harmed)


def test_rows_without_misses_say_so() -> None:
    """Within 2 % of the best is as good."""
    fine = verdict(found({"kvist": [0.9], "kvist-fluid": [0.895], "ideal": [1.0]}))

    assert fine.count("none") == 2
