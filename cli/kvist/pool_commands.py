"""``kvist plan``, ``kvist compare`` and ``kvist render``: show what the operator would do for a pool.

No cluster is needed. Each command returns 0, 3 for a plan that is refused, or 2 for input that is invalid.
"""

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, Final

import yaml

from kvist_operator.errors import OperatorError, SpecError
from kvist_operator.manifests import Api, Site, render
from kvist_operator.manifests.render import to_yaml
from kvist_operator.models.source import draft_facts, model_facts
from kvist_operator.plan import Choice, Plan, PlanVerdict, make_plan
from kvist_operator.plan.plan import Difference, differences, override
from kvist_operator.spec import read_pool

from .pool_file import read_resource

NO_BREAK: Final = "\N{NO-BREAK SPACE}"
REFUSED: Final = 3
INVALID: Final = 2
WIDTH: Final = 100
"""Longest line; a narrower terminal has shorter ones."""
BAR: Final = 80
"""Characters of the longest bar."""
PARTS: Final = (
    ("weights", "weights_gib", "█"),
    ("activations", "activations_gib", "▓"),
    ("graphs", "graphs_gib", "▒"),
    ("overhead", "overhead_gib", "░"),
    ("KV cache", "kv_gib", "◆"),
)


def plan_main(options: argparse.Namespace) -> int:
    """Print a plan. Return 0 if it fits or is unverified, 3 if it is refused, 2 if the pool is invalid."""
    try:
        plan = _planned(read_resource(options.file), options.gpu or "")
    except OperatorError as error:
        return _fail(error)
    _emit(_printed(plan, options.output))
    return REFUSED if plan.verdict is PlanVerdict.REFUSED else 0


def compare_main(options: argparse.Namespace) -> int:
    """Print two plans. Return 0 if both fit, 3 if one is refused, 2 if the pool or a change is invalid."""
    try:
        resource = read_resource(options.file)
        before = _planned(resource, options.gpu or "")
        after = _planned(override(resource, options.changes), options.gpu or "")
    except OperatorError as error:
        return _fail(error)
    _emit(_compared(before, after, options))
    return REFUSED if PlanVerdict.REFUSED in (before.verdict, after.verdict) else 0


def _emit(text: str) -> None:
    """Print the text. A reader that stops early (``| head``) is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: OperatorError) -> int:
    print(f"kvist: {error}", file=sys.stderr)
    return INVALID


def _planned(resource: Mapping[str, Any], gpu: str) -> Plan:
    """Return the plan of a pool's resource. Raises OperatorError."""
    pool = read_pool(resource)
    proposer = pool.engine.speculative
    draft = draft_facts(proposer.model, proposer.shape) if proposer and proposer.model else None
    return make_plan(pool, model_facts(pool.model), gpu=gpu, draft=draft)


def _printed(plan: Plan, output: str) -> str:
    if output == "json":
        return json.dumps(plan.to_dict(), indent=2)
    if output == "yaml":
        return yaml.safe_dump(plan.to_dict(), sort_keys=False, width=WIDTH).rstrip()
    return "\n".join([*_head(plan), "", *_bar(plan), "", *_command(plan), "", "why", *_reasons(plan.choices)])


def _head(plan: Plan) -> list[str]:
    whole = plan.to_dict()
    gpus, p = whole["accelerator"], whole["parallelism"]
    nodes = f" on {gpus['nodes']} nodes" if gpus["nodes"] > 1 else ""
    sizes = " × ".join(f"{short} {p[name]}" for short, name in _SIZES if p[name] > 1)
    verdict = f"{plan.verdict}: {gpus['per_replica']} × {gpus['name']}{nodes}{', ' if sizes else ''}{sizes}"
    lines = [
        "; ".join((verdict, *plan.notes)),
        f"model: {plan.model}",
    ]
    lines += [f"unverified: {doubt}" for doubt in plan.doubts]
    if plan.verdict is PlanVerdict.REFUSED:
        lines.append(f"lacks {whole['shortfall_gib']} GiB on each GPU; {plan.nearest}")
    return lines


_SIZES: Final = (("TP", "tensor"), ("PP", "pipeline"), ("DP", "data"), ("DCP", "context"), ("EP", "expert"))


