"""The connector's configuration against vLLM's own parser, factories and constructors, version by version."""

from typing import Any

import pytest
from tests.crd.cases import planned
from tests.engine import flags

from kvist_operator.flag_table import VERSIONS, dotted
from kvist_operator.plan.kv_transfer import NO_CONNECTOR

KNOWN = list(map(dotted, VERSIONS))
SHARED = {"claim": "kv", "size": "10Ti"}
OFFLOADS: dict[str, dict[str, Any]] = {
    "memory": {"cpu": "64Gi"},
    "policy": {"cpu": "64Gi", "evictionPolicy": "ARC", "generatedTokens": "Enabled"},
    "disk": {"cpu": "64Gi", "disk": "500Gi"},
    "shared": {"cpu": "64Gi", "shared": SHARED},
    "all": {"cpu": "64Gi", "disk": "500Gi", "hostPath": "/mnt/kv", "shared": SHARED},
    "lmcache": {"lmcache": {"memory": "64Gi"}, "generatedTokens": "Enabled"},
}
READ = (
    flags.BUILD
    + """
import dataclasses, inspect, json, sys
from pathlib import Path
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

home = Path(vllm.__file__).parent
folders = ("v1/kv_offload", "distributed/kv_transfer/kv_connector/v1/offloading")
source = "".join(path.read_text() for folder in folders for path in sorted((home / folder).rglob("*.py")))

def read(line):
    config = vllm_parser().parse_args(line).kv_transfer_config
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    extra = dict(found.pop("kv_connector_extra_config"))
    if found["kv_connector"] == "OffloadingConnector":
        found["spec known"] = extra.get("spec_name", "CPUOffloadingSpec") in OffloadingSpecFactory._registry
        tiers = extra.get("secondary_tiers", [])
        for tier in tiers:
            made = SecondaryTierFactory.get_tier_class(tier)
            rest = {name: value for name, value in tier.items() if name != "type"}
            inspect.signature(made.__init__).bind(None, None, None, tier["type"], **rest)
        found["tiers"] = [type_.__name__ for type_ in map(SecondaryTierFactory.get_tier_class, tiers)]
        found["unknown"] = [key for key in extra if f'"{key}"' not in source]
    found["connector known"] = found["kv_connector"] in KVConnectorFactory._registry
    return found

lines = json.load(sys.stdin)
print("FOUND" + json.dumps([read(line) for line in lines]))
"""
)
BACKENDS = """
import ast, importlib.util, json
from pathlib import Path
import vllm
from vllm.v1.attention.backends.registry import AttentionBackendEnum

home = Path(vllm.__file__).parent
found = []
for name, member in AttentionBackendEnum.__members__.items():
    module, _, cls = str(member.value).rpartition(".")
    path = home.parent / (module.replace(".", "/") + ".py")
    if not path.is_file():
        continue
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == cls:
            for each in node.body:
                if getattr(each, "name", "") == "supports_kv_connector":
                    [answer] = [n for n in ast.walk(each) if isinstance(n, ast.Return)]
                    if answer.value.value is False:
                        found.append(name)
print("FOUND" + json.dumps(found))
"""


def command(offload: dict[str, Any], version: str) -> list[str]:
    """Return the arguments of a plan with this offload, after ``serve``."""
    spec = {
        "model": {"source": "hf://Qwen/Qwen3-32B-FP8"},
        "accelerator": {"product": "H100-80GB"},
        "engine": {"version": version},
        "offload": offload,
    }
    meta = {"name": "twig", "namespace": "forest"}
    resource = {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool", "metadata": meta, "spec": spec}
    return list(planned(resource).argv[1:])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", KNOWN)
def test_vllm_takes_every_connector_that_a_plan_configures(version: str) -> None:
    """The parser reads the configuration, the connector and its specification are registered, vLLM reads
    every key, and each tier's constructor takes its keys."""
    lines = [command(offload, version) for offload in OFFLOADS.values()]
    found = dict(zip(OFFLOADS, flags.run(version, READ, lines), strict=True))

    for name, each in found.items():
        assert each["kv_role"] == "kv_both", name
        assert each["kv_load_failure_policy"] == "recompute", name
        assert each["connector known"], name
        if name != "lmcache":
            assert each["spec known"], name
            assert each["unknown"] == [], name
    assert found["memory"]["tiers"] == found["policy"]["tiers"] == []
    assert found["disk"]["tiers"] == found["shared"]["tiers"] == ["FileSystemTierManager"]
    assert found["all"]["tiers"] == ["FileSystemTierManager"] * 2
    assert found["lmcache"]["kv_connector"] == "LMCacheMPConnector"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", KNOWN)
def test_the_backends_without_a_connector_are_vllm_s(version: str) -> None:
    """Exactly the registered backends that say so support no connector, so that no other is refused."""
    assert sorted(flags.run(version, BACKENDS)) == sorted(NO_CONNECTOR)
