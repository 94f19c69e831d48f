"""Tests of the picker's settings: flags, environment variables, bounds and flags that exclude each other."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.errors import SettingsError
from kvist_epp.settings.settings import TRANSPORTS, Settings
from kvist_epp.settings.validation import parse_base_models

SETTINGS = st.builds(
    Settings,
    endpoints_file=st.text(st.characters(codec="ascii", min_codepoint=33), max_size=20),
    model=st.sampled_from(["", "./a model", "hf://org/repo@main"]),
    grpc_port=st.integers(0, 65_535),
    secure_serving=st.booleans(),
    transport=st.sampled_from(TRANSPORTS),
    scrape_interval=st.floats(0.001, 1e6),
    max_num_seqs=st.integers(1, 1 << 20),
    log_format=st.sampled_from(["auto", "json", "text"]),
    debug_text=st.booleans(),
)


@given(SETTINGS)
def test_settings_survive_the_command_line(settings: Settings) -> None:
    """Arguments rendered from settings give the same settings back."""
    assert Settings.from_args(settings.to_args()) == settings


def test_every_flag_can_come_from_the_environment() -> None:
    """Each flag is also read from KVIST_EPP_<FLAG>, and the command line wins over it."""
    environment = {
        "KVIST_EPP_GRPC_PORT": "1234",
        "KVIST_EPP_SECURE_SERVING": "false",
        "KVIST_EPP_MODEL": "/m",
    }
    settings = Settings.from_args(["--model=./other"], environment)
    assert settings == Settings(grpc_port=1234, secure_serving=False, model="./other")


def test_a_bare_boolean_flag_means_true() -> None:
    """``--debug-text`` alone turns it on, as operators of Go programs expect."""
    assert Settings.from_args(["--debug-text"]).debug_text is True


@pytest.mark.parametrize(
    ("argv", "flag"),
    [(["--grpc-port=70000"], "--grpc-port"), (["--scrape-interval=0"], "--scrape-interval")],
)
def test_a_bad_value_names_its_flag(argv: list[str], flag: str) -> None:
    """A value out of range is refused with the name of the flag."""
    with pytest.raises(SettingsError, match=flag):
        Settings.from_args(argv)


def test_a_bad_variable_names_itself() -> None:
    """A variable that cannot be read is refused by its own name."""
    with pytest.raises(SettingsError, match="KVIST_EPP_GRPC_PORT"):
        Settings.from_args([], {"KVIST_EPP_GRPC_PORT": "many"})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--secure-serving=false", "--cert-path=f"], "--cert-path"),
        (["--secure-serving=false", "--client-ca-path=f"], "--client-ca-path"),
        (["--cert-path=f", "--tls-names=n"], "--tls-names"),
        (["--tls-min-version=1.3", "--transport=grpc"], "--tls-min-version"),
    ],
)
def test_tls_flags_that_do_not_go_together(flags: list[str], named: str) -> None:
    """A flag that would change nothing, or that a transport cannot keep, is refused by its name."""
    with pytest.raises(SettingsError, match=f"^{named}: "):
        Settings.from_args(["--endpoints-file=f", *flags]).check()


def test_tls_is_the_default() -> None:
    """Without a flag the picker serves TLS, with a certificate of its own."""
    assert Settings(endpoints_file="f").check().secure_serving


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("30s", 30), ("1m30s", 90), ("1.5h", 5400), ("250ms", 0.25), ("0", 0), ("2.5", 2.5)],
)
def test_times_are_seconds_or_what_go_programs_take(text: str, seconds: float) -> None:
    """llm-d's ``--drain-timeout=1m30s`` works, on the command line and as a variable."""
    assert Settings.from_args([f"--drain-timeout={text}"]).drain_timeout == seconds
    assert Settings.from_args([], {"KVIST_EPP_DRAIN_TIMEOUT": text}).drain_timeout == seconds


