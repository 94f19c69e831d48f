"""The operator's command lines, and its table of flags, against vLLM's own parser."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from tests.crd.cases import planned
from tests.engine import flags, random_flags
from tests.operator import golden
from tests.operator.manifested import resource
from tests.operator.sweep import argument_lists

from kvist_operator.engine_version import engine_version
from kvist_operator.errors import SpecError
from kvist_operator.extra_args import read_extra
from kvist_operator.flag_table import VERSIONS, dotted
from kvist_operator.plan.engine_args import LEADER, RANK

PARSE = (
    flags.BUILD
    + """
import argparse, json, sys
from vllm.v1.attention.backends.registry import AttentionBackendEnum

parser = vllm_parser()
given = json.load(sys.stdin)

def parsed(line):
    try:
        found = vars(parser.parse_args(line))
        if found["attention_backend"]:
            AttentionBackendEnum[found["attention_backend"].upper()]
    except (SystemExit, ValueError, KeyError, IndexError):
        return None
    return {name: found.get(name) for name in given["names"]}

print("FOUND" + json.dumps([parsed(line) for line in given["lines"]]))
"""
)
NAMES = (
    "served_model_name",
    "runner",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "prefix_caching_hash_algo",
    "shutdown_timeout",
    "enable_prompt_tokens_details",
)
"""What is compared, by vLLM's names of its arguments."""
RANDOM = 1500
"""Number of random lines for each version."""
LINES = [
    ["--seed", "1"],
    ["--seed", "-1"],
    ["--seed", "x"],
    ["--seed", "1", "2"],
    ["--seed"],
    ["--seed", "--enforce-eager"],
    ["--seed=1"],
    ["--seed 1"],
    ["--seed", "None"],
    ["--prefix-match-unit", "None"],
    ["--enforce-eager"],
    ["--enforce_eager"],
    ["--no-enforce-eager"],
    ["--disable-enforce-eager"],
    ["--enforce-eager=true"],
    ["--enforce-eager", "true"],
    ["--enforce-ea"],
    ["--disable-lora"],
    ["--disable-async-scheduling"],
    ["--no-disable-sliding-window"],
    ["--disable-log-requests"],
    ["stray"],
    ["--no-such-flag"],
    ["--enable-log"],
    ["-O3"],
    ["-O"],
    ["-O", "3"],
    ["-cc.mode=3"],
    ["-cc.mode", "3"],
    ["-cc", "{}"],
    ["-cc", "{mode: 3}"],
    ["-xyz"],
    ["-ep"],
    ["-asc", "2"],
    ["--dtype", "bf16"],
    ["--dtype", "bfloat16"],
    ["--dtype", "BFLOAT16"],
    ["--moe-backend", "DEEP-GEMM"],
    ["--moe-backend", "deep"],
    ["--log-level", "INFO"],
    ["--mamba-cache-mode", "all"],
    ["--cudagraph-capture-sizes", "1", "2"],
    ["--cudagraph-capture-sizes", "1", "b"],
    ["--cudagraph-capture-sizes"],
    ["--middleware", "a", "--middleware", "b"],
    ["--hf-overrides", '{"a": 1}'],
    ["--hf-overrides.a.b", "1"],
    ["--hf-overrides", "text"],
    ["--additional-config", "text"],
    ["--kv-transfer-config", "text"],
    ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'],
    ["--max-num-queued-tokens", "8k"],
    ["--max-num-queued-tokens", "8kb"],
    ["--cpu-offload-gb", "4Gi"],
    ["--cpu-offload-gb", "4"],
    ["--watchdog-config", "{}"],
    ["--enable-mamba-fine-grained-prefix-cache"],
    ["--custom-histogram-buckets", "{}"],
    ["--video-pruning-rate", ".5"],
    ["--allowed-origins", '["*"]'],
    ["--swap-space", "4"],
    ["--calculate-kv-scales"],
]
"""Words of users, good and bad."""


@dataclass(frozen=True)
class Parsed:
    """Results of one version's parser: the values that it read, None for a line that it refused."""

    plans: dict[str, dict[str, Any] | None]
    sweep: list[dict[str, Any] | None]
    lines: list[tuple[list[str], bool]]
    """Words of users, and whether they are accepted."""


def command(case: str) -> list[str]:
    """The arguments of a golden plan after ``serve``, with the variables Kubernetes would fill in."""
    filled = {RANK: "0", LEADER: "127.0.0.1"}
    return [filled.get(word, word) for word in golden.kept(case)["args"][1:]]


CASES = sorted(case for case in golden.CASES if golden.kept(case)["args"])
KNOWN = list(map(dotted, VERSIONS))
"""All versions whose parsers are read; their packages are downloaded once, 1.7 GB."""


