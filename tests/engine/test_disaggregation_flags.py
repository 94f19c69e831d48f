"""Engines of disaggregated pools against vLLM's own parser, factories and constants, version by version."""

from typing import Any

import pytest
from tests.crd.cases import planned
from tests.engine import flags

from kvist_operator.flag_table import VERSIONS, dotted
from kvist_operator.plan.nixl import HOST_VARIABLE, LAYOUT, PORT_VARIABLE, SIDE_CHANNEL

KNOWN = list(map(dotted, VERSIONS))
ROLES = {"mode": "Roles", "leaseSeconds": 45, "decode": {"engine": {"maxNumSeqs": 512}}}
POOLS: dict[str, dict[str, Any]] = {
    "fluid": {"disaggregation": {"mode": "Fluid"}},
    "roles": {"disaggregation": ROLES},
    "tiers": {"disaggregation": ROLES, "offload": {"cpu": "64Gi", "disk": "500Gi"}},
    "lmcache": {"disaggregation": ROLES, "offload": {"lmcache": {"memory": "64Gi"}}},
}
READ = (
    flags.BUILD
    + """
import dataclasses, json, sys
from pathlib import Path
import vllm
from vllm import envs
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

home = Path(vllm.__file__).parent / "distributed/kv_transfer/kv_connector/v1"
source = "".join(path.read_text() for path in sorted((home / "nixl").rglob("*.py")))
whole = Path(envs.__file__).read_text()

def read(line):
    config = vllm_parser().parse_args(line).kv_transfer_config
    children = config.kv_connector_extra_config.get("connectors")
    each = [KVTransferConfig(**child) for child in children] if children else [config]
    return {
        "roles": [[one.kv_connector, one.kv_role] for one in each],
        "policies": sorted({one.kv_load_failure_policy for one in (config, *each)}),
        "known": [
            one.kv_connector in KVConnectorFactory._registry or bool(one.kv_connector_module_path)
            for one in (config, *each)
        ],
        "extra": each[0].kv_connector_extra_config,
        "unknown": [key for key in each[0].kv_connector_extra_config if f'"{key}"' not in source],
    }

given = json.load(sys.stdin)
print("FOUND" + json.dumps({
    "lines": [read(line) for line in given["lines"]],
    "variables": {name: getattr(envs, name, None) for name in given["variables"]},
    "unknown": [name for name in given["variables"] if name not in whole],
}))
"""
)


def commands(version: str) -> dict[tuple[str, str], list[str]]:
    """Return the arguments of each pool's engines, after ``serve``, by pool and role."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, more in POOLS.items():
        spec = {
            "model": {"source": "hf://Qwen/Qwen3-32B-FP8"},
            "accelerator": {"product": "H100-80GB"},
            "engine": {"version": version},
            **more,
        }
        meta = {"name": "twig", "namespace": "forest"}
        pool = {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool", "metadata": meta, "spec": spec}
        plan = planned(pool)
        for each in (plan, plan.prefill):
            if each is not None:
                found[name, each.role] = list(each.argv[1:])
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", KNOWN)
def test_vllm_takes_the_connectors_of_every_role(version: str) -> None:
    """The parser reads the configuration of each role, alone and beside places for offloaded blocks; vLLM has
    the connectors, reads their keys and our variables, and computes again what cannot be loaded."""
    lines = commands(version)
    given = {"lines": list(lines.values()), "variables": [HOST_VARIABLE, PORT_VARIABLE, LAYOUT]}
    answer = flags.run(version, READ, given)
    found = dict(zip(lines, answer["lines"], strict=True))

    expected = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}
    others = {"tiers": "OffloadingConnector", "lmcache": "LMCacheMPConnector"}
    for (name, role), each in found.items():
        second = [[others[name], "kv_both"]] if name in others else []
        assert each["roles"] == [["NixlConnector", expected[role]], *second], (name, role)
        assert each["policies"] == ["recompute"], (name, role)
        assert all(each["known"]), (name, role)
        assert each["extra"] == {"kv_lease_duration": 30 if name == "fluid" else 45}
        assert each["unknown"] == [], (name, role)
    assert answer["unknown"] == []
    assert answer["variables"][PORT_VARIABLE] == SIDE_CHANNEL
