"""Disaggregated engines that offload blocks to host memory (``MultiConnector``): part of ``make bench-pd``.

The configuration is what the operator renders for ``spec.disaggregation`` and ``spec.offload``, role by role.
Three values differ: the host tier is small and its worker copies on CPUs (``tiers/offload_on_cpu.py``), and
the lease is that of the other trials.
"""

import asyncio
import json
from typing import Any

from tests.crd.cases import planned
from tests.engine.disaggregation_faults import READY, Trial
from tests.engine.disaggregation_mix import compare, requests
from tests.engine.prefill_decode import BLOCK, LEASE_SECONDS, SPLIT, TRANSFERRED, WARM

from kvist_operator.plan.plan import Plan

HOST_BLOCKS = 512
BLOCK_BYTES = BLOCK * 1024
"""The tiny model has 1 KiB a token."""
ON_CPU = {"spec_name": "HostTiers", "spec_module_path": "offload_on_cpu", "secondary_tiers": []}
LOADED = r'vllm:prompt_tokens_cached_by_source_total\{.*source="host".*\}'
REQUESTS = 40


def configs() -> list[dict[str, Any]]:
    """Return ``--kv-transfer-config`` of the prefill engine and of the decode engine, as the operator renders
    it but for what a CPU needs."""
    spec = {
        "model": {"source": "hf://Qwen/Qwen3-32B-FP8"},
        "accelerator": {"product": "H100-80GB"},
        "engine": {"version": "0.32.0"},
        "disaggregation": {"mode": "Roles", "leaseSeconds": 45, "decode": {"engine": {"maxNumSeqs": 512}}},
        "offload": {"cpu": "64Gi"},
    }
    meta = {"name": "twig", "namespace": "forest"}
    pool = {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool", "metadata": meta, "spec": spec}
    plan = planned(pool)
    assert plan.prefill is not None
    return [_on_cpu(plan.prefill), _on_cpu(plan)]


def _on_cpu(plan: Plan) -> dict[str, Any]:
    argv = list(plan.argv)
    config: dict[str, Any] = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    nixl, offload = config["kv_connector_extra_config"]["connectors"]
    assert (config["kv_connector"], nixl["kv_connector"], offload["kv_connector"]) == (
        "MultiConnector",
        "NixlConnector",
        "OffloadingConnector",
    )
    nixl["kv_connector_extra_config"]["kv_lease_duration"] = LEASE_SECONDS
    offload["kv_connector_extra_config"] |= ON_CPU | {"cpu_bytes_to_use": HOST_BLOCKS * BLOCK_BYTES}
    return config


async def both_connectors(trial: Trial) -> None:
    """With NIXL and a host tier in each engine, mixed requests are split and have the lone engine's answers,
    the picker trusts its index of both, and a prompt that has left the GPU is loaded from the host tier."""
    pool = trial.pool
    pool.listed((None, None))
    await pool.until_below(READY, 1)
    prefill, decode = configs()
    await asyncio.gather(pool.restart(0, config=prefill), pool.restart(1, config=decode))
    pool.listed(("prefill", "decode"))
    await pool.until(WARM, 1)
    await mixed(trial)

    body = trial.request(300)
    await trial.right(body)
    await pool.overwrite(0)
    await pool.overwrite(1)
    before = [await pool.counted(LOADED, number) for number in range(2)]
    await trial.right(body)
    after = [await pool.counted(LOADED, number) for number in range(2)]
    assert sum(after) > sum(before), (before, after)
    assert await pool.is_trusted()


async def mixed(trial: Trial) -> None:
    """Send the mix."""
    pool = trial.pool
    split, received = await pool.counted(SPLIT), await pool.counted(TRANSFERRED, 1)
    await compare(trial, requests(pool, REQUESTS))
    assert await pool.counted(SPLIT) == split + REQUESTS
    assert await pool.counted(TRANSFERRED, 1) > received
    assert await pool.is_trusted()
