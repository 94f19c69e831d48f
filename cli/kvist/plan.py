"""``kvist plan`` and ``kvist compare``: print what would run for a pool, and why; they need no cluster."""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, Final

import yaml

from kvist_operator.errors import OperatorError
from kvist_operator.models.source import draft_facts, facts
from kvist_operator.plan import Choice, Plan, PlanVerdict, make_plan
from kvist_operator.plan.plan import Difference, differences, override
from kvist_operator.spec import read_pool

from .files import read_resource

REFUSED: Final = 3
INVALID: Final = 2
WIDTH: Final = 100
BAR: Final = 80
PARTS: Final = (
    ("weights", "weights_gib", "█"),
    ("activations", "activations_gib", "▓"),
    ("graphs", "graphs_gib", "▒"),
    ("overhead", "overhead_gib", "░"),
    ("KV cache", "kv_gib", "◆"),
)


def plan_main(options: argparse.Namespace) -> int:
    """Print a plan. Return 0 if it fits or is unverified, 3 if it is refused, 2 for an invalid file."""
    try:
        plan = planned(read_resource(options.file), options.gpu or "")
    except OperatorError as error:
        return fail(error)
    emit(_printed(plan, options.output))
    return REFUSED if plan.verdict is PlanVerdict.REFUSED else 0


def compare_main(options: argparse.Namespace) -> int:
    """Print how two plans differ. Return 0, 3 if one is refused, or 2 for an invalid file or change."""
    try:
        resource = read_resource(options.file)
        before = planned(resource, options.gpu or "")
        after = planned(override(resource, options.changes), options.gpu or "")
    except OperatorError as error:
        return fail(error)
    emit(_compared(before, after, options))
    return REFUSED if PlanVerdict.REFUSED in (before.verdict, after.verdict) else 0


def emit(text: str) -> None:
    """Print a text; a reader that closes the pipe (``| head``) is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(error: OperatorError) -> int:
    """Print an error and return the exit code."""
    print(f"kvist: {error}", file=sys.stderr)
    return INVALID


def planned(resource: Mapping[str, Any], gpu: str) -> Plan:
    """Return the plan of a pool's resource. Raises OperatorError."""
    pool = read_pool(resource)
    proposer = pool.engine.speculative
    draft = draft_facts(proposer.model, proposer.shape) if proposer and proposer.model else None
    return make_plan(pool, facts(pool.model), gpu=gpu, draft=draft)


def _printed(plan: Plan, output: str) -> str:
    if output == "json":
        return json.dumps(plan.to_dict(), indent=2)
    if output == "yaml":
        return yaml.safe_dump(plan.to_dict(), sort_keys=False, width=WIDTH).rstrip()
    return "\n".join(table(plan))


def table(plan: Plan) -> list[str]:
    """Return the lines of a plan as text: the verdict, a bar per GPU, the arguments, the reasons."""
    return [*_head(plan), "", *_bar(plan), "", *_command(plan), "", "why", *_reasons(plan.choices)]


def _head(plan: Plan) -> list[str]:
    whole = plan.to_dict()
    gpus, p = whole["accelerator"], whole["parallelism"]
    nodes = f" on {gpus['nodes']} nodes" if gpus["nodes"] > 1 else ""
    sizes = " × ".join(f"{short} {p[name]}" for short, name in _SIZES if p[name] > 1)
    lines = [
        f"{plan.verdict}: {gpus['per_replica']} × {gpus['name']}{nodes}{', ' if sizes else ''}{sizes}",
        f"model: {plan.model}",
    ]
    lines += [f"unverified: {doubt}" for doubt in plan.doubts]
    if plan.verdict is PlanVerdict.REFUSED:
        lines.append(f"{whole['shortfall_gib']} GiB are missing on each; {plan.nearest}")
    return lines


_SIZES: Final = (("TP", "tensor"), ("PP", "pipeline"), ("DP", "data"), ("EP", "expert"))


def _bar(plan: Plan) -> list[str]:
    memory = plan.to_dict()["memory"]
    total = memory["per_gpu_gib"]
    drawn, sums = "", 0.0
    for _, key, mark in PARTS:
        sums += max(0.0, memory[key])
        drawn += mark * (min(BAR, round(BAR * sums / (total or sums or 1))) - len(drawn))
    named = [f"{mark} {name} {memory[key]:.2f}" for name, key, mark in PARTS]
    rest = total - memory["usable_gib"]
    sequences = f"{memory['max_concurrency']:g} sequences of {plan.settings.max_len:,} tokens"
    each = f"{memory['kv_gib_per_sequence']:.2f} GiB each"
    return [
        f"memory of each {plan.hardware.accelerator.name}: {total:.2f} GiB",
        f"[{drawn:·<{BAR}}]",
        *textwrap.wrap("  ".join([*named, f"· free {rest:.2f}"]), WIDTH),
        f"KV cache of a replica: {memory['kv_tokens']:,} tokens, {sequences} ({each})",
    ]


def _command(plan: Plan) -> list[str]:
    if not plan.argv:
        return ["no command, because the plan is refused"]
    lines, line = [], "vllm"
    for word in plan.argv:
        shown = word if _plain(word) else f"'{word}'"
        if word.startswith("--") and len(line) + len(shown) > WIDTH - 4:
            lines.append(f"{line} \\")
            line = f"   {shown}"
        else:
            line = f"{line} {shown}"
    return [*lines, line, *(f"env {name}={value}" for name, value in plan.env.items())]


def _plain(word: str) -> bool:
    return all(c.isalnum() or c in "-_./=,:@" for c in word)


def _reasons(choices: tuple[Choice, ...]) -> list[str]:
    wide = max(len(choice.field) for choice in choices)
    lines: list[str] = []
    for choice in choices:
        text = f"{_shown(choice.value)}: {choice.reason} [{choice.source}]"
        wrapped = textwrap.wrap(text, WIDTH - wide - 4, break_long_words=False)
        lines += [f"  {choice.field if not i else '':<{wide}}  {part}" for i, part in enumerate(wrapped)]
    return lines


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)


def _compared(before: Plan, after: Plan, options: argparse.Namespace) -> str:
    found = differences(before, after)
    if options.output == "table":
        return "\n".join(_beside(found, before, after, options.changes))
    whole = {
        "before": before.to_dict(),
        "after": after.to_dict(),
        "differences": [{"field": d.field, "before": d.before, "after": d.after} for d in found],
    }
    return json.dumps(whole, indent=2) if options.output == "json" else yaml.safe_dump(whole, sort_keys=False)


def _beside(found: list[Difference], before: Plan, after: Plan, changes: list[str]) -> list[str]:
    rows = [("", "before", ", ".join(changes)), ("", str(before.verdict), str(after.verdict))]
    rows += [(d.field, _cell(d.before), _cell(d.after)) for d in found]
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows]
    return lines if found else [*lines, "no differences"]


def _cell(value: Any) -> str:
    text = "–" if value is None else _shown(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
