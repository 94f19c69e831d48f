"""examples/: their folders, files and pools, for the tests of every tier."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.shapes import ROOT

Json = dict[str, Any]
EXAMPLES: Final = ROOT / "examples"
NAMES: Final = (
    "01-minimal",
    "02-tuned",
    "03-plain-envoy",
    "04-httproute",
    "05-two-models",
    "06-offload",
    "07-lora",
    "08-autoscaling",
    "09-multi-node",
    "10-airgapped",
    "11-disaggregated",
)
NODES: Final[Mapping[str, str]] = {"01-minimal": "H100-80GB"}
"""The GPU of examples whose pools leave it to the nodes' labels."""
VALUES: Final = tuple(sorted(EXAMPLES.glob("*/helm/*-values.yaml")))
"""Of our chart."""
ISTIOD: Final = EXAMPLES / "04-httproute" / "istio" / "istiod-values.yaml"
OTHERS: Final = (*sorted(EXAMPLES.glob("*/*/*-rules.yaml")), ISTIOD)
"""Values of other projects' charts: no objects."""


def manifests() -> list[Path]:
    """Every file that ``kubectl apply`` is given."""
    found = sorted(EXAMPLES.rglob("*.yaml"))
    return [path for path in found if path not in (*VALUES, *OTHERS)]


def documents(path: Path) -> list[Json]:
    """All of a file."""
    return list(yaml.safe_load_all(path.read_text()))


def is_pool(document: Json) -> bool:
    """Whether it is one of ours."""
    return (document["apiVersion"], document["kind"]) == ("kvist.dev/v1alpha1", "InferencePool")


def pools() -> list[Path]:
    """Files with a pool of ours."""
    return [path for path in manifests() if any(map(is_pool, documents(path)))]


def name_of(path: Path) -> str:
    """Return a name such as ``04-httproute/gateway``."""
    return str(path.relative_to(EXAMPLES).with_suffix(""))


def gpu_of(path: Path) -> list[str]:
    """``--gpu`` for a pool's file, where it needs one."""
    gpu = NODES.get(path.relative_to(EXAMPLES).parts[0])
    return ["--gpu", gpu] if gpu else []
