"""``kvist render``: a pool in, the objects the operator would make of it out, as YAML. No cluster needed."""

import argparse
import sys

from kvist_operator.errors import OperatorError, SpecError
from kvist_operator.manifests import Api, Rendered, Site, render
from kvist_operator.manifests.render import to_yaml
from kvist_operator.plan import Plan, PlanVerdict
from kvist_operator.spec import read_pool

from .files import read_resource
from .plan import REFUSED, emit, fail, planned


def render_main(options: argparse.Namespace) -> int:
    """Exit code 0, 3 for a plan that is refused, 2 for what cannot be read or made."""
    try:
        resource = read_resource(options.file)
        plan = planned(resource, options.gpu or "")
        if plan.verdict is PlanVerdict.REFUSED:
            return _refuse(plan)
        found = render(read_pool(resource), plan, _site(options))
    except OperatorError as error:
        return fail(error)
    _say(found)
    emit(to_yaml(found.objects).rstrip())
    return 0


def _refuse(plan: Plan) -> int:
    said = next(choice.reason for choice in plan.choices if choice.field == "verdict")
    print(f"kvist: refused: {said}", file=sys.stderr)
    return REFUSED


def _site(options: argparse.Namespace) -> Site:
    """A cluster with every optional API but those named, and what is said of its claims."""
    missing = {_api(name) for name in options.without}
    return Site(apis=frozenset(Api) - missing, claims=dict(map(_claim, options.claims)))


def _api(name: str) -> Api:
    """By the name of its CRD, or the first word of it. Raises SpecError."""
    for api in Api:
        if name in (api, api.partition(".")[0]):
            return api
    raise SpecError("--without", f"{name!r} is not one of {', '.join(a.partition('.')[0] for a in Api)}")


def _claim(text: str) -> tuple[str, frozenset[str]]:
    """``models=ReadOnlyMany`` taken apart. Raises SpecError."""
    name, sign, modes = text.partition("=")
    if not name or not sign or not modes:
        raise SpecError("--claim", f"{text!r} is no NAME=MODE, such as models=ReadOnlyMany")
    return name, frozenset(modes.split(","))


def _say(found: Rendered) -> None:
    """To stderr: what is not among the objects."""
    for ref in found.expects:
        print(f"kvist: {ref.kind} {ref.name} is made by the operator and not shown", file=sys.stderr)
    for note in found.notes:
        print(f"kvist: {note.reason}: {note.message}", file=sys.stderr)
