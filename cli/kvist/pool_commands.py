"""``kvist plan``, ``kvist compare`` and ``kvist render``: show what the operator would do for a pool.

No cluster is needed. Each command returns 0, 3 for a plan that is refused, or 2 for input that is invalid.
"""

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from kvist_epp import __version__
from kvist_operator.cluster.capabilities import with_planned_first
from kvist_operator.errors import OperatorError, SpecError
from kvist_operator.manifests import Api, Site, render
from kvist_operator.manifests.render import Rendered, to_yaml
from kvist_operator.models.shape import Facts
from kvist_operator.models.source import draft_facts, model_facts
from kvist_operator.node_labels import NodeFacts, node_kinds
from kvist_operator.plan import Choice, Plan, PlanVerdict, make_plan
from kvist_operator.plan.plan import Difference, differences, override
from kvist_operator.prices import check_names
from kvist_operator.reconcile.model_cache import ModelQuery, look_up_facts, pinned
from kvist_operator.spec import Pool, read_pool
from kvist_operator.spec.preset import preset_name
from kvist_operator.status import plan_status
from kvist_operator.status.known_model import known_model

from .cluster_files import read_nodes, read_prices
from .pool_file import PoolFile, read_pools

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
    """Print the plan of each pool. Return 0 if all fit or are unverified, 3 if one is refused, 2 if one is
    invalid."""
    try:
        found = _read(options)
    except OperatorError as error:
        return _fail(error)
    plans: list[tuple[Pool, Plan]] = []
    code = 0
    for document in found.pools:
        try:
            pool = _pool(found, document.resource)
            plan = _planned(pool, options)
        except OperatorError as error:
            code = _fail(error, document.label if len(found.pools) > 1 else "")
            continue
        plans.append((pool, plan))
        code = max(code, REFUSED) if plan.verdict is PlanVerdict.REFUSED and code != INVALID else code
    if plans:
        _emit(_all_printed(plans, options.output, alone=len(found.pools) == 1))
    return code


def compare_main(options: argparse.Namespace) -> int:
    """Print two plans: with changed fields, or the plan that runs in a cluster and that of this version.

    Return 0 if both fit, 3 if one is refused, 2 if the pool or a change is invalid.
    """
    try:
        found = _read(options)
        first, *others = found.pools
        if others:
            listed = ", ".join(each.label for each in (first, *others))
            problem = f"has several pools ({listed}), and compare takes one: write it to a file of its own"
            raise SpecError(f"--filename {options.file}", problem)
        if options.changes:
            changed = override(first.resource, options.changes)
            before: Mapping[str, Any] = _planned(_pool(found, first.resource), options).to_dict()
            after: Mapping[str, Any] = _planned(_pool(found, changed), options).to_dict()
            titles = "before", ", ".join(options.changes)
        else:
            before, after = _running(found, first.resource, options)
            titles = "running", f"kvist {__version__}"
    except OperatorError as error:
        return _fail(error)
    _emit(_compared(before, after, titles, options.output))
    return REFUSED if PlanVerdict.REFUSED in (before["verdict"], after["verdict"]) else 0


def _running(
    found: PoolFile, resource: Mapping[str, Any], options: argparse.Namespace
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the plan in the pool's status and the one of this version, with the model's facts and the
    accelerators of that status. Raises OperatorError."""
    status = resource.get("status") or {}
    running = status.get("plan")
    if not running:
        problem = (
            "is missing: name a field to change, such as engine.maxModelLen=8192, or compare with a cluster: "
            "kubectl get kvp NAME -o yaml | kvist compare -f -"
        )
        raise SpecError("--with", problem)
    pool = _pool(found, resource)
    facts, draft = look_up_facts(
        ModelQuery(model=pool.model, speculative=pool.engine.speculative, known=known_model(pool, status))
    )
    nodes = with_planned_first(node_kinds(_nodes(options)), status)
    return running, plan_status(_made(pinned(pool, facts), facts, draft, nodes, options))


def _emit(text: str) -> None:
    """Print the text. A reader that stops early (``| head``) is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: OperatorError, label: str = "") -> int:
    print(f"kvist: {label}{': ' if label else ''}{error}", file=sys.stderr)
    return INVALID


def _read(options: argparse.Namespace) -> PoolFile:
    """Return the pools and presets of the files; report the other documents. Raises SpecError."""
    found = read_pools(options.file, options.presets)
    for other in found.others:
        print(f"kvist: {other}", file=sys.stderr)
    return found


def _pool(found: PoolFile, resource: Mapping[str, Any]) -> Pool:
    """Return the pool, with its preset. Raises SpecError."""
    preset = found.preset_of(resource)
    name = preset_name(resource)
    if name and preset is None:
        raise SpecError("spec.presetRef", f"{name} is not in the file: add it with --preset FILE")
    return read_pool(resource, preset=preset)


def _planned(pool: Pool, options: argparse.Namespace) -> Plan:
    """Return the plan of a pool. Raises OperatorError."""
    proposer = pool.engine.speculative
    draft = draft_facts(proposer.model, proposer.shape) if proposer and proposer.model else None
    return _made(pool, model_facts(pool.model), draft, node_kinds(_nodes(options)), options)


def _made(
    pool: Pool, facts: Facts, draft: Facts | None, nodes: Sequence[NodeFacts], options: argparse.Namespace
) -> Plan:
    prices = read_prices(options.price, options.prices or "")
    if not nodes:
        check_names(prices, "--price")
    return make_plan(pool, facts, nodes=nodes, gpu=options.gpu or "", draft=draft, prices=prices)