@pytest.mark.parametrize("text", ["", "s", "1m30", "30 s", "1d", "m30s", "1m 30s", "nan", "-5s", "1e400"])
def test_times_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Anything else is refused with the name of the flag."""
    with pytest.raises((SettingsError, SystemExit)) as refused:
        Settings.from_args([f"--drain-timeout={text}"])
    assert "--drain-timeout" in f"{refused.value}{capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({}, ["--endpoints-file", "--endpoint-selector", "--pool-name"]),
        ({"endpoints_file": "f", "pool_name": "p"}, ["--endpoints-file and --pool-name", "only one"]),
        ({"pool_name": "p", "endpoint_selector": "a=b"}, ["--endpoint-selector and --pool-name"]),
        ({"endpoint_selector": "a=b"}, ["--endpoint-selector and --endpoint-target-ports"]),
        (
            {"pool_name": "p", "endpoint_target_ports": "1"},
            ["--endpoint-selector and --endpoint-target-ports"],
        ),
        ({"endpoints_file": "f", "pool_namespace": "n"}, ["--pool-namespace", "--endpoints-file"]),
        ({"endpoints_file": "f", "pool_group": "kvist.dev"}, ["--pool-group", "--pool-name"]),
    ],
)
def test_one_source_says_where_the_engines_are(flags: dict[str, str], named: list[str]) -> None:
    """None, two, or flags of another source are refused by the flags' names."""
    with pytest.raises(SettingsError) as refused:
        Settings(secure_serving=False, **flags).check()  # type: ignore[arg-type]
    assert [name for name in named if name not in str(refused.value)] == []


@pytest.mark.parametrize(
    "flags",
    [
        {"endpoints_file": "f"},
        {"pool_name": "p", "pool_namespace": "n", "pool_group": "kvist.dev"},
        {"endpoint_selector": "a in (b,c),!d", "endpoint_target_ports": "8000,8001", "pool_namespace": "n"},
    ],
)
def test_each_source_alone_will_do(flags: dict[str, str]) -> None:
    """A file, a selector with ports, or a pool is enough alone, and survives the command line."""
    settings = Settings(secure_serving=False, **flags)  # type: ignore[arg-type]
    assert settings.check() == Settings.from_args(settings.to_args())


@pytest.mark.parametrize("text", ["0", "65536", "a", "1,,2", "1, 2", "1,2,3,4,5,6,7,8,9", "٣", "-1"])
def test_target_ports_are_ports(text: str) -> None:
    """One to eight ports, separated by commas and nothing else; anything else is refused by its flag."""
    with pytest.raises(SettingsError, match="--endpoint-target-ports"):
        Settings(endpoint_target_ports=text)


def test_a_target_port_counts_once() -> None:
    """A repeated port is kept once, at its first position."""
    assert Settings(endpoint_target_ports="8001,8000,8001").target_ports == (8001, 8000)


def test_every_setting_has_a_help_text() -> None:
    """No flag is undocumented."""
    assert [f.name for f in dataclasses.fields(Settings) if not f.metadata["help"]] == []


def test_a_flag_on_the_command_line_hides_its_variable() -> None:
    """An invalid variable is ignored if the command line gives the flag, and so is an empty one."""
    environment = {"KVIST_EPP_GRPC_PORT": "many", "KVIST_EPP_METRICS_PORT": ""}
    assert Settings.from_args(["--grpc-port=1"], environment) == Settings(grpc_port=1)


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_times_are_numbers(text: str) -> None:
    """Neither nan nor infinity is a time."""
    with pytest.raises(SettingsError, match="--scrape-interval"):
        Settings.from_args([f"--scrape-interval={text}"])


@pytest.mark.parametrize(
    ("flag", "match"),
    [
        ("--max-backlog-seconds=0", "--max-backlog-seconds"),
        ("--queue-requests=-1", "--queue-requests"),
        ("--queue-bytes=-1", "--queue-bytes"),
        ("--queue-seconds=-1s", "--queue-seconds"),
        ("--empty-pool-seconds=-1", "--empty-pool-seconds"),
        ("--priorities=high", "--priorities: 'high'"),
    ],
)
def test_bounds_of_the_queue_are_checked(flag: str, match: str) -> None:
    """An invalid bound is refused with the name of its flag; 0 requests, bytes or seconds are valid."""
    with pytest.raises(SettingsError, match=match):
        Settings.from_args([flag])
    Settings(queue_requests=0, queue_bytes=0, queue_seconds=0, empty_pool_seconds=0)


