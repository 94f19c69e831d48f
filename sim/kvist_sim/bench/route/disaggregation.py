"""Write the results of ``kvist bench route --disaggregation`` to a page: a row for each workload and load.

``python -m kvist_sim.bench.route.disaggregation route-pd.json docs/benchmarks.md`` does it again from a kept
result.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from kvist_sim.bench.harness.proof import placed
from kvist_sim.bench.route.page import everybody, stamp, workloads
from kvist_sim.virtual.report import WITHIN

NAME: Final = "disaggregation"
"""Name of the section in the page: ``<!-- disaggregation -->``."""
AGGREGATED: Final = "kvist"
FLUID: Final = "kvist-fluid"
FAMILIES: Final = {
    "kvist, fixed roles": "kvist-pd-",
    "llm-d's threshold": "llm-d-pd-",
    "Dynamo's conditional": "dynamo-pd-",
}
"""Policies with fixed roles, by what their names begin with; the ratio of prefill to decode follows."""


def write(page: Path, found: Mapping[str, Any]) -> None:
    """Write ``found``, the ``stamped`` document, to its section. Raises SystemExit without such a section."""
    text = "\n".join([stamp(found), workloads(found), table(found), verdict(found), everybody(found)])
    page.write_text(placed(page.read_text(), NAME, text))


def table(found: Mapping[str, Any]) -> str:
    """Return goodput and the 90th percentiles of TTFT and TPOT by workload and load; of policies with fixed
    roles those of the ratio that was best in that row."""
    head = "| goodput, % (p90 of TTFT, s, and TPOT, ms) | load | aggregated kvist | "
    head += "fluid kvist | fluid less aggregated | "
    head += " | ".join(f"{name}, best ratio run" for name in FAMILIES)
    lines = [head + " |", "|---" * (5 + len(FAMILIES)) + "|"]
    for (case, load), rows in _rows(found).items():
        cells = [_cell(rows[AGGREGATED]), _cell(rows[FLUID]), _gains(found, case, load)]
        for prefix in FAMILIES.values():
            row = _best(rows, prefix)
            cells.append(f"{_cell(row)} {row['policy'].removeprefix(prefix)}")
        lines.append(f"| {case} | {load:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def verdict(found: Mapping[str, Any]) -> str:
    """Return in words where fluid kvist is neither the best nor within 2 %, or worse than aggregated."""
    behind, harmed = list[str](), list[str]()
    for (case, load), rows in _rows(found).items():
        ours = _mean(rows[FLUID])
        most = rows[FLUID]["seeds"]
        others = [row for name, row in rows.items() if name not in {FLUID, "ideal"} and row["seeds"] == most]
        if not others:
            continue
        best = max(others, key=_mean)
        if _mean(best) - ours > WITHIN:
            behind.append(
                f"{case} at {load:.0%} ({100 * ours:.1f} against {100 * _mean(best):.1f} of {best['policy']})"
            )
        if _mean(rows[AGGREGATED]) - ours > WITHIN:
            harmed.append(f"{case} at {load:.0%}")
    return (
        f"Rows in which fluid kvist is more than {WITHIN:.0%} behind the best of all, with ratios chosen "
        f"afterwards: {'; '.join(behind) or 'none'}. Rows in which it is that much worse than aggregated "
        f"serving: {'; '.join(harmed) or 'none'}.\n"
    )


def _rows(found: Mapping[str, Any]) -> dict[tuple[str, float], dict[str, Mapping[str, Any]]]:
    by_cell: dict[tuple[str, float], dict[str, Mapping[str, Any]]] = {}
    for row in found["rows"]:
        by_cell.setdefault((row["case"], row["load"]), {})[row["policy"]] = row
    return by_cell


def _best(rows: Mapping[str, Mapping[str, Any]], prefix: str) -> Mapping[str, Any]:
    """Return the best ratio of those with most seeds."""
    every = [row for name, row in rows.items() if name.startswith(prefix)]
    return max(every, key=lambda row: (row["seeds"], _mean(row)))


def _mean(row: Mapping[str, Any]) -> float:
    return float(row["goodput"]["mean"])


def _cell(row: Mapping[str, Any]) -> str:
    return f"{100 * _mean(row):.1f} ({row['ttft_p90']:.2f}, {1000 * row['tpot_p90']:.0f})"


def _gains(found: Mapping[str, Any], case: str, load: float) -> str:
    """Return by how much more fluid kvist serves well than aggregated kvist, in points: the mean and, in
    brackets, the least and the most of any seed."""
    shares: dict[str, dict[int, float]] = {AGGREGATED: {}, FLUID: {}}
    for run in found["runs"]:
        cell = run["cell"]
        if (cell["case"], cell["load"]) == (case, load) and cell["policy"] in shares:
            shares[cell["policy"]][cell["seed"]] = 100 * run["verdict"]["goodput"]
    gains = [
        shares[FLUID][seed] - share for seed, share in shares[AGGREGATED].items() if seed in shares[FLUID]
    ]
    if not gains:
        return ""
    span = f" ({min(gains):+.1f} to {max(gains):+.1f})" if len(gains) > 1 else ""
    return f"{fmean(gains):+.1f}{span}"


if __name__ == "__main__":
    write(Path(sys.argv[2]), json.loads(Path(sys.argv[1]).read_text()))