def _nodes(options: argparse.Namespace) -> list[dict[str, str]]:
    """Return the labels of ``--nodes``; they are read once, because the file may be stdin."""
    if options.nodes and isinstance(options.nodes, str):
        if options.nodes == "-" == options.file:
            raise SpecError("--nodes -", "the pool is read from stdin already: give one of them as a file")
        options.nodes = read_nodes(options.nodes)
    return options.nodes or []


def _all_printed(plans: list[tuple[Pool, Plan]], output: str, *, alone: bool) -> str:
    """Return one plan as it is, and several under the names of their pools: a list, documents or sections."""
    if alone:
        return _printed(plans[0][1], output)
    if output == "json":
        named = [{"pool": f"{pool.namespace}/{pool.name}", **plan.to_dict()} for pool, plan in plans]
        return json.dumps(named, indent=2)
    head = "---\npool: {}\n" if output == "yaml" else "pool {}\n"
    separator = "\n" if output == "yaml" else "\n\n"
    return separator.join(
        head.format(f"{pool.namespace}/{pool.name}") + _printed(plan, output) for pool, plan in plans
    )


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
    lines += [f"warning: {warning}" for warning in plan.warnings]
    if plan.verdict is PlanVerdict.REFUSED:
        lines.append(f"lacks {whole['shortfall_gib']} GiB on each GPU; {plan.nearest}")
        return lines
    price = plan.price_per_hour
    if price is not None:
        product = f" ({plan.layout.gpus} × {plan.hardware.price:g})" if plan.layout.gpus > 1 else ""
        lines.append(f"price of a replica: {price:.2f} per hour{product}")
    lines += [f"{'cheaper' if each.cheaper else 'dearer'}: {each}" for each in plan.neighbours]
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
    parts = PARTS if plan.memory.caches else PARTS[:-1]
    legend = [f"{mark} {name} {memory[key]:.2f}" for name, key, mark in parts]
    legend.append(f"· free {total - memory['usable_gib'] + max(0.0, memory['unused_gib']):.2f}")
    unbroken = "  ".join(entry.replace(" ", NO_BREAK) for entry in legend)
    return [
        f"memory of each {plan.hardware.accelerator.name}: {total:.2f} GiB",
        f"[{drawn:·<{length}}]",
        *(line.replace(NO_BREAK, " ") for line in textwrap.wrap(unbroken, _width())),
        _held(plan, memory),
    ]


def _held(plan: Plan, memory: Mapping[str, Any]) -> str:
    """Return what a replica holds at once: sequences in its KV cache, or the prompts of a step."""
    longest = f"{plan.settings.max_len:,} tokens"
    if plan.settings.pooling:
        step = f"{plan.settings.batched_tokens:,} tokens of {plan.settings.sequences:,} prompts"
        cache = "there is no KV cache"
        if plan.memory.caches:
            cache = "the KV cache has prompts only while they are computed"
        return f"a step of an engine: up to {step}, each up to {longest}; {cache}"
    sequences = f"{memory['max_concurrency']:g} sequences of {longest}"
    each = f"{memory['kv_gib_per_sequence']:.2f} GiB each"
    return f"KV cache of a replica: {memory['kv_tokens']:,} tokens, {sequences} ({each})"


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


def _compared(
    before: Mapping[str, Any], after: Mapping[str, Any], titles: tuple[str, str], output: str
) -> str:
    found = differences(before, after)
    if output == "table":
        return "\n".join(_beside(found, before["verdict"], after["verdict"], titles))
    whole = {
        "before": before,
        "after": after,
        "differences": [{"field": d.field, "before": d.before, "after": d.after} for d in found],
    }
    return json.dumps(whole, indent=2) if output == "json" else yaml.safe_dump(whole, sort_keys=False)


def _beside(found: list[Difference], before: str, after: str, titles: tuple[str, str]) -> list[str]:
    rows = [("", *titles), ("", before, after)]
    rows += [(d.field, _cell(d.before), _cell(d.after)) for d in found]
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows]
    return lines if found else [*lines, "no differences"]


def _cell(value: Any) -> str:
    text = "–" if value is None else _shown(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def render_main(options: argparse.Namespace) -> int:
    """Print the objects of all pools as YAML. Return 0, 3 if a plan is refused, 2 if a pool is invalid; then
    nothing is printed, since half of the objects would be applied."""
    made: list[Rendered] = []
    label = ""
    try:
        found = _read(options)
        for document in found.pools:
            label = document.label if len(found.pools) > 1 else ""
            pool = _pool(found, document.resource)
            plan = _planned(pool, options)
            if plan.verdict is PlanVerdict.REFUSED:
                print(f"kvist: {label}{': ' if label else ''}refused: {plan.refusal}", file=sys.stderr)
                return REFUSED
            made.append(render(pool, plan, _site(options)))
            _report(plan, made[-1])
    except OperatorError as error:
        return _fail(error, label)
    _emit(to_yaml(each for rendered in made for each in rendered.objects).rstrip())
    return 0


def _report(plan: Plan, found: Rendered) -> None:
    """Write what a user has to know of the objects to stderr."""
    lines = [f"unverified: {doubt}" for doubt in plan.doubts]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    lines += [f"{ref.kind} {ref.name} is created by the operator and not shown" for ref in found.expects]
    lines += [f"{note.reason}: {note.message}" for note in found.notes]
    for line in lines:
        print(f"kvist: {line}", file=sys.stderr)


def _site(options: argparse.Namespace) -> Site:
    """Return a cluster with every optional API except those of ``--without``, and the claims of
    ``--claim``."""
    missing = {_api(name) for name in options.without}
    claims = dict(map(_claim, options.claims))
    return Site(apis=frozenset(Api) - missing, claims=claims, node_labels=_nodes(options))


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
