"""vLLM's command line: what it accepts starts the simulator, what it refuses is refused with the same
message."""

import json
from pathlib import Path

import pytest

from kvist_epp.errors import SettingsError
from kvist_sim.engine import args, flags


def read(*argv: str, **environ: str) -> args.Settings:
    """Settings of a command line, in an otherwise empty environment."""
    return args.read(argv, environ)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The message of a command line that must end with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        read(*argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_table_is_complete_and_plain() -> None:
    """Every row has dashes, a known kind and a default among its choices; no flag is listed twice."""
    rows = flags.table()
    spelled = [name for row in rows for name in row.names]

    assert len(rows) > 300
    assert len(spelled) == len(set(spelled))
    assert all(name.startswith("-") and "_" not in name for name in spelled)
    assert {row.since for row in rows} == {"0.32", "0.33"}
    assert [row for row in rows if row.choices and row.default and str(row.default) not in row.choices] == []


CHOICES = [(row.names[0], choice) for row in flags.table() for choice in row.choices if row.kind != "lower"]


def test_every_choice_is_accepted() -> None:
    """Every value that the table lists for a flag is accepted."""
    parser = flags.parser()
    found = [getattr(parser.read([name, value]), name[2:].replace("-", "_")) for name, value in CHOICES]

    assert [one[0] if isinstance(one, list) else str(one) for one in found] == [value for _, value in CHOICES]


GONE = {
    "--swap-space 4": "unrecognized arguments: --swap-space 4",
    "--speculative-model x": "unrecognized arguments: --speculative-model x",
    "--preemption-mode recompute": "unrecognized arguments: --preemption-mode recompute",
    "--rope-scaling {}": "unrecognized arguments: --rope-scaling {}",
    "--rope-theta 1": "unrecognized arguments: --rope-theta 1",
    "--calculate-kv-scales": "unrecognized arguments: --calculate-kv-scales",
    "--cache-eviction-policy lru": "unrecognized arguments: --cache-eviction-policy lru",
    "--num-scheduler-steps 8": "unrecognized arguments: --num-scheduler-steps 8",
    "--max-num-partial-prefills 2": "unrecognized arguments: --max-num-partial-prefills 2",
    "--disable-log-requests": "unrecognized arguments: --disable-log-requests",
    "--kv-cache-dtype int8": "argument --kv-cache-dtype: invalid choice: 'int8' (choose from 'auto', ",
    "--kv-cache-dtype offload": "argument --kv-cache-dtype: invalid choice: 'offload'",
    "--max-lora-rank 24": "argument --max-lora-rank: invalid choice: 24",
    "--max-num-seqs many": "argument --max-num-seqs: invalid int value: 'many'",
    "--max-num 3": "ambiguous option: --max-num could match ",
    "--port": "argument --port: expected one argument",
    "--kv-events-config nope": "argument --kv-events-config: invalid JSON object value: 'nope'",
    '--kv-events-config {"bogus":1}': "argument --kv-events-config: 1 validation error",
    '--kv-events-config {"buffer_steps":"x"}': "argument --kv-events-config: 1 validation error",
    '--kv-events-config {"publisher":"kafka"}': "argument --kv-events-config: 1 validation error",
    "--lora-modules {x": "Invalid JSON format for --lora-modules: {x",
}


@pytest.mark.parametrize("line", GONE)
def test_what_vllm_lacks_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Removed flags, misspelt values and unknown choices end with argparse's message and exit code 2."""
    assert f"error: {GONE[line]}" in refused(capsys, "m", *line.split(" "))


def test_vllm_spellings() -> None:
    """Underscores, =, unique prefixes, short names, human numbers and negations mean what they mean in
    vLLM."""
    found = read(
        "serve",
        *("org/model", "--max_num_batched_tokens=64k", "--max-model-len", "8K", "--gpu-memory-util", "0.5"),
        *("--no-enable-prefix-caching", "-dp", "2", "-O3", "--served-model-name", "a", "b", "--port=0"),
    )

    assert (found.model, found.served, found.port) == ("org/model", ("a", "b"), 0)
    assert (found.max_num_batched_tokens, found.max_model_len) == (64_000, 8_192)
    assert (found.prefix_caching, found.ranks) == (False, (0, 1))
    assert found.cache_info["gpu_memory_utilization"] == "0.5"


def test_model_by_flag_or_not_at_all() -> None:
    """--model works as with the old entry point; without a model there is the simulator's own."""
    assert read("--model", "x").model == "x"
    assert read().model == "kvist-sim"
    assert read("y").served == ("y",)


EVENTS = args.KvEvents(
    True, endpoint="tcp://*:7", replay_endpoint="tcp://*:9", topic="kv", buffer_steps=64_000
)


def test_events_as_json_or_dotted() -> None:
    """--kv-events-config takes JSON, dotted keys, or both forms of human numbers in the latter."""
    whole = {"enable_kv_cache_events": True, "endpoint": "tcp://*:7", "replay_endpoint": "tcp://*:9"}
    rest = {"topic": "kv", "buffer_steps": 64_000}
    dotted = [
        *("--kv-events-config.enable_kv_cache_events", "true", "--kv-events-config.endpoint=tcp://*:7"),
        *("--kv_events_config.replay_endpoint", "tcp://*:9", "--kv-events-config.topic", "kv"),
        *("--kv-events-config.buffer_steps", "64k"),
    ]

    assert read("m", "--kv-events-config", json.dumps(whole | rest)).events == EVENTS
    assert read("m", *dotted).events == EVENTS
    assert EVENTS.on
    assert not read("m", "--kv-events-config", json.dumps(whole | {"publisher": "null"})).events.on
    assert not read("m").events.on


def test_nested_and_list_keys() -> None:
    """Dots nest and + appends, in any JSON flag."""
    found = flags.parser().read(["m", "-cc.a.b", "1", "-cc.a.c=x", "--compilation-config.d+", "p,q"])

    assert found.compilation_config == {"d": ["p", "q"]}
    assert flags.parser().read(["m", "-cc.a.b", "1", "-cc.a.c=x"]).compilation_config == {
        "a": {"b": 1, "c": "x"}
    }


def test_config_file(tmp_path: Path) -> None:
    """--config FILE: its flags count, and the command line wins."""
    file = tmp_path / "engine.yaml"
    file.write_text(
        "max-num-seqs: 7\nport: 1\nenable-prefix-caching: false\nserved-model-name: [p, q]\n"
        "kv-events-config: {enable_kv_cache_events: true}\n"
    )
    found = read("serve", "m", "--config", str(file), "--port", "0")

    assert (found.model, found.max_num_seqs, found.port, found.prefix_caching) == ("m", 7, 0, False)
    assert (found.served, found.events.on) == (("p", "q"), True)


def test_adapters() -> None:
    """--lora-modules takes name=path and JSON."""
    given = [
        "m",
        "--enable-lora",
        "--max-lora-rank",
        "64",
        "--lora-modules",
        "a=/x",
        '{"name": "b", "path": "/y"}',
    ]

    assert read(*given).lora == {"a": "/x", "b": "/y"}


def test_defaults_are_an_h100s() -> None:
    """The derived defaults are those of vLLM for a device of 80 GB; half the bytes per token double the
    cache."""
    plain, narrow = read("m"), read("m", "--kv-cache-dtype", "fp8", "--performance-mode", "throughput")

    assert (plain.max_num_seqs, plain.max_num_batched_tokens, plain.block_size, plain.blocks) == (
        *(1_024, 8_192),
        *(16, 15_625),
    )
    assert (narrow.max_num_seqs, narrow.max_num_batched_tokens, narrow.blocks) == (2_048, 16_384, 31_250)
    assert read("m", "--kv-cache-memory-bytes", "1G").blocks == 256
    assert (
        read("m", "--num-gpu-blocks-override", "20", "--block-size", "32").cache_info["num_gpu_blocks"]
        == "20"
    )


WRONG = {
    "--max-num-seqs 64 --max-num-batched-tokens 32": r"max_num_batched_tokens \(32\) must be greater",
    "--gpu-memory-utilization 1.5": "--gpu-memory-utilization",
    "--block-size -1": "--block-size",
    "--num-gpu-blocks-override 1": "cache blocks",
    "--data-parallel-size 0": "--data-parallel-size",
    "--lora-modules a=b": "--enable-lora",
    "--sim-time-scale 0": "--sim-time-scale",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_does_not_go_together(line: str) -> None:
    """Values that vLLM's configuration classes refuse name the flag."""
    with pytest.raises(SettingsError, match=WRONG[line]):
        read("m", *line.split())


def test_own_flags_and_environment() -> None:
    """Everything of the simulator's own begins with --sim-; vLLM's environment variables count."""
    scaled = read(
        "m", "--sim-time-scale", "10", "--sim-step-seconds", "0.02", "--sim-noncanonical-percent", "5"
    )
    own = {name for name in args.parser()._option_string_actions if name.startswith("--sim")}

    assert (scaled.timing.step_seconds, scaled.noncanonical) == (0.002, 0.05)
    assert own & {name for row in flags.table() for name in row.names} == set()
    found = read("m", VLLM_SERVER_DEV_MODE="1", PYTHONHASHSEED="3", VLLM_API_KEY="k")
    assert (found.dev_mode, found.hash_seed, found.api_keys) == (True, "3", ("k",))


@pytest.mark.parametrize(
    ("text", "value"), [("64k", 64_000), ("64K", 65_536), ("1.5m", 1_500_000), ("2G", 2**31), ("7", 7)]
)
def test_human_numbers(text: str, value: int) -> None:
    """Small letters are decimal, capitals binary."""
    assert flags.human(text) == value


def test_decimals_are_not_binary() -> None:
    """1.5K is refused, as by vLLM."""
    with pytest.raises(ValueError, match=r"1\.5"):
        flags.human("1.5K")
