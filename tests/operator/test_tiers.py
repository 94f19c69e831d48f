"""Plans with places for KV cache blocks beyond the GPU: sizes, times, the connector, refusals, namespaces."""

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.pools import chosen, known, plan, pool, reason

from kvist_operator.engine_version import EngineVersion
from kvist_operator.errors import SpecError
from kvist_operator.memory.layout import GIB
from kvist_operator.plan import Plan
from kvist_operator.plan.kv import KvChoice
from kvist_operator.plan.kv_transfer import combined, connector, storage_namespace
from kvist_operator.plan.tiers import duration

QWEN = "Qwen/Qwen3-32B-FP8"
R1 = "deepseek-ai/DeepSeek-R1"
CHATS = {"promptTokens": 20_000, "outputTokens": 500, "sharedPrefixTokens": 18_000, "concurrency": 8}
SHARED = {"claim": "kv", "size": "10Ti"}


def offloaded(
    name: str = QWEN, gpu: str = "H100-80GB", spec: dict[str, Any] | None = None, **offload: Any
) -> Plan:
    """Return a plan with this offload."""
    return plan(name, gpu, offload=offload, **(spec or {}))


def transfer(found: Plan) -> dict[str, Any]:
    """Return the value of --kv-transfer-config."""
    value: dict[str, Any] = json.loads(found.argv[found.argv.index("--kv-transfer-config") + 1])
    return value


def extra(found: Plan) -> dict[str, Any]:
    """Return the connector's own configuration."""
    value: dict[str, Any] = transfer(found)["kv_connector_extra_config"]
    return value


def sizes(found: Plan) -> dict[str, int]:
    """Return the tokens of each place."""
    return {tier.medium: tier.tokens for tier in found.tiers}


def test_tokens_of_a_place_are_its_bytes_by_those_of_a_token() -> None:
    """Qwen3-32B in FP8 has 64 layers, 8 KV heads of 128 elements: 131,072 bytes a token, on any number of
    GPUs. Of a folder that is cleaned, three quarters count."""
    each = 64 * 8 * 128 * 2
    for tensor in (1, 2, 4):
        found = offloaded(
            cpu="64Gi", disk="500Gi", shared=SHARED, spec={"engine": {"tensorParallelSize": tensor}}
        )
        assert sizes(found) == {
            "gpu": found.memory.kv_tokens,
            "host": 64 * GIB // each,
            "disk": 375 * GIB // each,
            "shared": 7680 * GIB // each,
        }


def test_ranks_of_a_latent_cache_keep_one_copy() -> None:
    """Ranks that only divide heads of an MLA model hold the same rows, which vLLM keeps once."""
    found = offloaded(R1, "H200-141GB", cpu="512Gi")
    assert found.layout.tensor == 1 or sizes(found)["host"] == int(512 * GIB / found.memory.bytes_per_token)

    together = offloaded(R1, "H200-141GB", cpu="512Gi", spec={"engine": {"tensorParallelSize": 8}})
    assert sizes(together)["host"] == int(512 * GIB / together.memory.bytes_per_token)


def test_data_parallel_ranks_divide_the_memory_of_a_pod() -> None:
    """Each rank has a region of its own in /dev/shm, and all of them together are what was asked for."""
    spec = {"engine": {"tensorParallelSize": 1, "dataParallelSize": 8}}
    found = offloaded(R1, "H200-141GB", spec=spec, cpu="512Gi")

    assert extra(found)["cpu_bytes_to_use"] == 64 * GIB
    assert found.pod.shm_bytes == 512 * GIB + 8 * GIB
    assert sizes(found)["host"] == int(512 * GIB / found.memory.bytes_per_token)
    assert chosen(found, "cpuBytesToUse") == 64 * GIB


def test_an_idle_conversation_stays_longer_in_each_slower_place() -> None:
    """The times grow with the sizes, are in the reasons, and halve where twice as many replicas write to the
    same claim."""
    times = []
    for replicas in (1, 2):
        found = offloaded(
            cpu="64Gi", disk="500Gi", shared=SHARED, spec={"workload": CHATS, "replicas": replicas}
        )
        seconds = {tier.medium: tier.idle_seconds for tier in found.tiers}
        assert list(seconds) == ["gpu", "host", "disk", "shared"]
        assert sorted(each or 0 for each in seconds.values()) == list(seconds.values())
        for medium, each in seconds.items():
            assert f"stays about {duration(each or 0)}" in reason(found, f"{medium}Tier")
        times.append(seconds)
    one, two = times

    assert two["host"] == one["host"]
    assert two["shared"] == pytest.approx((one["shared"] or 0) / 2)