def _bar(plan: Plan) -> list[str]:
    memory = plan.to_dict()["memory"]
    total = memory["per_gpu_gib"]
    length = min(BAR, _width() - 2)
    drawn, sums = "", 0.0
    for _, key, mark in PARTS:
        sums += max(0.0, memory[key])
        drawn += mark * (min(length, round(length * sums / (total or sums or 1))) - len(drawn))
    legend = [f"{mark} {name} {memory[key]:.2f}" for name, key, mark in PARTS]
    legend.append(f"· free {total - memory['usable_gib']:.2f}")
    unbroken = "  ".join(entry.replace(" ", NO_BREAK) for entry in legend)
    sequences = f"{memory['max_concurrency']:g} sequences of {plan.settings.max_len:,} tokens"
    each = f"{memory['kv_gib_per_sequence']:.2f} GiB each"
    return [
        f"memory of each {plan.hardware.accelerator.name}: {total:.2f} GiB",
        f"[{drawn:·<{length}}]",
        *(line.replace(NO_BREAK, " ") for line in textwrap.wrap(unbroken, _width())),
        f"KV cache of a replica: {memory['kv_tokens']:,} tokens, {sequences} ({each})",
    ]


def _command(plan: Plan) -> list[str]:
    if not plan.argv:
        return ["no command, because the plan is refused"]
    lines, line, width = [], "vllm", _width()
    for word in plan.argv:
        plain = all(c.isalnum() or c in "-_./=,:@" for c in word)
        shown = word if plain else f"'{word}'"
        if word.startswith("--") and len(line) + len(shown) > width - 4:
            lines.append(f"{line} \\")
            line = f"   {shown}"
        else:
            line = f"{line} {shown}"
    return [*lines, line, *(f"env {name}={value}" for name, value in plan.env.items())]


def _reasons(choices: tuple[Choice, ...]) -> list[str]:
    wide = max(len(choice.field) for choice in choices)
    lines: list[str] = []
    for choice in choices:
        text = f"{_shown(choice.value)}: {choice.reason} [{choice.source}]"
        wrapped = textwrap.wrap(text, _width() - wide - 4, break_long_words=False)
        lines += [f"  {choice.field if not i else '':<{wide}}  {part}" for i, part in enumerate(wrapped)]
    return lines


def _width() -> int:
    return max(60, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


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


def render_main(options: argparse.Namespace) -> int:
    """Print a pool's objects as YAML. Return 0, 3 if the plan is refused, 2 if the pool is invalid."""
    try:
        resource = read_resource(options.file)
        plan = _planned(resource, options.gpu or "")
        if plan.verdict is PlanVerdict.REFUSED:
            print(f"kvist: refused: {plan.refusal}", file=sys.stderr)
            return REFUSED
        found = render(read_pool(resource), plan, _site(options))
    except OperatorError as error:
        return _fail(error)
    for ref in found.expects:
        print(f"kvist: {ref.kind} {ref.name} is created by the operator and not shown", file=sys.stderr)
    for note in found.notes:
        print(f"kvist: {note.reason}: {note.message}", file=sys.stderr)
    _emit(to_yaml(found.objects).rstrip())
    return 0


def _site(options: argparse.Namespace) -> Site:
    """Return a cluster with every optional API except those of ``--without``, and the claims of
    ``--claim``."""
    missing = {_api(name) for name in options.without}
    return Site(apis=frozenset(Api) - missing, claims=dict(map(_claim, options.claims)))


def _api(name: str) -> Api:
    """Return the API with this CRD name, or with this first word of it. Raises SpecError."""
    for api in Api:
        if name in (api, api.partition(".")[0]):
            return api
    raise SpecError("--without", f"{name!r} is not one of {', '.join(a.partition('.')[0] for a in Api)}")


def _claim(text: str) -> tuple[str, frozenset[str]]:
    """Split ``models=ReadOnlyMany`` into the claim's name and modes. Raises SpecError."""
    name, sign, modes = text.partition("=")
    if not name or not sign or not modes:
        raise SpecError("--claim", f"{text!r} is not NAME=MODE, such as models=ReadOnlyMany")
    return name, frozenset(modes.split(","))
