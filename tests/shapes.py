"""Every object of Kubernetes, ours, core or another project's, held to what is known of its kind."""

import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import yaml

from tests.schemas import Schema, complaints

Json = Mapping[str, Any]
VERSIONS: Final = tuple(f"1.{minor}" for minor in range(30, 38))
"""Of Kubernetes, that are supported."""
ROOT: Final = Path(__file__).parent.parent
_OURS: Final = "kvist.dev/v1alpha1/InferencePool"


@cache
def foreign() -> dict[str, Schema]:
    """The spec of each kind that is not Kubernetes' own: group/version/kind → schema."""
    crd = yaml.safe_load((ROOT / "crds" / "inferencepools.yaml").read_text())
    ours = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    others: dict[str, Schema] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["kinds"]
    return {_OURS: ours, **others}


def faults(made: Json, version: str) -> list[str]:
    """Return the errors of a cluster of this version for the object. Core objects are checked against its own
    schema, and unknown fields are errors."""
    kind = f"{made['apiVersion']}/{made['kind']}"
    if kind in foreign():
        return list(complaints(made.get("spec", {}), foreign()[kind], "spec"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kubernetes_validate.validate(made, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return [f"{kind} is neither in Kubernetes {version} nor in tests/shapes.yaml"]
    except kubernetes_validate.ValidationError as error:
        return [str(error)]
    return []