def test_the_time_is_the_size_by_the_rate_of_new_tokens() -> None:
    """The rate of the plan: 8 requests at once, each with 2,000 new tokens, in the time that all of them take
    to be computed one by one and then decoded. Blocks of answers are written only if they are kept."""
    plain, whole = (
        offloaded(cpu="64Gi", generatedTokens=each, spec={"workload": CHATS})
        for each in ("Disabled", "Enabled")
    )
    first, second = (next(t for t in found.tiers if t.medium == "host") for found in (plain, whole))
    assert first.idle_seconds is not None
    assert second.idle_seconds is not None
    assert first.tokens == second.tokens
    assert second.idle_seconds == pytest.approx(first.idle_seconds * 2000 / 2500)
    gpu = plain.tiers[0]
    assert gpu.idle_seconds is not None
    rate = first.tokens / first.idle_seconds * 2500 / 2000
    assert gpu.idle_seconds == pytest.approx((gpu.tokens - 18_000 - 8 * 2500) / rate)


@pytest.mark.parametrize("missing", ["promptTokens", "outputTokens", "concurrency"])
def test_without_a_workload_the_plan_says_what_is_missing(missing: str) -> None:
    """A time that cannot be known is not stated; the reason names the fields that tell it."""
    hints = {key: value for key, value in CHATS.items() if key not in (missing, "sharedPrefixTokens")}
    found = offloaded(cpu="64Gi", spec={"workload": hints})

    assert [tier.idle_seconds for tier in found.tiers] == [None, None]
    assert "is not known: set spec.workload.promptTokens, outputTokens and concurrency" in reason(
        found, "hostTier"
    )
    assert all("idle_seconds" not in tier for tier in found.to_dict()["tiers"])


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(1, "1 seconds"), (119, "119 seconds"), (150, "2.5 minutes"), (3600, "60 minutes"), (7200, "2 hours"),
     (86_400 * 2.25, "2.2 days"), (86_400 * 40, "40 days")],
)  # fmt: skip
def test_durations_are_short(seconds: float, said: str) -> None:
    """A duration has two digits at most and the largest unit of which there are two."""
    assert duration(seconds) == said


def test_the_plan_says_from_which_speed_loading_pays() -> None:
    """Bytes of a token by the tokens that an engine computes in a second, however many GPUs it has."""
    one, two = (offloaded(cpu="64Gi", spec={"engine": {"tensorParallelSize": n}}) for n in (1, 2))
    speed = float(str(chosen(one, "loadingPaysFrom")).removesuffix(" GB/s"))
    computed = re.search(r"about ([\d,]+) tokens", reason(one, "loadingPaysFrom"))

    assert computed is not None
    assert speed == pytest.approx(int(computed[1].replace(",", "")) * 131_072 / 1e9, abs=0.06)
    assert float(str(chosen(two, "loadingPaysFrom")).removesuffix(" GB/s")) == pytest.approx(
        2 * speed, abs=0.2
    )


def test_memory_alone_needs_no_tiers() -> None:
    """Blocks in memory take vLLM's plain specification, with events that describe themselves."""
    found = offloaded(cpu="64Gi")

    assert transfer(found) == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 * GIB, "self_describing_kv_events": True},
    }
    assert found.env["PYTHONHASHSEED"] == "0"


def test_every_field_reaches_the_connector() -> None:
    """Policy, answers and both file tiers, the fastest first; files that outlive a pod are in the folder of
    their namespace."""
    found = offloaded(
        cpu="64Gi", disk="500Gi", hostPath="/mnt/kv", evictionPolicy="ARC", generatedTokens="Enabled",
        shared=SHARED | {"path": "chats"},
    )  # fmt: skip
    assert found.storage is not None
    name = found.storage.name

    assert extra(found) == {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 64 * GIB,
        "self_describing_kv_events": True,
        "offload_prompt_only": False,
        "eviction_policy": "arc",
        "secondary_tiers": [
            {"type": "fs", "root_dir": f"/kv/{name}", "enable_kv_events": True, "locality": "LOCAL"},
            {
                "type": "fs",
                "root_dir": f"/kv-shared/chats/{name}",
                "enable_kv_events": True,
                "locality": "REMOTE",
            },
        ],
    }


def test_without_a_picker_no_tier_reports() -> None:
    """Without a reader no events are published; vLLM would warn of tiers that report to no publisher."""
    found = offloaded(cpu="64Gi", disk="500Gi", spec={"picker": {"mode": "Off"}})

    assert "self_describing_kv_events" not in extra(found)
    assert extra(found)["secondary_tiers"][0]["enable_kv_events"] is False


def test_pools_without_offload_are_as_they_were() -> None:
    """No argument, variable, place or namespace appears, so that no engine is restarted."""
    found = plan(QWEN, "H100-80GB")

    assert found.tiers == ()
    assert found.storage is None
    assert "--kv-transfer-config" not in found.argv
    assert "PYTHONHASHSEED" not in found.env


