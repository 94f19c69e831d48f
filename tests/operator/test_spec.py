"""Promises of the spec's reader: every field, its default, and an error that names it."""

from typing import Any

import pytest
from tests.operator.pools import pool, resource

from kvist_operator.errors import SpecError
from kvist_operator.spec import read_pool
from kvist_operator.spec.pool import Adapter, KvDtype, Priority, SecretKey, Source


def test_a_pool_needs_only_a_model() -> None:
    """All fields but the model have a default or are decided by the plan."""
    found = pool("hf://Qwen/Qwen3-8B")

    assert (found.replicas, found.picker.replicas, found.picker.mode) == (1, 2, "Auto")
    assert (found.engine.kv_dtype, found.engine.prefix_caching, found.engine.tensor) == (
        KvDtype.AUTO,
        True,
        None,
    )
    assert (found.rollout.strategy, found.rollout.max_unavailable, found.rollout.drain_seconds) == (
        "ReplaceFirst",
        1,
        60,
    )
    assert (found.gateway.mode, found.gateway.failure_mode, found.pod_monitor) == ("None", "FailOpen", "Auto")
    assert found.served_name == "twig"


def test_every_field_is_read() -> None:
    """A pool with all fields is read completely."""
    found = pool(
        "hf://acme/model/",
        model={
            "revision": "abc",
            "servedName": "acme",
            "tokenSecretRef": {"name": "hub", "key": "hf"},
            "adapters": [{"name": "sql", "source": "hf://acme/sql", "rank": 64}],
            "shape": {"config": {"hidden_size": 1}, "checkpointSize": "1.5Gi"},
        },
        engine={
            "image": "vllm/vllm-openai:v0.32.0",
            "version": "0.32.0",
            "quantization": "FP8",
            "kvCacheDtype": "FP8E5M2",
            "attentionBackend": "FLASHINFER",
            "prefixCaching": "Disabled",
            "gpuMemoryUtilizationPercent": 90,
            "maxModelLen": 4096,
            "maxNumSeqs": 64,
            "maxNumBatchedTokens": 4096,
            "tensorParallelSize": 2,
            "pipelineParallelSize": 2,
            "dataParallelSize": 1,
            "decodeContextParallelSize": 1,
            "maxLoras": 1,
            "maxCpuLoras": 1,
            "speculative": {"method": "EAGLE3", "model": "hf://acme/eagle", "tokens": 4},
            "schedulingPolicy": "Priority",
            "extraArgs": ["--seed=1"],
            "env": [
                {"name": "A", "value": "b"},
                {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            ],
        },
        accelerator={
            "product": "H100-80GB",
            "memory": "80Gi",
            "resourceName": "nvidia.com/gpu",
            "count": 4,
            "perNode": 8,
        },
        workload={
            "promptTokens": 1000,
            "outputTokens": 200,
            "sharedPrefixTokens": 500,
            "imagesPerRequest": 1,
            "concurrency": 32,
            "ttftMilliseconds": 300,
            "tpotMilliseconds": 30,
        },
        offload={"cpu": "64Gi", "disk": "1Ti"},
        replicas=3,
        rollout={
            "strategy": "SurgeFirst",
            "maxUnavailable": "25%",
            "drainSeconds": 90,
            "startupSeconds": 900,
        },
        picker={
            "replicas": 3,
            "mode": "Approximate",
            "tokenizer": "hf://acme/model",
            "priorities": [{"name": "batch", "value": -1}],
            "image": "kvist:1",
            "resources": {"limits": {"memory": "1Gi"}},
        },
        gateway={
            "mode": "Route",
            "flavor": "EnvoyGateway",
            "parentRefs": [{"name": "edge"}],
            "hostnames": ["llm.example"],
            "failureMode": "FailClose",
            "failoverEndpoints": 2,
        },
        monitoring={"podMonitor": "Disabled"},
        podTemplate={"spec": {"nodeSelector": {"a": "b"}}},
    )

    assert (found.model.kind, found.model.location, found.served_name) == (Source.HUB, "acme/model", "acme")
    assert found.model.token == SecretKey(name="hub", key="hf")
    assert found.model.adapters == (Adapter(name="sql", source="hf://acme/sql", rank=64),)
    assert found.model.shape is not None
    assert found.model.shape.checkpoint_bytes == 3 << 29
    assert found.engine.speculative is not None
    assert (found.engine.speculative.method, found.engine.speculative.tokens) == ("EAGLE3", 4)
    assert (found.engine.tensor, found.engine.pipeline, found.engine.data) == (2, 2, 1)
    assert [entry["name"] for entry in found.engine.env] == ["A", "C"]
    assert (found.accelerator.count, found.accelerator.per_node) == (4, 8)
    assert found.workload.typical_tokens == 1200
    assert (found.offload.cpu_bytes, found.offload.disk_bytes) == (64 << 30, 1 << 40)
    assert (found.rollout.max_unavailable, found.rollout.startup_seconds) == ("25%", 900)
    assert found.picker.priorities == (Priority(name="batch", value=-1),)
    assert (found.gateway.mode, found.gateway.parents) == ("Route", ({"name": "edge"},))
    assert found.pod_template == {"spec": {"nodeSelector": {"a": "b"}}}


@pytest.mark.parametrize(
    ("source", "kind", "location"),
    [
        ("hf://org/model", Source.HUB, "org/model"),
        ("pvc://claim/path/in", Source.CLAIM, "claim/path/in"),
        ("oci://reg/img:1", Source.IMAGE, "reg/img:1"),
        ("/models/llama", Source.PATH, "/models/llama"),
    ],
)
def test_sources_are_distinguished_by_their_scheme(source: str, kind: Source, location: str) -> None:
    """The scheme distinguishes hub, claim, image, and a path in the engine's image."""
    found = pool(source).model

    assert (found.kind, found.location) == (kind, location)


def test_a_claim_has_a_name_and_a_path() -> None:
    """``pvc://claim/path/in`` mounts ``claim`` and loads ``path/in``."""
    found = pool("pvc://claim/path/in").model

    assert (found.claim, found.path) == ("claim", "path/in")


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"model": {"source": ""}}, "spec.model.source: is missing"),
    (
        {"model": {"source": "az://container"}},
        "spec.model.source: 'az://container' is not a model source: write hf://",
    ),
    (
        {"picker": {"tokenizer": "gs://bucket/model"}},
        "spec.picker.tokenizer: 'gs://bucket/model': vLLM reads only the model from object stores",
    ),
    ({"model": {"source": "Qwen/Qwen3-8B"}}, "spec.model.source: 'Qwen/Qwen3-8B' has no scheme"),
    ({"model": {"shape": {}}}, "spec.model.shape.config: is missing"),
    (
        {"model": {"shape": {"config": {"a": 1}, "checkpointSize": "big"}}},
        "not a quantity of bytes; write it like 80Gi",
    ),
    ({"model": {"adapters": [{"name": "a"}]}}, "spec.model.adapters[0].source: is missing"),
    ({"model": {"adapters": [{"name": "a", "source": "hf://b", "rank": 24}]}}, "24 is not one of 1, 8, 16"),
    (
        {"model": {"adapters": [{"name": "a", "source": "hf://b"}, {"name": "a", "source": "hf://c"}]}},
        "spec.model.adapters: 'a' occurs twice",
    ),
    ({"model": {"tokenSecretRef": {}}}, "spec.model.tokenSecretRef.name: is missing"),
    ({"engine": {"kvCacheDtype": "fp8"}}, "spec.engine.kvCacheDtype: 'fp8' is not one of Auto, Model, FP8"),
    ({"engine": {"kvCacheDtype": "int8"}}, "spec.engine.kvCacheDtype: 'int8' is not one of"),
    (
        {"engine": {"maxModelLength": 1}},
        "spec.engine.maxModelLength: unknown field; did you mean maxModelLen?",
    ),
    ({"engine": {"maxModelLen": "32k"}}, "spec.engine.maxModelLen: is a string, not a whole number"),
    ({"engine": {"maxModelLen": True}}, "spec.engine.maxModelLen: is a boolean"),
    ({"engine": {"gpuMemoryUtilizationPercent": 100}}, "100 is not within 10 and 99"),
    ({"engine": {"gpuMemoryUtilizationPercent": 0.9}}, "is a fraction, not a whole number"),
    ({"engine": {"maxNumSeqs": 512, "maxNumBatchedTokens": 256}}, "256 is less than maxNumSeqs (512)"),
    ({"engine": {"version": "latest"}}, "spec.engine.version: 'latest' is not a version"),
    ({"engine": {"quantization": "AWQ"}}, "spec.engine.quantization: 'AWQ' is not one of FP8"),
    ({"engine": {"prefixCaching": True}}, "spec.engine.prefixCaching: is a boolean, not a string"),
    ({"engine": {"attentionBackend": "flash"}}, "spec.engine.attentionBackend: 'flash' does not match"),
    ({"engine": {"speculative": {"tokens": 2}}}, "spec.engine.speculative.method: is missing"),
    ({"engine": {"speculative": {"method": "EAGLE3"}}}, "spec.engine.speculative.model: is missing"),
    ({"engine": {"speculative": {"method": "MTP", "model": "hf://a"}}}, "MTP takes no draft model"),
    ({"engine": {"extraArgs": "--seed 1"}}, "spec.engine.extraArgs: is a string, not a list"),
    ({"engine": {"extraArgs": [1]}}, "spec.engine.extraArgs[0]: is a number, not a string"),
    ({"engine": {"extraArgs": ["--swap-space", "4"]}}, "spec.engine.extraArgs[0]: --swap-space is gone"),
    ({"engine": {"env": [{"value": "x"}]}}, "spec.engine.env[0].name: is missing"),
    ({"engine": []}, "spec.engine: is a list, not an object"),
    ({"accelerator": {"count": 0}}, "spec.accelerator.count: 0 is not within 1 and 512"),
    ({"accelerator": {"memory": -1}}, "spec.accelerator.memory: -1 is not a quantity"),
    ({"workload": {"promptTokens": 10, "sharedPrefixTokens": 20}}, "20 is more than promptTokens (10)"),
    ({"offload": {"disk": "1Ti"}}, "spec.offload.disk: needs spec.offload.cpu too"),
    ({"rollout": {"maxUnavailable": "half"}}, "neither a number above 0 nor a percentage like 25%"),
    ({"rollout": {"strategy": "Surge"}}, "did you mean SurgeFirst?"),
    ({"picker": {"mode": "off"}}, "did you mean Off?"),
    ({"gateway": {"mode": "Route", "flavor": "EnvoyGateway"}}, "spec.gateway.parentRefs: is missing"),
    ({"gateway": {"mode": "Route"}, "picker": {"mode": "Off"}}, "set spec.gateway.mode to None and route to"),
    ({"gateway": {"mode": "Istio"}}, "'Istio' is not one of None, Envoy, Route"),
    ({"replicas": -1}, "spec.replicas: -1 is not within 0"),
    ({"replica": 2}, "spec.replica: unknown field; did you mean replicas?"),
]


