"""The effect of halving and doubling each constant of the policy on goodput, and ``docs/policy.md``.

``python -m kvist_sim.virtual.sensitivity --runs FILE`` runs the workloads in virtual time with each constant
halved and doubled and keeps the results in FILE; ``--write`` makes the page of it, of the constants as they
are, and of the terms' docstrings. A constant is changed in a process of its own, in the product's modules.
"""

import argparse
import ast
import importlib
import inspect
import platform
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any, Final

import msgspec

from kvist_epp.scheduling import cost, leg_costs
from kvist_sim.virtual.disaggregation_page import disaggregation_section
from kvist_sim.virtual.runner import Cell, Job, case_named

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = ROOT / "docs" / "policy.md"
RUNS: Final = ROOT / "docs" / "policy-sensitivity.json"
MODULES: Final = (
    "kvist_epp.load.endpoint_load",
    "kvist_epp.load.prefill_rate",
    "kvist_epp.load.tpot_admission",
    "kvist_epp.load.replica_rotation",
    "kvist_epp.flowcontrol.capacity",
    "kvist_epp.flowcontrol.deficit_round_robin",
    "kvist_epp.prefix_stats.recent_uses",
    "kvist_epp.director.request_progress",
    "kvist_epp.index.lookup",
)
"""Modules whose constants steer scoring and admission, besides ``scheduling.cost.Policy``."""
BOOKKEEPING: Final = frozenset(
    (
        "endpoint_load.QUIET_SECONDS",
        "endpoint_load.OVERTAKEN_SECONDS",
        "prefill_rate.WINDOWS",
        "prefill_rate.SAME_STEP_SECONDS",
        "tpot_admission.LEAST_TOKENS",
        "replica_rotation.REPLICA_SECONDS",
        "capacity.TPOT_POLL_SECONDS",
        "deficit_round_robin.QUANTUM",
        "recent_uses.PLACES",
        "request_progress.CREDIT_SECONDS",
        "lookup.RATIO_TOKENS",
        "lookup.RATIO_WEIGHT",
        "lookup.PLACE_BYTES",
    )
)
"""Keys of constants that bound memory, tell late events from lost ones, or set the interval of periodic
work. They weigh nothing against anything else, so the page has them in a table of their own."""
WORKLOADS: Final = ("chat", "groups", "system-prompts", "agents", "uneven")
LOADS: Final = (1.0,)
SEEDS: Final = (1000, 1001)
FACTORS: Final = (0.5, 2.0)
WIDTH: Final = 110
NOISE_POINTS: Final = 2.0
"""A smaller change of goodput, in points of a percent, is within what seeds differ by."""


class Constant(msgspec.Struct, frozen=True):
    """One number of the policy."""

    module: str
    name: str
    value: float
    origin: str
    """Its docstring."""

    @property
    def key(self) -> str:
        """Return the name in results."""
        return f"{self.module.rpartition('.')[2]}.{self.name}"


class Variant(msgspec.Struct, frozen=True):
    """A constant and a factor, and the goodput of each cell in percent."""

    key: str
    factor: float
    goodput: dict[str, float]


class Runs(msgspec.Struct):
    """All results, with what they were made by."""

    machine: str
    engines: int
    requests: int
    revision: str
    baseline: dict[str, float] = {}
    variants: list[Variant] = []


def constants() -> list[Constant]:
    """Return every constant of the policy: the fields of ``Policy``, then those of the modules."""
    found: list[Constant] = []
    documented = docstrings(inspect.getsource(cost), "Policy")
    found += [
        Constant(cost.__name__, one.name, value, documented.get(one.name, ""))
        for one in fields(cost.Policy)
        if isinstance(value := getattr(cost.DEFAULT, one.name), float)
    ]
    for name in MODULES:
        module = importlib.import_module(name)
        documented = docstrings(inspect.getsource(module))
        for key, text in documented.items():
            value = getattr(module, key)
            if key.isupper() and not key.startswith("_") and isinstance(value, int | float):
                found.append(Constant(name, key, float(value), text))
    return found


def docstrings(source: str, within: str = "") -> dict[str, str]:
    """Return the docstrings below assignments, by name; ``within``: those of a class."""
    body: Sequence[ast.stmt] = ast.parse(source).body
    if within:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == within)
    found = {}
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_text(after):
            found[node.target.id] = " ".join(ast.literal_eval(after.value).split())  # type: ignore[attr-defined]
    return found


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def change(key: str, factor: float) -> None:
    """Multiply a constant in this process, wherever it was imported by name."""
    constant = next(one for one in constants() if one.key == key)
    if constant.module == cost.__name__:
        for name in ("DEFAULT", "AMONG_REPLICAS", "TPOT_AMONG_REPLICAS"):
            policy = getattr(cost, name)
            changed = replace(policy, **{constant.name: getattr(policy, constant.name) * factor})
            _set(policy, changed)
        return
    old = getattr(importlib.import_module(constant.module), constant.name)
    new = type(old)(min(old * factor, 1.0) if constant.name == "QUANTILE" else old * factor)
    for name in (*MODULES, "kvist_epp.scheduling.pick"):
        module = importlib.import_module(name)
        imported = constant.name not in docstrings(inspect.getsource(module))
        if hasattr(module, constant.name) and (imported or name == constant.module):
            setattr(module, constant.name, new)


