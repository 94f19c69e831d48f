"""The picker where llm-d's router was: its flags, and its configuration file."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.__main__ import main
from kvist_epp.compat.llmd import translated
from kvist_epp.endpoints.endpoints_file import parse_endpoints
from kvist_epp.errors import SettingsError
from kvist_epp.settings.settings import Settings

FILE = Path(__file__).with_name("config.yaml")
KEYS = (
    *("plugins", "type", "parameters", "modelName", "indexerConfig", "tokenizersPoolConfig", "path"),
    *("kvEventsConfig", "zmqEndpoint", "maxNumOfEndpoints", "flowControl", "maxBytes", "defaultRequestTTL"),
    *("priorityBands", "saturationDetector", "schedulingProfiles", "dataLayer", "peerDiscovery"),
)
HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
CHART = [
    *("--pool-name", "qwen", "--pool-namespace", "serving", "--pool-group", "inference.networking.k8s.io"),
    *("--zap-encoder", "json", "--v=4", "--grpc-port=9002", "--grpc-health-port", "9003"),
    *("--metrics-port", "9090", "--secure-serving=true", "--cert-path", "/certs", "--drain-timeout", "1m30s"),
    *("--ha-enable-leader-election", "--allow-experimental-plugins", "--metrics-endpoint-auth=false"),
    *("--grpc-max-recv-msg-size", "64MiB", "--tls-min-version", "VersionTLS13"),
    *("--kv-cache-usage-percentage-metric", "x", "--tracing=false", "--config-file", str(FILE)),
]
"""A Deployment's arguments, most flags that there are."""


def told(*words: str) -> Settings:
    """The settings of a command line of llm-d's."""
    return Settings.from_args(translated(words).argv)


def notes(*words: str) -> str:
    """All that is said of it."""
    return "\n".join(translated(words).notes)


def test_a_deployment_s_arguments_are_taken() -> None:
    """Flags with and without ``=``; what the file says is read, and everything fits together."""
    found = told(*CHART).check()

    assert (found.pool_name, found.pool_namespace) == ("qwen", "serving")
    assert (found.grpc_port, found.grpc_health_port, found.metrics_port) == (9002, 9003, 9090)
    assert (found.secure_serving, found.cert_path, found.tls_min_version) == (True, "/certs", "1.3")
    assert (found.log_format, found.log_level, found.drain_timeout) == ("json", "debug", 90.0)
    assert (found.max_message_bytes, found.max_endpoints) == (64 << 20, 2)
    assert found.model == "hf://Qwen/Qwen3-32B"
    assert (found.queue_requests, found.queue_bytes) == (5_000, 256 << 20)
    assert (found.queue_seconds, found.empty_pool_seconds) == (90.0, 120.0)


def test_pods_by_label_are_found_as_before() -> None:
    """The other main pair of flags needs no translation."""
    found = told("--endpoint-selector", "app=vllm,env in (prod)", "--endpoint-target-ports=8000,8001").check()
    assert (found.endpoint_selector, found.target_ports) == ("app=vllm,env in (prod)", (8000, 8001))


def test_what_is_not_done_is_named() -> None:
    """Each flag and part of the file without a counterpart is noted, with what happens instead."""
    said = notes(*CHART).splitlines()
    expected = (
        ("--ha-enable-leader-election:", "--replicas"),
        ("--kv-cache-usage-percentage-metric:", "vLLM's own names"),
        (
            "one cost in seconds replaces token-producer, endpoint-notification-source",
            "token-load-scorer",
        ),
        ("plugin label-selector-filter:", "the pool's selector"),
        ("plugin disagg-profile-handler:", "not disaggregated"),
        ("plugin round-robin-fairness-policy:", "no equivalent"),
        ("flowControl.priorityBands:", "no bounds"),
        ("schedulingProfiles:", "the same way"),
    )
    assert [line for line in said if not any(a in line and b in line for a, b in expected)] == []
    assert len(said) == len(expected)


def test_flags_win_over_the_file() -> None:
    """Whichever comes first."""
    assert told("--model", "./m", f"--config-file={FILE}", "--max-endpoints=1").model == "./m"
    assert told(f"--config-file={FILE}", "--max-endpoints=1").max_endpoints == 1


