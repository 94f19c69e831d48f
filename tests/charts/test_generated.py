"""The generated parts of the chart are up to date."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.charts.generate import CHART, MADE, ROOT, VALUES, described

from kvist_operator.manifests.object_names import ENVOY_IMAGE


@pytest.mark.parametrize("file", MADE, ids=lambda file: file.name)
def test_generated_files_are_up_to_date(file: Path) -> None:
    """CRD (byte by byte), rules and README are what `make docs` would write."""
    assert file.read_bytes() == MADE[file]().encode()


def leaves(values: Any, path: str = "") -> list[str]:
    """Paths of what is no section, which has values of its own."""
    if not isinstance(values, dict) or not values:
        return [path]
    return [leaf for key, inner in values.items() for leaf in leaves(inner, f"{path}.{key}".lstrip("."))]


def test_every_value_is_described() -> None:
    """README names each value, itself or the section it is in; nothing is described that is not there."""
    told = [value.path for value in described(VALUES.read_text())]
    found = leaves(yaml.safe_load(VALUES.read_text()))
    assert [leaf for leaf in found if not any(leaf == t or leaf.startswith(f"{t}.") for t in told)] == []
    assert len(told) == len(set(told))


def test_every_value_has_a_schema_and_the_schema_no_others() -> None:
    """values.yaml and values.schema.json know the same values; no section of ours takes unknown ones."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load(VALUES.read_text())
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    agrees(schema, {**values, "global": {}}, "")


def agrees(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
    """Fails for a section that differs."""
    if "properties" not in schema:
        return
    assert schema["additionalProperties"] is False, path
    optional = {"claims"}
    assert set(schema["properties"]) - optional == set(values), path
    for key, inner in schema["properties"].items():
        if isinstance(values.get(key), dict):
            agrees(inner, values[key], f"{path}.{key}")


def test_the_chart_and_the_operator_mean_the_same_envoy() -> None:
    """The chart's Envoy is the one that `kvist render` shows and that the tests ran."""
    assert yaml.safe_load(VALUES.read_text())["envoy"]["image"] == ENVOY_IMAGE


def test_the_example_in_the_chart_is_a_pool() -> None:
    """The operator can read the example that Artifact Hub shows."""
    from kvist_operator.spec import read_pool

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    [example] = yaml.safe_load(chart["annotations"]["artifacthub.io/crdsExamples"])
    example["metadata"] |= {"namespace": "default", "uid": "1"}
    assert read_pool(example).name == "qwen"
    crds = yaml.safe_load(chart["annotations"]["artifacthub.io/crds"])
    real = [yaml.safe_load(file.read_text()) for file in sorted((ROOT / "crds").glob("*.yaml"), reverse=True)]
    assert [(crd["name"], crd["version"]) for crd in crds] == [
        (each["metadata"]["name"], each["spec"]["versions"][0]["name"]) for each in real
    ]
