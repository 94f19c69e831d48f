"""``kvist render``: print the objects that the operator would create for a pool; it needs no cluster."""

import argparse
import sys

from kvist_operator.errors import OperatorError, SpecError
from kvist_operator.manifests import Api, Rendered, Site, render
from kvist_operator.manifests.render import to_yaml
from kvist_operator.plan import PlanVerdict
from kvist_operator.spec import read_pool

from .files import read_resource
from .plan import REFUSED, emit, fail, planned


def render_main(options: argparse.Namespace) -> int:
    """Print the objects of a pool. Return 0, 3 if its plan is refused, or 2 for an invalid file."""
    try:
        resource = read_resource(options.file)
        plan = planned(resource, options.gpu or "")
        if plan.verdict is PlanVerdict.REFUSED:
            print(f"kvist: refused: {plan.refusal}", file=sys.stderr)
            return REFUSED
        found = render(read_pool(resource), plan, _site(options))
    except OperatorError as error:
        return fail(error)
    _report(found)
    emit(to_yaml(found.objects).rstrip())
    return 0


def _site(options: argparse.Namespace) -> Site:
    """Return a cluster with every optional API but those in ``--without``, and the claims of ``--claim``."""
    missing = {_api(name) for name in options.without}
    return Site(apis=frozenset(Api) - missing, claims=dict(map(_claim, options.claims)))


def _api(name: str) -> Api:
    """Return an API by the name of its CRD, or the first word of that name. Raises SpecError."""
    for api in Api:
        if name in (api, api.partition(".")[0]):
            return api
    raise SpecError("--without", f"{name!r} is not one of {', '.join(a.partition('.')[0] for a in Api)}")


def _claim(text: str) -> tuple[str, frozenset[str]]:
    """Return name and access modes of a claim such as ``models=ReadOnlyMany``. Raises SpecError."""
    name, sign, modes = text.partition("=")
    if not name or not sign or not modes:
        raise SpecError("--claim", f"{text!r} is not NAME=MODE, such as models=ReadOnlyMany")
    return name, frozenset(modes.split(","))


def _report(found: Rendered) -> None:
    for ref in found.expects:
        print(f"kvist: {ref.kind} {ref.name} is created by the operator and not shown", file=sys.stderr)
    for note in found.notes:
        print(f"kvist: {note.reason}: {note.message}", file=sys.stderr)
