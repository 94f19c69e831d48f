"""Write the results of ``kvist bench route`` to a page: pictures, and a row for each workload and load.

``python -m kvist_sim.bench.route.page route.json docs/benchmarks.md`` does it again from a kept result.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvist_sim.bench.harness.machine import measured_on
from kvist_sim.bench.harness.proof import placed

NAME: Final = "route"
"""Name of the section in the page: ``<!-- route -->``."""
TIERS_NAME: Final = "route-tiers"
"""That of runs in which all engines have slower places for blocks."""
PICTURES: Final = "pictures"
"""Folder beside the page."""
OURS: Final = "kvist"
PODS_CASE: Final = "hot-prefix"
STAR: Final = " \\*"
"""Mark for the goodput of a policy with fewer seeds."""
HEAD: Final = (
    "| workload | load | kvist | best other | ours ahead | TTFT p90, s | other's | hits | other's |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


def write(page: Path, found: Mapping[str, Any]) -> None:
    """Write ``found``, the ``stamped`` document, to its section. Raises SystemExit without such a section."""
    try:
        from kvist_sim.bench.route import pictures, plots
    except ModuleNotFoundError as missing:
        raise SystemExit(f"--write-docs needs {missing.name}: pip install 'kvist[plots]'") from missing
    drawn = pictures.pictures(found["rows"])
    if loads := pod_loads(found["runs"], pictures.NAMED):
        drawn.append(pictures.pod_loads(loads))
    shown = [plots.write(picture, page.parent / PICTURES) for picture in drawn]
    text = "\n".join([stamp(found), workloads(found), *shown, table(found), everybody(found)])
    page.write_text(placed(page.read_text(), NAME, text))


def write_tiers(page: Path, found: Mapping[str, Any]) -> None:
    """Write ``found`` to the section of slower places. Raises SystemExit without such a section."""
    text = "\n".join([stamp(found), workloads(found), tiers(found)])
    page.write_text(placed(page.read_text(), TIERS_NAME, text))


def tiers(found: Mapping[str, Any]) -> str:
    """Return a table of goodput, times to the first token and hits of every policy, a row for each workload
    and load; rows in which ours is not the best, or within 2 %, are marked."""
    rows = {(row["case"], row["load"], row["policy"]): row for row in found["rows"]}
    names = [OURS, *sorted({row["policy"] for row in found["rows"]} - {OURS})]
    lost = {(one["case"], one["load"]) for one in found["standing"] if one["lost"]}
    lines = []
    for case, load in dict.fromkeys((row["case"], row["load"]) for row in found["rows"]):
        cells = [case, f"{load:.0%}{' **lost**' if (case, load) in lost else ''}"]
        cells += [_of_tier(rows.get((case, load, name))) for name in names]
        lines.append(f"| {' | '.join(cells)} |\n")
    head = f"| workload | load | {' | '.join(names)} |\n{'|---' * (len(names) + 2)}|\n"
    return (
        f"Goodput; TTFT p50 / p90 / p99 in seconds; share of prompt tokens cached.\n\n{head}{''.join(lines)}"
    )


def _of_tier(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    times = " / ".join(f"{row[name]:.2f}" for name in ("ttft_p50", "ttft_p90", "ttft_p99"))
    return f"{_share(row['goodput'])}; {times}; {row['hit_ratio']:.0%}"


def stamp(found: Mapping[str, Any]) -> str:
    """Return a line with date, machine, versions and revision."""
    machine, versions, about = found["machine"], found["versions"], found["about"]
    asked = ", ".join(f"{name} {about[name]}" for name in ("engines", "requests", "seeds") if name in about)
    return (
        f"Measured {found['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, "
        f"Python {versions['python']}, kvist {versions['kvist']}, revision {found['revision']}; {asked}. "
        f"100 % load: {about['capacity']}.\n"
    )


def table(found: Mapping[str, Any]) -> str:
    """Return a table of our policy beside the best of the others; lost rows are marked."""
    rows = {(row["case"], row["load"], row["policy"]): row for row in found["rows"]}
    return HEAD + "".join(_line(one, rows) for one in found["standing"])


def _line(one: Mapping[str, Any], rows: Mapping[tuple[str, float, str], Mapping[str, Any]]) -> str:
    case, load = one["case"], one["load"]
    ours, other = rows[case, load, OURS], rows[case, load, one["best"]]
    ahead = f"{_share(other['ahead'])}{' **lost**' if one['lost'] else ''}"
    if one["harmed"]:
        ahead += f" **worse than {one['harmed']}**"
    cells = [
        *(case, f"{load:.0%}", _share(ours["goodput"])),
        *(f"{_share(other['goodput'])} {one['best']}", ahead),
        *(f"{row['ttft_p90']:.2f}" for row in (ours, other)),
        *(f"{row['hit_ratio']:.0%}" for row in (ours, other)),
    ]
    return f"| {' | '.join(cells)} |\n"


def workloads(found: Mapping[str, Any]) -> str:
    """Return a table of the workloads and their service-level objectives."""
    lines = [
        f"| {one['name']}{' †' if one['held_out'] else ''} | {one['summary']} | {one['ttft']:g} s, "
        f"{1000 * one['tpot']:g} ms | {one['capacity']:.1f} |\n"
        for one in found["workloads"]
    ]
    head = "| workload | what comes | good: TTFT, TPOT | 100 % load, requests/s |\n|---|---|---|---|\n"
    note = "\n† Not looked at while the policy was made.\n" if "†" in "".join(lines) else ""
    return head + "".join(lines) + note


def everybody(found: Mapping[str, Any]) -> str:
    """Return the goodput of every policy, the best on the left by its mean over all rows."""
    shares: dict[tuple[str, float], dict[str, Mapping[str, Any]]] = {}
    for row in found["rows"]:
        shares.setdefault((row["case"], row["load"]), {})[row["policy"]] = row
    names = sorted({row["policy"] for row in found["rows"]}, key=lambda name: _standing(name, shares))
    most = max((row["seeds"] for row in found["rows"]), default=0)
    lines = [
        f"| {case} | {load:.0%} | {' | '.join(_cells(policies, names))} |\n"
        for (case, load), policies in shares.items()
    ]
    head = f"| goodput, % | load | {' | '.join(names)} |\n{'|---' * (len(names) + 2)}|\n"
    note = (
        f"\n{STAR.strip()} Fewer than {most} seeds: too far behind the best after the first ones to go on.\n"
    )
    return f"\n{head}{''.join(lines)}{note if '*' in ''.join(lines) else ''}"


def _standing(name: str, shares: Mapping[Any, Mapping[str, Mapping[str, Any]]]) -> tuple[bool, float]:
    means = [policies[name]["goodput"]["mean"] for policies in shares.values() if name in policies]
    return name == "ideal", -sum(means) / len(means)


def _cells(policies: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return the goodput of these policies in one row; those with fewer seeds than others there have a
    mark."""
    most = max(row["seeds"] for row in policies.values())
    return [_cell(policies.get(name), most) for name in names]


def _cell(row: Mapping[str, Any] | None, most: int) -> str:
    if row is None:
        return ""
    star = "" if row["seeds"] == most else STAR
    return f"{100 * row['goodput']['mean']:.1f}{star}"


def _share(found: Mapping[str, float | None]) -> str:
    half = found["half"]
    mean = found["mean"] or 0.0
    return f"{mean:.1%}" if half is None or half > 1 else f"{mean:.1%} ± {half:.1%}"


def pod_loads(runs: Sequence[Mapping[str, Any]], named: Sequence[str]) -> dict[str, Any]:
    """Return samples of these policies with the hot prefix, at the highest measured load up to capacity."""
    kept = [run for run in runs if run["loads"] and run["cell"]["case"] == PODS_CASE]
    load = max((run["cell"]["load"] for run in kept if run["cell"]["load"] <= 1), default=None)
    found = {run["cell"]["policy"]: run["loads"] for run in kept if run["cell"]["load"] == load}
    return {policy: found[policy] for policy in named if policy in found}


def stamped(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with date, machine, versions and revision."""
    return {**measured_on(), **found}


if __name__ == "__main__":
    write(Path(sys.argv[2]), json.loads(Path(sys.argv[1]).read_text()))
