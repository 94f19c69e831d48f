"""The guide to tracing: its Envoy is the one that is tested, its pool and its flags are taken."""

import re
from typing import Any

import pytest
import yaml

from kvist_epp.settings.arguments import flags_of
from kvist_epp.settings.settings import Settings
from kvist_operator.errors import SpecError
from kvist_sim.envoy_tracing import add_tracing
from tests import docs
from tests.operator.manifested import one, rendered, resource

GUIDE = (docs.GUIDES / "tracing.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
CLUSTERS, MANAGER, POOL, BY_VARIABLES = (yaml.safe_load(block) for kind, block in BLOCKS if kind == "yaml")


def configured(collector: str, percent: float) -> dict[str, Any]:
    """Return what the data-plane tests add to an Envoy."""
    manager: dict[str, Any] = {}
    chains = [{"filters": [{"typed_config": manager}]}]
    settings: dict[str, Any] = {
        "static_resources": {"clusters": [], "listeners": [{"filter_chains": chains}]}
    }
    add_tracing(settings, collector, percent=percent)
    [cluster] = settings["static_resources"]["clusters"]
    return {"cluster": cluster, "tracing": manager["tracing"]}


def test_the_envoy_of_the_guide_is_the_one_that_is_tested() -> None:
    """Both parts are those of the data-plane tests, but for names in place of addresses."""
    found = configured("collector:4317", 10)
    [cluster] = CLUSTERS
    assert cluster == found["cluster"] | {"type": "STRICT_DNS"}
    assert MANAGER["tracing"] == found["tracing"]


def test_the_flags_of_the_guide_exist() -> None:
    """The flags that the guide names are those of traces, and it names them all."""
    named = set(re.findall(r"`(--trace[a-z-]+)", GUIDE))
    assert named == {flag for flag in flags_of(Settings).values() if flag.startswith("--trace")}


def container(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    """The first container of an object of the minimal pool with these sections."""
    found: dict[str, Any] = one(rendered("minimal", **spec), kind, name)
    first: dict[str, Any] = found["spec"]["template"]["spec"]["containers"][0]
    return first


def test_the_pool_of_the_guide_traces() -> None:
    """Envoy, pickers and engines of that pool are started with its collector."""
    name = resource("minimal")["metadata"]["name"]
    spec = {part: POOL["spec"][part] for part in ("gateway", "tracing")}
    picker = container("Deployment", f"{name}-epp", **spec)
    engine = container("Deployment", name, **spec)
    envoy = one(rendered("minimal", **spec), "ConfigMap", f"{name}-envoy")["data"]["envoy.json"]

    collector = POOL["spec"]["tracing"]["endpoint"]
    settings = Settings.from_args(picker["args"], {})
    assert (settings.trace_endpoint, settings.trace_sample_ratio) == (collector, 0.05)
    assert collector in engine["args"]
    assert "collector.observability" in envoy
    for made in (f"{name}-envoy", f"{name}-epp"):
        assert made.replace(name, POOL["metadata"]["name"]) in GUIDE


def test_the_variables_of_the_guide_set_the_picker_s_flags() -> None:
    """A picker takes collector and fraction from variables, and its Secret is a reference."""
    name = resource("minimal")["metadata"]["name"]
    picker = container("Deployment", f"{name}-epp", picker=BY_VARIABLES["spec"]["picker"])
    literal = {entry["name"]: entry["value"] for entry in picker["env"] if "value" in entry}
    settings = Settings.from_args(picker["args"], literal)
    assert settings.trace_endpoint == "https://collector.example.com:4318"
    assert settings.trace_sample_ratio == 0.001
    assert BY_VARIABLES["spec"]["picker"]["env"][-1] in picker["env"]


def test_variables_of_a_picker_replace_the_operator_s() -> None:
    """A variable that the operator sets, too, is in the pod once, as the pool says."""
    name = resource("minimal")["metadata"]["name"]
    home = {"name": "HF_HOME", "value": "/tmp/hub"}
    variables = container("Deployment", f"{name}-epp", picker={"env": [home]})["env"]
    assert [entry for entry in variables if entry["name"] == "HF_HOME"] == [home]


def test_a_secret_in_a_picker_s_variable_is_refused() -> None:
    """A token as a literal value is refused, as it is for engines."""
    with pytest.raises(SpecError, match=r"picker\.env\[0\]"):
        rendered("minimal", picker={"env": [{"name": "HF_TOKEN", "value": "hf_x"}]})