def _set(old: Any, new: Any) -> None:
    """Give a frozen policy other values: defaults of parameters hold the same object."""
    for one in fields(old):
        object.__setattr__(old, one.name, getattr(new, one.name))


def measure(job: Job, capacities: Mapping[str, float], key: str, factor: float) -> Variant:
    """Run all cells with a constant changed; an empty key changes none."""
    if key:
        change(key, factor)
    goodput = {}
    for cell in cells():
        result = job.run(cell, capacities[cell.case])
        goodput[f"{cell.case} {cell.load:g} {cell.seed}"] = round(100 * result.verdict.goodput, 2)
    return Variant(key, factor, goodput)


def cells() -> Iterator[Cell]:
    """Yield the cells that each variant runs."""
    for case in WORKLOADS:
        for load in LOADS:
            for seed in SEEDS:
                yield Cell(case_named(case).name, load, "kvist", seed)


def run(job: Job, path: Path, revision: str, *, jobs: int) -> None:
    """Run what FILE does not have yet; each result is kept at once."""
    runs = Runs(
        f"{platform.machine()}, Python {platform.python_version()}", job.engines, job.requests, revision
    )
    if path.exists():
        runs = msgspec.json.decode(path.read_bytes(), type=Runs)
    done = {(one.key, one.factor) for one in runs.variants}
    wanted = [(one.key, factor) for one in constants() for factor in FACTORS]
    capacities = {name: job.capacity(name) for name in WORKLOADS}
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        if not runs.baseline:
            runs.baseline = pool.submit(measure, job, capacities, "", 1.0).result().goodput
        pending = [
            pool.submit(measure, job, capacities, key, factor)
            for key, factor in wanted
            if (key, factor) not in done
        ]
        for number, future in enumerate(pending, 1):
            runs.variants.append(future.result())
            path.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")
            print(f"{number}/{len(pending)} {runs.variants[-1].key} x {runs.variants[-1].factor:g}")


def page(runs: Runs) -> str:
    """Return the text of ``docs/policy.md``."""
    terms = "\n".join(f"| `{name}` | {_first(term.__doc__ or '')} |" for name, term in cost.TERMS.items())
    by_key = {(one.key, one.factor): one for one in runs.variants}
    known = constants()
    rows, bookkeeping = (
        "\n".join(_row(one, by_key, runs.baseline) for one in known if (one.key in BOOKKEEPING) is part)
        for part in (False, True)
    )
    text = TEMPLATE.format(
        terms=terms,
        formula=" + ".join(cost.TERMS),
        rows=rows,
        bookkeeping=bookkeeping,
        steering=len(known) - len(BOOKKEEPING),
        workloads=", ".join(WORKLOADS),
        loads=", ".join(f"{load:.0%}" for load in LOADS),
        seeds=len(SEEDS),
        engines=runs.engines,
        requests=f"{runs.requests:,}",
        machine=runs.machine,
        revision=runs.revision,
        noise=f"{NOISE_POINTS:g}",
        near=f"{cost.AMONG_REPLICAS.near_seconds:g}",
        near_tpot=f"{cost.TPOT_AMONG_REPLICAS.near_seconds:g}",
        baseline=f"{mean(runs.baseline.values()):.1f}" if runs.baseline else "not measured",
    )
    lines = text.split("\n")
    wrapped = "\n".join(one if len(one) <= WIDTH or one[0] == "|" else fill(one, WIDTH) for one in lines)
    return wrapped + disaggregation_section(docstrings(inspect.getsource(leg_costs), "DisaggregationPolicy"))


def _first(text: str) -> str:
    sentence = " ".join(text.partition("\n\n")[0].split()).removeprefix("Return ")
    return sentence[0].upper() + sentence[1:]


def _row(constant: Constant, runs: Mapping[tuple[str, float], Variant], baseline: Mapping[str, float]) -> str:
    found = []
    for factor in FACTORS:
        variant = runs.get((constant.key, factor))
        found.append("not measured" if variant is None else difference(variant.goodput, baseline))
    value = f"{constant.value:,.10g}"
    return f"| `{constant.key}` | {value} | {constant.origin} | {found[0]} | {found[1]} |"