def test_a_flag_that_asks_for_nothing_is_no_note() -> None:
    """A switch that is off, and what ours always does."""
    off = (
        "--enable-pprof=false",
        "--metrics-endpoint-auth=false",
        "--tracing=false",
        "--emit-endpoint-scores=0",
    )
    assert notes(*off, "--enable-cert-reload", "--health-checking", "--zap-devel=false") == ""
    assert notes("--enable-pprof").startswith("--enable-pprof: ")
    assert "NetworkPolicy" in notes("--metrics-endpoint-auth")


def test_an_older_scorer_names_the_model_too() -> None:
    """A scorer of older configurations names the model, too, and its bound event socket is bound here."""
    text = (
        f"{HEAD}plugins:\n- type: precise-prefix-cache-scorer\n  parameters:\n"
        "    indexerConfig: {tokenizersPoolConfig: {modelName: Qwen/Qwen3-8B}}\n"
        "    kvEventsConfig: {zmqEndpoint: 'tcp://*:5557'}\n"
    )
    found = told("--config-text", text)
    assert (found.model, found.kv_events_bind) == ("hf://Qwen/Qwen3-8B", "tcp://*:5557")


def test_an_endpoints_file_is_taken_over() -> None:
    """The path from the plugin, and llm-d's form of the file, whose ports are texts."""
    text = f"{HEAD}plugins:\n- {{type: file-discovery, parameters: {{path: /etc/epp/endpoints.yaml}}}}\n"
    assert told(f"--config-text={text}").endpoints_file == "/etc/epp/endpoints.yaml"
    fleet = parse_endpoints(b"endpoints:\n- {name: a, address: 10.0.0.1, port: '8000', labels: {pool: x}}\n")
    assert [(one.address, one.port) for one in fleet.endpoints] == [("10.0.0.1", 8000)]


def test_without_a_model_the_file_says_so() -> None:
    """llm-d's defaults are approximate, and name none."""
    text = f"{HEAD}plugins: [{{type: prefix-cache-scorer}}]\n"
    assert "--model hf://" in notes("--config-text", text)


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(KEYS), below, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYS), ODD, max_size=6))
def test_an_odd_file_is_read_or_refused(whole: dict[str, object]) -> None:
    """Whatever is where something else should be."""
    head = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
    with contextlib.suppress(SettingsError):
        translated(["--config-text", json.dumps({**whole, **head})])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config-file"], "--config-file: needs a value"),
        (["--config-file=/nowhere"], "--config-file: cannot be read: "),
        (["--config-text=a: ["], "--config-text: is not YAML: "),
        (["--config-text=kind: Pod"], "--config-text: is not an EndpointPickerConfig of llm-d"),
        (["--config-text=kind: EndpointPickerConfig\napiVersion: v1"], "apiVersion 'v1' is not llm-d's"),
        (
            [f"--config-text={HEAD}flowControl: {{maxBytes: lots}}"],
            "flowControl.maxBytes: 'lots' is not a quantity",
        ),
        (
            [f"--config-text={HEAD}flowControl: {{defaultRequestTTL: soon}}"],
            "flowControl.defaultRequestTTL: ",
        ),
        (["--grpc-max-recv-msg-size=big"], "--grpc-max-recv-msg-size: 'big' cannot be read"),
        (["--v=loud"], "--v: 'loud' cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(words: list[str], said: str) -> None:
    """The flag, or the field of the file, and why."""
    with pytest.raises(SettingsError) as refused:
        translated(words)
    assert said in str(refused.value)


def test_an_unknown_flag_is_refused_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, with where to look; not after a page of usage."""
    with pytest.raises(SystemExit) as ended:
        main(["--pool-name=qwen", "--leader-elect"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said == "kvist-epp: unrecognized arguments: --leader-elect; kvist-epp --help lists the flags\n"


def test_the_process_says_what_it_does_not_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Notes are on stderr before anything starts."""
    assert main(["--enable-pprof", f"--config-file={FILE}"]) == 2
    said = capsys.readouterr().err
    assert "set one of them to locate the endpoints" in said
    text = f"--config-text={HEAD}plugins: []"
    assert main([text, "--pool-name=a", "--endpoints-file=b"]) == 2
    assert "only one of them" in capsys.readouterr().err
