"""The guide on several pools: its configuration is what the tests run, its objects and commands are taken."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvist_epp.model_header.labeller import OUTCOMES, HeaderMetrics
from kvist_epp.settings.settings import Settings
from kvist_epp.settings.validation import MODEL_HEADER
from tests import docs
from tests.shapes import VERSIONS, faults

GUIDE = (docs.GUIDES / "several-pools.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for _, block in BLOCKS for line in block.splitlines() if line.startswith("kvist-epp ")]
YAML: list[Any] = [one for kind, block in BLOCKS if kind == "yaml" for one in yaml.safe_load_all(block)]
OBJECTS = {one["kind"]: one for one in YAML if "kind" in one}


def test_the_configuration_is_the_one_that_is_tested() -> None:
    """several-pools.yaml is what kvist_sim.envoy_pools writes; test_model_header.py runs it."""
    assert yaml.safe_load(docs.SEVERAL_POOLS.read_text()) == docs.several_pools()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_objects_are_taken_by_a_cluster(version: str) -> None:
    """The route, by the schema of each Kubernetes."""
    assert list(OBJECTS) == ["HTTPRoute"]
    assert [fault for made in OBJECTS.values() for fault in faults(made, version)] == []


def test_its_commands_start_the_filter() -> None:
    """Each command of the page starts the filter."""
    for line in COMMANDS:
        assert Settings.from_args(shlex.split(line)[1:]).check().role == MODEL_HEADER
    assert len(COMMANDS) == 2


def test_the_canary_is_the_configurations() -> None:
    """Names and weights of the page's excerpt are those of the file."""
    (excerpt,) = (one for one in YAML if "route" in one)
    text = Path(docs.SEVERAL_POOLS).read_text()
    for cluster in excerpt["route"]["weighted_clusters"]["clusters"]:
        assert f"name: {cluster['name']}\n                      weight: {cluster['weight']}\n" in text


def test_metrics_and_outcomes_are_real() -> None:
    """Every metric and outcome that the page names is on the page of the process, and the other way round."""
    exposed = HeaderMetrics().snapshot().format("")[0].decode()
    exported = set(re.findall(r"^# TYPE (kvist_epp_model_header\w+) (?!gauge)", exposed, re.MULTILINE))
    assert set(re.findall(r"`(kvist_epp_model_header\w+)", GUIDE)) == exported
    told = next(line for line in GUIDE.splitlines() if "requests_total{outcome}" in line)
    assert [outcome for outcome in OUTCOMES if f"`{outcome}`" not in told] == []
