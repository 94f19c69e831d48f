"""``crds/inferencepoolpresets.yaml``, made from the CRD of pools: the same fields, none required."""

from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import yaml

from kvist_operator.spec.preset import OF_ONE_POOL, SECTIONS

FOLDER: Final = Path(__file__).parents[2] / "crds"
POOLS: Final = FOLDER / "inferencepools.yaml"
PRESETS: Final = FOLDER / "inferencepoolpresets.yaml"
HEAD: Final = "# Written by `make docs` from inferencepools.yaml: sections of a pool's spec, none required.\n"


def preset_crd() -> str:
    """Return the CRD of presets as YAML."""
    pools = yaml.safe_load(POOLS.read_text())
    schema = pools["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    sections: dict[str, Any] = {name: deepcopy(schema["properties"][name]) for name in SECTIONS}
    model = sections["model"]
    model.pop("required")
    model.pop("x-kubernetes-validations")
    model["properties"] = {k: v for k, v in model["properties"].items() if k not in OF_ONE_POOL}
    model["description"] = "How the weights of any model are loaded; which model it is, only a pool says."
    made = {
        "apiVersion": pools["apiVersion"],
        "kind": pools["kind"],
        "metadata": {"name": "inferencepoolpresets.kvist.dev"},
        "spec": {
            "group": "kvist.dev",
            "scope": "Namespaced",
            "names": {
                "kind": "InferencePoolPreset",
                "listKind": "InferencePoolPresetList",
                "plural": "inferencepoolpresets",
                "singular": "inferencepoolpreset",
                "shortNames": ["kvpreset"],
                "categories": ["kvist"],
            },
            "versions": [
                {
                    "name": "v1alpha1",
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [
                        {"name": "Accelerator", "type": "string", "jsonPath": ".spec.accelerator.product"},
                        {"name": "Image", "type": "string", "jsonPath": ".spec.engine.image"},
                        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
                    ],
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "required": ["spec"],
                            "description": "Fields that a platform team sets once for many pools. A pool "
                            "names it in spec.presetRef, and its own fields win.",
                            "properties": {
                                "apiVersion": {"type": "string"},
                                "kind": {"type": "string"},
                                "metadata": {"type": "object"},
                                "spec": {
                                    "type": "object",
                                    "description": "Sections of a pool's spec.",
                                    "properties": sections,
                                },
                            },
                        }
                    },
                }
            ],
        },
    }
    return HEAD + yaml.safe_dump(made, sort_keys=False, width=200, allow_unicode=True)