@pytest.mark.parametrize(("spec", "said"), INVALID, ids=[said[:40] for _, said in INVALID])
def test_what_cannot_be_read_names_field_and_remedy(spec: dict[str, Any], said: str) -> None:
    """The error of each of forty invalid specs names the field and the remedy."""
    with pytest.raises(SpecError) as refused:
        read_pool(resource(**spec))

    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "Pool"}, "kind: Pool of kvist.dev is not an InferencePool"),
        (
            {"apiVersion": "inference.networking.k8s.io/v1"},
            "is not an InferencePool of kvist.dev: write apiVersion",
        ),
        ({"metadata": {}}, "metadata.name: is missing"),
        ({"metadata": {"name": "x" * 41}}, "metadata.name: 41 characters"),
        ({"spec": None}, "spec.model.source: is missing"),
    ],
)
def test_other_resources_are_distinguished(change: dict[str, Any], said: str) -> None:
    """The Inference Extension's InferencePool, of the same kind but another group, is refused."""
    with pytest.raises(SpecError) as refused:
        read_pool({**resource(), **change})

    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("gateway", "named"),
    [
        ({}, 3),
        ({"mode": "Envoy"}, 3),
        ({"mode": "Route", "flavor": "EnvoyGateway", "parentRefs": [{"name": "edge"}]}, 3),
        ({"mode": "Route", "parentRefs": [{"name": "edge"}]}, 1),
        ({"mode": "Route", "parentRefs": [{"name": "edge"}], "failoverEndpoints": 3}, 3),
    ],
)
def test_gateways_of_the_extension_are_named_one_endpoint(gateway: dict[str, Any], named: int) -> None:
    """Few of them walk a list: it is sent to those that do only if the pool says so."""
    assert pool("hf://acme/model", gateway=gateway).gateway.failover_endpoints == named