def difference(goodput: Mapping[str, float], baseline: Mapping[str, float]) -> str:
    """Return the mean change in points, with its standard error over cells."""
    changes = [goodput[cell] - baseline[cell] for cell in baseline if cell in goodput]
    if not changes:
        return "not measured"
    error = stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else 0.0
    return f"{mean(changes):+.1f} ± {error:.1f}"


TEMPLATE: Final = """\
# The policy

<!-- Made by `python -m kvist_sim.virtual.sensitivity --write`; do not edit. -->

The picker sends a request to the endpoint with the least cost. The cost is a sum of terms in seconds; each
is one function in `epp/kvist_epp/scheduling/cost.py`, one number in `/debug/pick` (`terms`) and one in the
request log (`cost`):

| term | seconds |
|---|---|
{terms}

```
cost = {formula}
```

- `work` is the seconds of prefill that this request answers for x tightness x price.
- `load` is the time to load what only a slower tier holds there: its tokens divided by the tokens/s that the
  engine's metrics show (`vllm:kv_offload_*`), or `Policy.load_rates` until they do, after the loads that
  were sent there before, since a tier reads for one request after the other. It has no price, since running
  sequences do not wait for it. Where loading was slower than computing in the last minute, or would be done
  later because of the loads before it, the engine is kept from loading (`--skip-slow-tiers`), and the tokens
  count as not cached.
- The **price** of a second of work is 1, the request's own time, and more the more sequences run in the
  pool and the larger the share of its endpoints whose KV cache is full: each sequence waits while a prompt
  is computed.
- **Tightness** is above 1 on an endpoint whose sequences leave clearly less time for prefill than the
  pool's mean (only under a TPOT target).
- Where other requests will use the same copy of a prefix, its cost is shared: `work` and `eviction` contain
  only this request's part.
- Costs closer than `near_seconds` are a tie, which goes to the endpoint with the fewest running requests,
  then in turn.
- An endpoint that is full comes after all that are not. When all are, or the best one defers prefill (TPOT
  target), the request waits (see the [guide](guides/flow-control.md)).

Decision records 0003, 0011 to 0018, 0021, 0038 and 0046 have its history; this page has the policy in force.

To add a term, write a function `NAME_term` in `cost.py`, add it to `TERMS`, and add a test `test_NAME_…` to \
`tests/epp/scheduling/test_cost.py`; then run `python -m kvist_sim.virtual.sensitivity --write`. A new \
constant shows "not measured" until the runs are repeated. Where several replicas route to the same \
endpoints, `near_seconds` is {near}, with a TPOT target {near_tpot}.

## Constants

{steering} constants weigh one thing against another. The table has the origin of each, and what halving \
and doubling it does to goodput: mean change in \
points of a percent over {workloads} at {loads} of the ideal pool's capacity, {seeds} seeds each, \
with its standard error. {engines} engines, {requests} requests a run, the product's own objects in \
virtual time; goodput with the constants as they are: {baseline} %. Changes below {noise} points are \
within what seeds differ by. Measured on {machine}, revision {revision}. Constants of several \
replicas and of routing that no workload exercises cannot show here.

A constant stays where leaving it out changes goodput, even if halving and doubling it do not (decision \
[21](decisions/0021-fewer-constants.md)).

| constant | value | origin | halved | doubled |
|---|---|---|---|---|
{rows}

## Bounds and bookkeeping

These bound memory, tell late events from lost ones, or set the interval of periodic work.

| constant | value | origin | halved | doubled |
|---|---|---|---|---|
{bookkeeping}

## Data-parallel ranks

An endpoint with several ranks behind its port (`kvist.dev/data-parallel-size`) is picked by the rank that
holds most of the prompt. Which rank computes it is then decided by the same terms, among the ranks of that
endpoint: by what each holds, its requests and its backlog. Where all hold the same, no rank is named, and the
engine chooses by its queues
([decision 79](decisions/0079-ranks-behind-a-port-are-compared-by-cost.md)).
"""


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m kvist_sim.virtual.sensitivity", description=__doc__)
    parser.add_argument("--runs", type=Path, default=RUNS, help="file of results (default: %(default)s)")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--revision", default="unknown", help="of the code that runs, for the page")
    parser.add_argument("--write", action="store_true", help="write docs/policy.md from the results and stop")
    asked = parser.parse_args(argv)
    if not asked.write:
        run(Job(engines=asked.engines, requests=asked.requests), asked.runs, asked.revision, jobs=asked.jobs)
    PAGE.write_text(page(msgspec.json.decode(asked.runs.read_bytes(), type=Runs)))


if __name__ == "__main__":
    main()
