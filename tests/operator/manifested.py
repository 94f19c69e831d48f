"""Whole sets of objects, kept as files, reviewed as a diff.

Two cases are kept complete (``COMPLETE``). Each other case is kept as its differences from the nearer of
them, object by object. ``python -m tests.operator.manifested`` writes the files again.
"""

import difflib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.crd.cases import cases, planned

from kvist_operator.manifests import Rendered, Site, render
from kvist_operator.manifests.render import to_yaml
from kvist_operator.spec import read_pool

FOLDER: Final = Path(__file__).parent / "golden_manifests"
UID: Final = "5a3c1f6e-0000-4000-8000-000000000001"
SITE: Final = Site(
    picker_image="kvist-epp:1.2.3",
    claims={"models": frozenset({"ReadOnlyMany"})},
    node_labels=[
        {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.count": "8"},
        {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.count": "4"},
        {"kubernetes.io/os": "linux"},
    ],
)
COMPLETE: Final = ("minimal", "agents")
CASES: Final = {case.name: case.pool for case in cases("valid")}


def resource(case: str) -> dict[str, Any]:
    """Return a pool of tests/crd/valid as the API server returns it."""
    found: dict[str, Any] = json.loads(json.dumps(CASES[case]))
    found["metadata"] |= {"namespace": "forest", "uid": UID, "generation": 3}
    return found


def rendered(case: str, site: Site = SITE, **spec: Any) -> Rendered:
    """Return the objects of a case; ``spec`` replaces whole sections."""
    found = resource(case)
    found["spec"] |= spec
    return render(read_pool(found), planned(found), site)


def one(found: Rendered, kind: str, name: str) -> dict[str, Any]:
    """Return an object by kind and name."""
    [made] = [o for o in found.objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return made


def text(found: Rendered) -> str:
    """Return all objects as YAML."""
    return to_yaml(found.objects)


def golden(case: str, found: Rendered) -> str:
    """Return the text that is kept of a case: all of its objects, or the differences from a complete case."""
    if case in COMPLETE:
        return text(found)
    return min((difference(base, found) for base in COMPLETE), key=lambda lines: lines.count("\n"))


def difference(base: str, found: Rendered) -> str:
    """Return the differences of these objects from those of a complete case: whole objects where that case
    has none of this kind and name, changed lines with one line around them elsewhere."""
    before, after = _complete(base), _by_name(found)
    lines = [f"# differences from {base}.yaml", *_order(list(before), list(after))]
    lines += [f"# without {name}" for name in before if name not in after]
    for name, made in after.items():
        if name not in before:
            lines += [f"# new {name}", *made]
        elif before[name] != made:
            changed = difflib.unified_diff(before[name], made, n=1, lineterm="")
            lines += [f"# changed {name}", *(line for line in changed if line[:3] not in ("---", "+++"))]
    return "\n".join(lines) + "\n"


@cache
def _complete(case: str) -> dict[str, list[str]]:
    return _by_name(rendered(case))


def _order(before: list[str], after: list[str]) -> Iterator[str]:
    """Yield a line if the objects that both have are in another order."""
    both = [name for name in after if name in before]
    if both != [name for name in before if name in after]:
        yield f"# order: {', '.join(after)}"


def _by_name(found: Rendered) -> dict[str, list[str]]:
    return {f"{o['kind']} {o['metadata']['name']}": to_yaml([o]).splitlines() for o in found.objects}


def path(case: str) -> Path:
    """Return the file of a case."""
    return FOLDER / f"{case}.{'yaml' if case in COMPLETE else 'diff'}"


def write() -> None:
    """Write all files, and remove those of no case."""
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        path(case).write_text(golden(case, rendered(case)))
    for stale in {*FOLDER.iterdir()} - {path(case) for case in CASES}:
        stale.unlink()


if __name__ == "__main__":
    write()