@pytest.fixture(scope="module", params=KNOWN)
def parser(request: pytest.FixtureRequest) -> tuple[str, Parsed]:
    """Every golden plan, every plan of the sweep and LINES, read by the real parser of one version."""
    major, minor = request.param.split(".")
    users = [*LINES, *random_flags.lines((int(major), int(minor)), RANDOM)]
    lists = [*map(command, CASES), *argument_lists(), *(["m", *line] for line in users)]
    found = flags.run(request.param, PARSE, {"names": NAMES, "lines": lists})
    plans = dict(zip(CASES, found, strict=False))
    accepted = [each is not None for each in found[-len(users) :]]
    sweep = found[len(CASES) : -len(users)]
    return request.param, Parsed(plans, sweep, list(zip(users, accepted, strict=True)))


@pytest.mark.timeout(900)
def test_vllm_reads_a_plan_as_it_was_meant(parser: tuple[str, Parsed]) -> None:
    """vLLM parses a plan's arguments, and each value arrives."""
    for case in CASES:
        plan, found = golden.made(case), parser[1].plans[case]

        assert found is not None
        assert found["served_model_name"] == ["twig"]
        assert [found[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline", "data")] == [
            plan.layout.tensor,
            plan.layout.pipeline,
            plan.layout.data,
        ]
        assert bool(found["enable_expert_parallel"]) == plan.layout.expert
        assert found["runner"] == ("pooling" if plan.settings.pooling else "auto")
        assert [found["max_model_len"], found["max_num_seqs"], found["max_num_batched_tokens"]] == [
            plan.settings.max_len if "--max-model-len" in plan.argv else None,
            plan.settings.sequences,
            plan.settings.batched_tokens,
        ]
        assert found["gpu_memory_utilization"] == plan.settings.share / 100
        left_to_vllm = plan.settings.pooling and "--no-enable-prefix-caching" not in plan.argv
        assert found["enable_prefix_caching"] == (None if left_to_vllm else plan.settings.prefix_caching)
        assert found["shutdown_timeout"] == plan.pod.drain_seconds


@pytest.mark.timeout(900)
def test_every_plan_of_the_sweep_is_accepted(parser: tuple[str, Parsed]) -> None:
    """The arguments for every model of the catalogue on every accelerator are accepted by vLLM."""
    lists = argument_lists()
    refused = [line for line, found in zip(lists, parser[1].sweep, strict=True) if found is None]

    assert refused == []
    assert len(lists) > 500


STREAMS = (
    flags.BUILD
    + """
import json, sys
from vllm.transformers_utils.runai_utils import is_runai_obj_uri

parser, rows = vllm_parser(), []
for line in json.load(sys.stdin):
    found = vars(parser.parse_args(line))
    model = found["model_tag"] if "model_tag" in found else found["model"]
    rows.append([model, is_runai_obj_uri(model), found["load_format"]])
print("FOUND" + json.dumps(rows))
"""
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", KNOWN)
def test_vllm_streams_from_a_bucket(version: str) -> None:
    """The address is one of an object store for vLLM, and the loader is one that it has."""
    sources = ["s3://models/llama/3.3-70b", "gs://models/llama/3.3-70b"]
    pools = [resource("bucket") for _ in sources]
    for pool, source in zip(pools, sources, strict=True):
        pool["spec"]["model"]["source"] = source
    found = flags.run(version, STREAMS, [list(planned(pool).argv[1:]) for pool in pools])

    assert found == [[source, True, "runai_streamer"] for source in sources]


@pytest.mark.timeout(900)
def test_extra_arguments_are_judged_as_vllm_does(parser: tuple[str, Parsed]) -> None:
    """Words that are no secret and no flag of the plan are accepted exactly if vLLM's parser accepts them."""
    version, found = parser
    wrong = [(line, taken) for line, taken in found.lines if _accepted(line, version) != taken]

    assert wrong == []
    assert len(found.lines) > 1000
    assert 0.3 < sum(taken for _, taken in found.lines) / len(found.lines) < 0.9


def _accepted(line: list[str], version: str) -> bool:
    try:
        read_extra(line, engine_version("vllm/vllm-openai:latest", version))
    except SpecError:
        return False
    return True


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", KNOWN)
def test_the_table_of_flags_is_vllm_s(version: str) -> None:
    """The table has every flag of vLLM's parser, of the same kind and with the same choices."""
    kept = json.loads(flags.FILE.read_text())["flags"]
    ours = {
        name: {key: value for key, value in row.items() if key not in ("first", "last")}
        for name, rows in kept.items()
        for row in rows
        if row["first"] <= version <= row["last"]
    }

    assert ours == flags.run(version, flags.DUMP)