def test_queue_times_stay_below_the_stream_idle_timeout() -> None:
    """The sum of both queue times must be less than --stream-idle-timeout, which would end the requests."""
    source = {"secure_serving": False, "endpoints_file": "x"}
    with pytest.raises(SettingsError, match="--stream-idle-timeout"):
        Settings(**source, queue_seconds=3420, empty_pool_seconds=180).check()  # type: ignore[arg-type]
    Settings(**source, queue_seconds=3419, empty_pool_seconds=180).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--role=model-header", "--model=m"], "--model: no effect with --role=model-header"),
        (
            ["--role=model-header", "--pool-name=p", "--queue-seconds=1"],
            "--pool-name, --queue-seconds: no effect",
        ),
        (["--endpoints-file=f", "--base-models=a=b"], "--base-models: no effect with --role=picker"),
        (["--role=model-header", "--base-models=a"], "--base-models: 'a' is not ADAPTER=BASE"),
        (
            ["--role=model-header", "--base-models=a=b,a=c"],
            "--base-models: 'a' has two different base models",
        ),
        (["--role=model-header", "--secure-serving=false", "--cert-path=f"], "--cert-path: "),
    ],
)
def test_flags_that_a_role_does_not_have(flags: list[str], named: str) -> None:
    """A flag that would change nothing in this role is refused, with the names of both."""
    with pytest.raises(SettingsError, match=f"^{named}"):
        Settings.from_args(flags).check()


def test_the_role_needs_no_engines() -> None:
    """``--role=model-header`` starts by itself, and takes the flags of ports, limits, TLS and log."""
    flags = ["--role=model-header", "--base-models= a=b, c=b,", "--transport=grpc", "--max-streams=7"]
    settings = Settings.from_args(flags).check()
    assert Settings.from_args(settings.to_args()) == settings
    assert parse_base_models(settings.base_models) == {"a": "b", "c": "b"}


OLD_NAMES = [
    ("--peers=a:1", "--replicas=a:1", "KVIST_EPP_PEERS", "KVIST_EPP_REPLICAS", "a:1"),
    (
        "--hand-over-tokens=7",
        "--prewarm-tokens=7",
        "KVIST_EPP_HAND_OVER_TOKENS",
        "KVIST_EPP_PREWARM_TOKENS",
        "7",
    ),
    (
        "--max-owed-seconds=1m",
        "--max-backlog-seconds=1m",
        "KVIST_EPP_MAX_OWED_SECONDS",
        "KVIST_EPP_MAX_BACKLOG_SECONDS",
        "1m",
    ),
]


@pytest.mark.parametrize(("old", "new", "old_variable", "new_variable", "value"), OLD_NAMES)
def test_old_names_of_flags_still_work(
    old: str, new: str, old_variable: str, new_variable: str, value: str
) -> None:
    """The old and the new name of a flag set the same field, and so do their environment variables."""
    expected = Settings.from_args([new])
    assert expected != Settings()
    assert Settings.from_args([old]) == expected
    assert Settings.from_args([], {old_variable: value}) == expected
    assert Settings.from_args([], {new_variable: value, old_variable: "ignored"}) == expected
    assert Settings.from_args([old], {new_variable: "ignored"}) == expected
    assert Settings.from_args([new], {old_variable: "ignored"}) == expected


def test_arguments_are_written_for_older_pickers() -> None:
    """``to_args`` writes the old names, because pickers of earlier releases know no others."""
    settings = Settings(replicas="a:1", replica_insecure=True, prewarm_tokens=0, max_backlog_seconds=1)
    written = {word.partition("=")[0] for word in settings.to_args()}
    assert written == {"--peers", "--peer-insecure", "--hand-over-tokens", "--max-owed-seconds"}
    assert Settings.from_args(settings.to_args()) == settings


def test_old_names_of_flags_are_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    """The help shows each flag by its present name only."""
    with pytest.raises(SystemExit):
        Settings.from_args(["--help"])
    text = capsys.readouterr().out
    fields = dataclasses.fields(Settings)
    assert [f.name for f in fields if f"{f.metadata['flag']} " not in text] == []
    assert [f.name for f in fields if (old := f.metadata["old_flag"]) and f"{old} " in text] == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--endpoints-file=e.json"], 3),
        (["--pool-name=p"], 1),
        (["--pool-name=p", "--pool-group=kvist.dev"], 3),
        (["--pool-name=p", "--max-endpoints=4"], 4),
        (["--endpoints-file=e.json", "--max-endpoints=1"], 1),
    ],
)
def test_endpoints_of_an_answer(flags: list[str], named: int) -> None:
    """Without a number, a pool of the Gateway API Inference Extension gets one: most of its gateways take no
    list."""
    assert Settings.from_args(flags).endpoints_per_answer == named
