"""``kvist plan``, ``kvist compare`` and ``kvist render``: show what the operator would do for a pool.

No cluster is needed. Each command returns 0, 3 for a plan that is refused, or 2 for input that is invalid.
"""

import argparse
import json
import re
import sys
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
from kvist_operator.plan import Plan, PlanVerdict, make_plan
from kvist_operator.plan.plan import Difference, differences, override
from kvist_operator.prices import check_names
from kvist_operator.reconcile.model_cache import ModelQuery, look_up_facts, pinned
from kvist_operator.spec import Pool, read_pool
from kvist_operator.spec.preset import preset_name
from kvist_operator.status import plan_status
from kvist_operator.status.known_model import known_model

from .cluster_files import read_nodes, read_prices
from .plan_text import WIDTH, plan_page, print_text, shown
from .pool_file import PoolFile, read_pools

ACCESS_MODES: Final = ("ReadWriteOnce", "ReadWriteOncePod", "ReadOnlyMany", "ReadWriteMany")
REFUSED: Final = 3
INVALID: Final = 2


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
        print_text(_all_printed(plans, options.output, alone=len(found.pools) == 1))
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
    print_text(_compared(before, after, titles, options.output))
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
    return plan_page(plan)


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
    text = "–" if value is None else shown(value)
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
    print_text(to_yaml(each for rendered in made for each in rendered.objects).rstrip())
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
    """Return a cluster with every optional API except those of ``--without``, the claims of ``--claim``, the
    gateways of ``--gateway``, and users of its own with ``--openshift``."""
    missing = {_api(name) for name in options.without}
    claims = dict(map(_claim, options.claims))
    return Site(
        apis=frozenset(Api) - missing,
        claims=claims,
        node_labels=_nodes(options),
        gateways=frozenset(map(_controller, options.gateways)),
        assigns_users=options.openshift,
    )


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
    for mode in (found := modes.split(",")):
        if mode not in ACCESS_MODES:
            raise SpecError("--claim", f"{mode!r} is no access mode: write {', '.join(ACCESS_MODES)}")
    return name, frozenset(found)


def _controller(text: str) -> str:
    """Return the ``controllerName`` of a GatewayClass. Raises SpecError."""
    if not re.fullmatch(r"[a-z0-9.-]+/\S+", text):
        problem = (
            f"{text!r} is no controllerName such as istio.io/gateway-controller; see kubectl get gatewayclass"
        )
        raise SpecError("--gateway", problem)
    return text
