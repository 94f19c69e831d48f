"""Whole sets of objects, kept as files, reviewed as a diff.

``python -m tests.operator.manifested`` writes them again.
"""

import json
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
CASES: Final = {case.name: case.pool for case in cases("valid")}


def resource(case: str) -> dict[str, Any]:
    """One of tests/crd/valid as the API server hands it out."""
    found: dict[str, Any] = json.loads(json.dumps(CASES[case]))
    found["metadata"] |= {"namespace": "forest", "uid": UID, "generation": 3}
    return found


def rendered(case: str, site: Site = SITE, **spec: Any) -> Rendered:
    """Its objects; ``spec`` replaces whole sections."""
    found = resource(case)
    found["spec"] |= spec
    return render(read_pool(found), planned(found), site)


def one(found: Rendered, kind: str, name: str) -> dict[str, Any]:
    """An object by kind and name."""
    [made] = [o for o in found.objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return made


def text(found: Rendered) -> str:
    """All of them as YAML."""
    return to_yaml(found.objects)


def write() -> None:
    """All files again."""
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        (FOLDER / f"{case}.yaml").write_text(text(rendered(case)))


if __name__ == "__main__":
    write()