def test_an_older_engine_gets_what_it_takes() -> None:
    """Memory is a size in GiB and the disk a tier without keys that older constructors do not have; the plan
    is unverified."""
    old = {"engine": {"image": "vllm/vllm-openai:v0.26.0"}}
    memory, disk = offloaded(spec=old, cpu="64Gi"), offloaded(spec=old, cpu="64Gi", disk="500Gi")

    assert memory.argv[memory.argv.index("--kv-offloading-size") + 1] == "64"
    assert extra(disk)["secondary_tiers"] == [{"type": "fs", "root_dir": "/kv"}]
    assert memory.doubts
    assert disk.doubts


@pytest.mark.parametrize(
    ("field", "offload"),
    [
        ("shared", {"cpu": "64Gi", "shared": SHARED}),
        ("hostPath", {"cpu": "64Gi", "disk": "1Ti", "hostPath": "/mnt/kv"}),
        ("evictionPolicy", {"cpu": "64Gi", "evictionPolicy": "ARC"}),
        ("generatedTokens", {"cpu": "64Gi", "generatedTokens": "Enabled"}),
        ("lmcache", {"lmcache": {"memory": "64Gi"}}),
    ],
)
def test_an_older_engine_is_refused_newer_fields(field: str, offload: dict[str, Any]) -> None:
    """The error names the field, the version and the remedy; an image without a version is not refused."""
    with pytest.raises(
        SpecError, match=rf"spec\.offload\.{field}: vLLM 0\.26 is older than 0\.30.*newer image"
    ):
        offloaded(spec={"engine": {"image": "vllm/vllm-openai:v0.26.0"}}, **offload)
    assert offloaded(spec={"engine": {"image": "acme/vllm:latest"}}, **offload).doubts


def test_a_backend_without_a_connector_is_refused() -> None:
    """vLLM does not start an engine that offloads with it; without offload it is as before."""
    spec = {"engine": {"attentionBackend": "ROCM_ATTN"}}
    with pytest.raises(SpecError, match=r"spec\.engine\.attentionBackend.*use TRITON_ATTN"):
        offloaded("Qwen/Qwen3-32B", "MI300X", spec=spec, cpu="64Gi")
    assert plan("Qwen/Qwen3-32B", "MI300X", **spec).argv


def test_rocm_offloads_with_the_backend_that_vllm_then_chooses() -> None:
    """The plan names the backend to which vLLM falls back."""
    assert chosen(plan("Qwen/Qwen3-32B", "MI300X"), "attentionBackend") == "ROCM_ATTN"
    assert (
        chosen(offloaded("Qwen/Qwen3-32B", "MI300X", cpu="64Gi"), "attentionBackend")
        == "ROCM_AITER_UNIFIED_ATTN"
    )


@pytest.mark.parametrize("field", ["disk", "shared"])
def test_files_of_an_engine_on_several_nodes_are_refused(field: str) -> None:
    """vLLM would write the memory of the first node alone; memory without files is taken, and data-parallel
    ranks that each fit a node are as well."""
    spec = {"engine": {"tensorParallelSize": 8, "pipelineParallelSize": 2}}
    given = {"disk": "1Ti"} if field == "disk" else {"shared": SHARED}
    with pytest.raises(SpecError, match=rf"spec\.offload\.{field}: an engine of this plan is on 2 nodes"):
        offloaded(R1, "H100-80GB", spec=spec, cpu="64Gi", **given)
    assert offloaded(R1, "H100-80GB", spec=spec, cpu="64Gi").nodes == 2


@pytest.mark.parametrize("lmcache", [{"memory": "100Gi"}, {"address": "lm.infra"}])
def test_lmcache_is_refused_beside_adapters(lmcache: dict[str, Any]) -> None:
    """LMCache's keys are the model's path, tokens and salt; vLLM's own tiers tell adapters apart."""
    spec = {"model": {"adapters": [{"name": "sql", "source": "hf://acme/sql-lora", "rank": 32}]}}
    with pytest.raises(SpecError, match=r"spec\.offload\.lmcache: .* adapters apart.*use cpu"):
        offloaded(spec=spec, lmcache=lmcache)
    assert offloaded(spec=spec, cpu="64Gi").argv


