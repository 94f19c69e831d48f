"""The simulator's table of flags against vLLM's own parser."""

import json
import os
import subprocess
from typing import Any

import pytest
from tests.engine import install

from kvist_epp.errors import SettingsError
from kvist_sim.engine import args, flags

DUMP = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
rows = {}
for action in parser._actions:
    names = action.option_strings
    if names and "--help" not in names:
        negated = type(action).__name__ == "BooleanOptionalAction"
        key = ",".join(name for name in names if not (negated and name.startswith("--no-")))
        choices = sorted(str(choice) for choice in action.choices or () if choice is not None)
        rows[key] = [action.nargs == 0, negated, action.nargs == "+", choices]

def accepts(line):
    try:
        parser.parse_args(["m", *line])
    except SystemExit:
        return False
    return True

print("FOUND" + json.dumps([rows, [accepts(line) for line in json.load(sys.stdin)]]))
"""

LINES = [
    ["--max_model_len", "64K"],
    ["--max-num-seqs", "many"],
    ["--gpu-memory-util", "0.5"],
    ["--max-num", "3"],
    ["--no-enable-prefix-caching"],
    ["--disable-prefix-caching"],
    ["--disable-log-requests"],
    ["--swap-space", "4"],
    ["--speculative-model", "x"],
    ["--preemption-mode", "recompute"],
    ["--rope-scaling", "{}"],
    ["--calculate-kv-scales"],
    ["--kv-cache-dtype", "int8"],
    ["--kv-cache-dtype", "fp8_e5m2"],
    ["--kv-events-config.enable_kv_cache_events", "true", "--kv-events-config.topic=x"],
    ["--kv-events-config", '{"enable_kv_cache_events": true, "bogus": 1}'],
    ["--kv-events-config", "nope"],
    ["--compilation-config.mode", "3", "-O2", "-tp", "2"],
    ["--lora-modules", "a=/x", '{"name": "b", "path": "/y"}'],
    ["--max-lora-rank", "24"],
    ["--max-lora-rank", "32", "--moe-backend", "DeepGEMM", "--kv-cache-dtype-skip-layers", "1", "2"],
    ["--safetensors-load-strategy", "None"],
    ["--num-gpu-blocks-override", ""],
    ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'],
    ["--hf-overrides", '{"rope_parameters": {}}'],
    ["--watermark", "0.1", "--api-key", "a", "b"],
    ["--port"],
]


@pytest.fixture(scope="module")
def vllm() -> tuple[dict[str, list[Any]], list[bool]]:
    """Rows of the real parser, and which of LINES it accepts."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    ran = subprocess.run(
        [str(install.install()), "-c", DUMP],
        input=json.dumps(LINES),
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    rows, accepted = json.loads(ran.stdout.rpartition("FOUND")[2])
    return rows, accepted


@pytest.mark.timeout(900)
def test_table_is_vllms(vllm: tuple[dict[str, list[Any]], list[bool]]) -> None:
    """Same names, same shapes and same choices, but for the rows and values new in 0.33."""
    ours = {",".join(row.names): _shape(row) for row in flags.table() if row.since == "0.32"}

    assert ours == vllm[0]


@pytest.mark.timeout(900)
def test_same_lines_are_refused(vllm: tuple[dict[str, list[Any]], list[bool]]) -> None:
    """Our parser accepts what vLLM's parser accepts, and refuses what it refuses."""
    assert dict(zip(map(str, LINES), map(_accepts, LINES), strict=True)) == dict(
        zip(map(str, LINES), vllm[1], strict=True)
    )


def _shape(row: flags.Flag) -> list[Any]:
    choices = sorted(choice for choice in row.choices if not choice.startswith("octave_"))
    return [row.kind in {"bool", "switch"}, row.kind == "bool", _many(row.kind), choices]


def _many(kind: str) -> bool:
    return kind.endswith("-list") or kind == "lora"


def _accepts(line: list[str]) -> bool:
    try:
        args.read(["m", *line], {})
    except SystemExit:
        return False
    except SettingsError:
        return True  # the parser took it; a configuration class refuses later, as in vLLM
    return True