def test_lmcache_is_reached_on_the_node_or_where_it_is() -> None:
    """The operator's own server is a Service of the pool; an address gets its default scheme and port."""
    own, other = offloaded(lmcache={"memory": "100Gi"}), offloaded(lmcache={"address": "lm.infra"})

    assert transfer(own)["kv_connector"] == "LMCacheMPConnector"
    assert transfer(own)["kv_connector_module_path"] == "lmcache.integration.vllm.lmcache_mp_connector"
    times = {"lmcache.mp.heartbeat_interval": 3.0, "lmcache.mp.mq_timeout": 20.0}
    more = {"lmcache.mp.port": 5555, **times}
    host = str(extra(own)["lmcache.mp.host"])
    assert re.fullmatch(r"tcp://twig-lmcache-[0-9a-f]{6}\.forest\.svc", host)
    assert extra(own) == {"lmcache.mp.host": host, **more}
    assert extra(other) == {"lmcache.mp.host": "tcp://lm.infra", **more}
    assert own.env["LMCACHE_MP_TRANSFER_MODE"] == "engine_driven"
    assert sizes(own)["lmcache"] == 100 * GIB // 131_072
    assert "lmcache" not in sizes(other)
    assert "its size is not known" in reason(other, "lmcacheTier")
    assert any("the image needs LMCache" in doubt for doubt in own.doubts)


def test_several_connectors_are_combined() -> None:
    """One connector stays as it is; of several, the first is asked first."""
    first, second = connector("NixlConnector", {}), connector("OffloadingConnector", {"cpu_bytes_to_use": 1})

    assert combined(first) == first
    both = combined(first, second)
    assert both["kv_connector"] == "MultiConnector"
    assert both["kv_connector_extra_config"]["connectors"] == [first, second]


def storage(**spec: Any) -> str:
    """Return the namespace of a pool with a shared claim."""
    name, gpu = spec.pop("name", QWEN), spec.pop("gpu", "H100-80GB")
    offload = {"cpu": "64Gi", "shared": SHARED} | spec.pop("offload", {})
    found = plan(name, gpu, offload=offload, **spec).storage
    assert found is not None
    return found.name


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"revision": "abc"}},
        {"model": {"adapters": [{"name": "sql", "source": "hf://acme/sql"}]}},
        {"engine": {"kvCacheDtype": "Model"}},
        {"engine": {"attentionBackend": "TRITON_ATTN"}},
        {"engine": {"image": "vllm/vllm-openai:v0.32.0"}},
        {"engine": {"tensorParallelSize": 2}},
        {"engine": {"extraArgs": ["--block-size", "32"]}},
        {"engine": {"env": [{"name": "VLLM_USE_V2_MODEL_RUNNER", "value": "1"}]}},
        {"engine": {"env": [{"name": "PYTHONHASHSEED", "value": "7"}]}},
        {"engine": {"speculative": {"method": "NGram", "tokens": 2}}},
        {"offload": {"shared": SHARED | {"claim": "other"}}},
        {"offload": {"shared": SHARED | {"path": "other"}}},
        {"name": "Qwen/Qwen3-32B"},
    ],
)
def test_what_changes_blocks_changes_the_namespace(spec: dict[str, Any]) -> None:
    """Engines that would misread each other's blocks never share a folder."""
    assert storage(**spec) != storage()


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 5},
        {"gpu": "H200-141GB"},
        {"engine": {"maxNumSeqs": 64, "maxModelLen": 32_768}},
        {"engine": {"env": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}]}},
        {"offload": {"cpu": "32Gi", "disk": "1Ti", "shared": SHARED | {"size": "1Ti"}}},
        {"picker": {"mode": "Approximate"}},
    ],
)
def test_what_does_not_change_blocks_keeps_the_namespace(spec: dict[str, Any]) -> None:
    """Pools of the same model share although they differ in size."""
    assert storage(**spec) == storage()


@cache
def planned() -> Plan:
    """Return one plan with a shared claim."""
    return offloaded(cpu="1Gi", shared=SHARED)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=80))
def test_a_namespace_is_a_folder_and_a_label(location: str) -> None:
    """Whatever a model is called, its namespace is a valid label value without a slash."""
    own = pool(offload={"cpu": "1Gi", "shared": SHARED})
    own = replace(own, model=replace(own.model, location=location))
    version = EngineVersion(stated=(0, 33), flags=(0, 33), source="")
    kv = KvChoice(dtype="auto", flag=None, block=16, choices=())
    like = planned()
    found = storage_namespace(
        own, known(QWEN), like.hardware, like.layout, like.settings, kv, version, location
    )

    assert found is not None
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", found.name)


def test_blocks_that_outlive_an_unpinned_model_are_warned_of() -> None:
    """The warning names the field; a pinned revision and blocks that die with the pod have none."""
    kept = offloaded(cpu="64Gi", shared=SHARED)
    assert any("spec.model.revision is not set" in line for line in kept.warnings)
    for found in (
        offloaded(cpu="64Gi", disk="1Ti"),
        offloaded(cpu="64Gi", shared=SHARED, spec={"model": {"revision": "abc"}}),
    ):
        assert not any("spec.model.revision" in line for line in found.warnings)
