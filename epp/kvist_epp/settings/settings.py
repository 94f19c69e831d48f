"""The picker's settings: one frozen object, to and from the command line.

Standard library only, because the operator renders the picker's arguments from it:
``Settings.from_args(s.to_args()) == s`` for every ``s``. Each flag can also be given as an environment
variable ``KVIST_EPP_<FLAG>`` (dashes as underscores); the command line wins, an empty variable is ignored.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from kvist_epp.names import POOL_GROUP, POOL_GROUPS
from kvist_epp.settings import arguments, validation
from kvist_epp.settings.arguments import Program, flag

_BURST: Final = "; bursts of up to ten seconds are allowed, and a connection that exceeds them is closed"
TRANSPORTS: Final = ("fast", "grpc")
POLICIES: Final = ("fcfs", "priority")
TLS_VERSIONS: Final = ("1.2", "1.3")
LOG_FORMATS: Final = ("auto", "json", "text")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")

PROGRAM: Final = Program(
    "kvist-epp",
    "Endpoint picker for Envoy: routes each request to the vLLM endpoint that already caches its prefix.",
    """\
examples:
  # two endpoints from a file, model files from a folder, no TLS
  kvist-epp --endpoints-file endpoints.yaml --model ./qwen3 --secure-serving=false

  # the pods of an InferencePool, in a pod of its namespace (docs/guides/kubernetes.md has the Role)
  kvist-epp --pool-name qwen3-32b --model hf://Qwen/Qwen3-32B

  # pods by label, with two ports each (one data-parallel rank behind each)
  kvist-epp --endpoint-selector app=vllm,role!=prefill --endpoint-target-ports 8000,8001 \\
      --pool-namespace serving --model ./qwen3

  # tokenizer files from the Hugging Face hub at a revision, JSON logs even on a terminal
  kvist-epp --endpoints-file endpoints.yaml --model hf://Qwen/Qwen3-32B@main \\
      --secure-serving=false --log-format json

  # the model-header filter, which runs before the pickers of several pools (docs/guides/several-pools.md)
  kvist-epp --role=model-header --base-models sql-lora=qwen3-32b

  # instead of llm-d's router, with its flags and its configuration file (docs/guides/migrate.md)
  kvist-epp --pool-name qwen3-32b --config-file /etc/epp/config.yaml --zap-encoder=json --v=4

  # ask a running picker where a request would go, and why
  curl -s localhost:9090/debug/pick -H 'x-kvist-path: /v1/chat/completions' -d @request.json

Each flag is also read from an environment variable: --grpc-port from KVIST_EPP_GRPC_PORT.
SECONDS accepts durations such as 1m30s.
""",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting of the picker, each with its flag, default and help."""

    # fmt: off
    role: str = flag("--role", validation.PICKER,
        "model-header: instead of picking endpoints, set the header x-gateway-"
        "model-name to the model in the body, so that routes can choose the pool "
        "by it; needs no endpoints and no model", choices=validation.ROLES)
    base_models: str = flag("--base-models", "",
        "with --role=model-header: LoRA adapters and their base models; the base model is set as x-gateway-"
        "base-model-name", unit="ADAPTER=BASE,…")
    endpoints_file: str = flag("--endpoints-file", "",
        "YAML or JSON list of the endpoints; read again when it changes", unit="FILE")
    endpoint_selector: str = flag("--endpoint-selector", "",
        "instead of --endpoints-file: Kubernetes label selector of the pods, such as "
        "app=vllm,env=prod", unit="SELECTOR")
    endpoint_target_ports: str = flag("--endpoint-target-ports", "",
        "with --endpoint-selector: 1 to 8 comma-separated ports of each pod; the n-th port serves data-"
        "parallel rank n", unit="PORTS")
    pool_name: str = flag("--pool-name", "",
        "instead of --endpoints-file: InferencePool whose pods and ports are the endpoints", unit="NAME")
    pool_namespace: str = flag("--pool-namespace", "",
        "namespace of the pool and its pods (default: POD_NAMESPACE, NAMESPACE, the service account's, or "
        "default)", unit="NAME")
    pool_group: str = flag("--pool-group", POOL_GROUP,
        "API group of the pool: the Gateway API Inference Extension's or kvist's", choices=POOL_GROUPS)
    resync_interval: float = flag("--resync-interval", 600.0,
        "time between two complete lists of the watched Kubernetes objects", unit="SECONDS")
    model: str = flag("--model", "",
        "folder or hf://repo[@revision] with the tokenizer files; without it the picker runs in approximate"
        " mode", unit="SOURCE")
    model_required: bool = flag("--model-required", False,
        "exit if the tokenizer cannot be downloaded; otherwise start in approximate mode and keep retrying")
    chat_template: str = flag("--chat-template", "",
        "value of the engines' --chat-template, if they have one: a file, or the template "
        "itself", unit="TEMPLATE")
    chat_template_content_format: str = flag("--chat-template-content-format", "auto",
        "value of the engines' --chat-template-content-format", choices=validation.CONTENT_FORMATS)
    default_chat_template_kwargs: str = flag("--default-chat-template-kwargs", "",
        "value of the engines' --default-chat-template-kwargs, a JSON object", unit="JSON")
    reasoning_effort_map: str = flag("--reasoning-effort-map", "",
        "value of the engines' --reasoning-effort-map, a JSON object", unit="JSON")
    exclude_tools_when_tool_choice_none: bool = flag("--exclude-tools-when-tool-choice-none", False,
        "true if the engines were started with this flag")
    anthropic_disabled_thinking_effort: str = flag("--anthropic-disabled-thinking-effort", "auto",
        "value of the engines' --anthropic-disabled-thinking-effort", choices=validation.THINKING_OFF)
    tokenizer_mode: str = flag("--tokenizer-mode", "auto",
        "value of the engines' --tokenizer-mode, which decides what writes chats: the model's template (hf), "
        "or code of the engine for it (such as deepseek_v32)", unit="MODE")
    host: str = flag("--host", "",
        "address to listen on (default: every address, IPv4 and IPv6)", unit="ADDRESS")
    grpc_port: int = flag("--grpc-port", 9002,
        "port for ext_proc, the access log service and gRPC health; 0: any free port", unit="PORT")
    grpc_health_port: int = flag("--grpc-health-port", 9003,
        "port for gRPC health alone, always in plaintext; 0: any free port", unit="PORT")
    metrics_port: int = flag("--metrics-port", 9090,
        "port for /metrics, /healthz and the /debug pages; 0: any free port", unit="PORT")
    secure_serving: bool = flag("--secure-serving", True,
        "serve TLS on the ext_proc port; the health and metrics ports always use plaintext")
    cert_path: str = flag("--cert-path", "",
        "folder with tls.crt, tls.key and optionally ca.crt, read again when they change (default: a self-"
        "issued certificate)", unit="FOLDER")
    client_ca_path: str = flag("--client-ca-path", "",
        "PEM file, or folder with ca.crt: gateways must present a certificate of one of these "
        "authorities", unit="PATH")
    tls_names: str = flag("--tls-names", "",
        "comma-separated DNS names and addresses in the self-issued certificate, besides those of this "
        "host; the name of a Service is enough if POD_NAMESPACE is set", unit="NAMES")
    tls_min_version: str = flag("--tls-min-version", "1.2",
        "oldest TLS version that is accepted", choices=TLS_VERSIONS)
    transport: str = flag("--transport", "fast",
        "fast: kvist's own HTTP/2 server; grpc: the slower server of grpc.aio, as a "
        "fallback", choices=TRANSPORTS)
    gateway: str = flag("--gateway", "auto",
        "what calls the picker: envoy; other, which is named one endpoint for each request and whose streams "
        "stay open until the response has ended; or auto, which knows an Envoy by the metadata of its "
        "calls", choices=validation.GATEWAYS)
    observe_responses: bool = flag("--observe-responses", False,
        "process responses too: count token usage and restore model names; if such a picker is killed, the "
        "responses it observes are cut off")
    drain_timeout: float = flag("--drain-timeout", 30.0, "longest time from SIGTERM to exit", unit="SECONDS")
    drain_delay: float = flag("--drain-delay", 5.0,
        "part of --drain-timeout, at most half of it, in which new connections are still accepted until "
        "gateways notice the drain", unit="SECONDS")
    max_message_bytes: int = flag("--max-message-bytes", 33 << 20,
        "largest gRPC message that is accepted; the default allows a request body of 32 MiB", unit="BYTES")
    max_connections: int = flag("--max-connections", 512,
        "largest number of open connections of each gRPC port", unit="N")
    max_streams: int = flag("--max-streams", 4096,
        "largest number of concurrent requests of a connection", unit="N")
    max_held_bytes: int = flag("--max-held-bytes", 1 << 30,
        "limit of the memory that each gRPC port holds for incomplete or unanswered requests and for unread "
        "answers", unit="BYTES")
    max_header_bytes: int = flag("--max-header-bytes", 16 << 10,
        "largest gRPC metadata that is accepted", unit="BYTES")
    handshake_timeout: float = flag("--handshake-timeout", 10.0,
        "longest time from accepting a connection to the end of its TLS handshake and "
        "HTTP/2 preface", unit="SECONDS")
    stall_timeout: float = flag("--stall-timeout", 30.0,
        "time after which a client that reads no answers is disconnected, and a request that transfers less "
        "than 1 KiB/s is ended", unit="SECONDS")
    stream_idle_timeout: float = flag("--stream-idle-timeout", 3600.0,
        "time after which an ext_proc stream without any message in either direction is ended; must exceed "
        "the duration of every response", unit="SECONDS")
    idle_timeout: float = flag("--idle-timeout", 3600.0,
        "time after which a connection without requests is closed gracefully", unit="SECONDS")
    keepalive_time: float = flag("--keepalive-time", 60.0,
        "time without received data after which the picker sends a PING on a connection", unit="SECONDS")
    keepalive_timeout: float = flag("--keepalive-timeout", 20.0,
        "time to wait for the answer to a keepalive PING before the connection is closed", unit="SECONDS")
    max_resets_per_second: float = flag("--max-resets-per-second", 1000.0,
        "limit of requests per second that are cancelled or reset on one connection" + _BURST, unit="RATE")
    max_pings_per_second: float = flag("--max-pings-per-second", 50.0,
        "limit of PING frames per second on one connection, in addition to one per 32 bytes of answers"
        + _BURST, unit="RATE")
    max_settings_per_second: float = flag("--max-settings-per-second", 10.0,
        "limit of SETTINGS frames per second on one connection" + _BURST, unit="RATE")
    max_empty_frames_per_second: float = flag("--max-empty-frames-per-second", 100.0,
        "limit of empty DATA frames per second on one connection" + _BURST, unit="RATE")
    max_control_frames_per_second: float = flag("--max-control-frames-per-second", 1000.0,
        "limit of WINDOW_UPDATE, PRIORITY and unknown frames per second on one connection, in addition to "
        "one per 32 bytes of answers" + _BURST, unit="RATE")
    scrape_interval: float = flag("--scrape-interval", 2.0,
        "time between two scrapes of an endpoint's /metrics", unit="SECONDS")
    scrape_timeout: float = flag("--scrape-timeout", 2.0,
        "longest time of one scrape of an endpoint's /metrics", unit="SECONDS")
    prefix_matching: bool = flag("--prefix-matching", True,
        "send requests where their prefix is cached; false: route by load alone, for engines without a "
        "prefix cache, such as those of embedding and rerank models")
    kv_events: bool = flag("--kv-events", True,
        "subscribe to the engines' KV events; false: approximate mode for every endpoint")
    kv_events_bind: str = flag("--kv-events-bind", "",
        "ZMQ address to bind for engines that connect to the picker, instead of connecting "
        "to each engine", unit="ADDRESS")
    storage_lease: float = flag("--storage-lease", 3600.0,
        "longest time for which a KV block on storage is believed to be there after an engine has stored or "
        "loaded it; no event tells when a file is removed", unit="SECONDS")
    skip_slow_tiers: bool = flag("--skip-slow-tiers", True,
        "keep an engine from loading KV blocks from a tier that is slower than computing them, where its "
        "metrics show that, by kv_transfer_params in the request body")
    disaggregation: str = flag("--disaggregation", "off",
        "compute a prompt at another endpoint than the one that answers, where that costs less. on: the "
        "picker asks the prefill endpoint itself; sidecar: llm-d's sidecar in the decode pods does, by the "
        "header x-prefiller-host-port", choices=validation.DISAGGREGATION)
    kv_lease: float = flag("--kv-lease", 30.0,
        "with --disaggregation=on: kv_lease_duration of the engines' NixlConnector; a request uses computed "
        "blocks within two thirds of it", unit="SECONDS")
    warmup_timeout: float = flag("--warmup-timeout", 20.0,
        "longest wait for the index to be filled by replays "
        "before the picker reports that it is ready", old_name="--warm-seconds", unit="SECONDS")
    replicas: str = flag("--replicas", "",
        "other replicas of the picker, with which this one shares load and index: name:port of a headless "
        "Service, or a comma-separated list of host:port", old_name="--peers", unit="LIST")
    replica_port: int = flag("--replica-port", 9004,
        "port for the other replicas; open only with --replicas", old_name="--peer-port", unit="PORT")
    replica_cert_path: str = flag("--replica-cert-path", "",
        "folder with tls.crt, tls.key and ca.crt: replicas present and require certificates of that "
        "authority", old_name="--peer-cert-path", unit="FOLDER")
    replica_insecure: bool = flag("--replica-insecure", False,
        "allow plaintext between replicas, even in a cluster", old_name="--peer-insecure")
    gossip_interval: float = flag("--gossip-interval", 0.1,
        "interval at which this replica sends its load to each other replica; at most 1", unit="SECONDS")
    prefill_tokens_per_second: float = flag("--prefill-tokens-per-second", 15_928.0,
        "prefill rate of an endpoint, in tokens per second, until its own rate is measured; the default is "
        "that of Qwen3-32B on an H100", unit="RATE")
    max_num_seqs: int = flag("--max-num-seqs", 256,
        "sequences that an engine runs concurrently, if the endpoint has no label kvist.dev/max-"
        "num-seqs", unit="N")
    max_backlog_seconds: float = flag("--max-backlog-seconds", 30.0,
        "prefill backlog above which an endpoint counts as "
        "full", old_name="--max-owed-seconds", unit="SECONDS")
    tpot_target: float = flag("--tpot-target", 0.0,
        "target for the time per output token: a request stays queued while its prefill would make the "
        "sequences that an endpoint decodes slower than this; 0: no target", unit="SECONDS")
    queue_requests: int = flag("--queue-requests", 10_000,
        "largest number of requests that are queued; 0: no queue: full endpoints get all requests, "
        "except sheddable ones (negative priority), which are rejected", unit="N")
    queue_bytes: int = flag("--queue-bytes", 512 << 20,
        "limit of the memory for queued requests", unit="BYTES")
    queue_seconds: float = flag("--queue-seconds", 60.0,
        "longest time a request is queued until it is dispatched; the gateway's message timeout must be "
        "longer", unit="SECONDS")
    empty_pool_seconds: float = flag("--empty-pool-seconds", 180.0,
        "longest time a request is queued while the pool has no endpoint; this time does not count towards "
        "--queue-seconds", unit="SECONDS")
    priorities: str = flag("--priorities", "",
        "priorities by name of the objective, such as interactive=10,batch=-1", unit="NAME=N,…")
    scheduling_policy: str = flag("--scheduling-policy", "fcfs",
        "value of the engines' --scheduling-policy; with priority, the picker sends each request's priority "
        "to the engine", choices=POLICIES)
    max_endpoints: int = flag("--max-endpoints", 0,
        "largest number of endpoints in an answer: the picked one first, then those for retries; 0: 1 for an "
        "InferencePool of the Gateway API Inference Extension, most of whose gateways take no list, "
        "otherwise 3; a gateway other than Envoy is always named one", unit="N")
    request_seconds: float = flag("--request-seconds", 600.0,
        "time without reported progress after which a request is assumed to have ended", unit="SECONDS")
    prewarm_tokens: int = flag("--prewarm-tokens", 131_072,
        "largest number of prompt tokens that an endpoint computes in advance when it joins the pool, for "
        "the most requested prefixes; also the limit for prefixes that only leaving endpoints had cached, "
        "which other endpoints then compute; 0: no prewarming", old_name="--hand-over-tokens", unit="TOKENS")
    prewarm_step_tokens: int = flag("--prewarm-step-tokens", 256,
        "prompt tokens that one prewarming request asks an engine to compute; a longer prefix takes several "
        "requests", old_name="--hand-over-step-tokens", unit="TOKENS")
    engine_key_file: str = flag("--engine-key-file", "",
        "file with the engines' API key, which prewarming and the list of served models need if they require "
        "one; read for each request", unit="FILE")
    approximate_cache_tokens: int = flag("--approximate-cache-tokens", 250_000,
        "KV cache size of an endpoint in approximate mode until its engine reports the size", unit="TOKENS")
    trace_endpoint: str = flag("--trace-endpoint", "",
        "OTLP collector that gets OpenTelemetry traces of picks, such as http://collector:4318 (default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT; without both, no traces)", unit="URL")
    trace_protocol: str = flag("--trace-protocol", "auto",
        "OTLP protocol; auto: OTEL_EXPORTER_OTLP_PROTOCOL, otherwise http/protobuf",
        choices=validation.TRACE_PROTOCOLS)
    trace_sample_ratio: float = flag("--trace-sample-ratio", 0.1,
        "fraction of the requests without a trace context that is traced; a request with one is traced if "
        "its sampled flag is set", unit="RATIO")
    live_page: bool = flag("--live-page", True,
        "serve the live page at / of the metrics port, which has no authentication of its own")
    live_page_hosts: str = flag("--live-page-hosts", "",
        "comma-separated names, besides addresses, localhost and those of Services, under which a proxy or "
        "an Ingress serves the live page, /fleet and /debug", unit="NAMES")
    gpu_hour_price: float = flag("--gpu-hour-price", 0.0,
        "price of one GPU for an hour, for the money that the live page shows as saved; 0: none is shown",
        unit="PRICE")
    gpus_per_endpoint: int = flag("--gpus-per-endpoint", 1,
        "GPUs of one endpoint, for the GPU time that the live page shows as saved", unit="N")
    log_format: str = flag("--log-format", "auto",
        "auto: text on a terminal, otherwise JSON", choices=LOG_FORMATS)
    log_level: str = flag("--log-level", "info", "lowest level that is logged", choices=LOG_LEVELS)
    log_requests: bool = flag("--log-requests", True, "log one line per request")
    decision_log: int = flag("--decision-log", 20_000,
        "decisions that are kept for kvist explain and /debug/decisions, without prompt text; 0: "
        "none", unit="N")
    debug_text: bool = flag("--debug-text", False,
        "include the first 200 characters of each prompt in its log line")
    # fmt: on

    def __post_init__(self) -> None:
        validation.check_values(self)

    def check(self) -> Self:
        """Return these settings if the picker can start with them. Raises SettingsError."""
        validation.check_startup(self)
        return self

    @property
    def target_ports(self) -> tuple[int, ...]:
        """Return ``--endpoint-target-ports`` as numbers, each once."""
        return validation.parse_target_ports(self.endpoint_target_ports)

    @property
    def from_envoy(self) -> bool | None:
        """Return whether calls are an Envoy's by ``--gateway``; None: their metadata tells."""
        return None if self.gateway == "auto" else self.gateway == "envoy"

    @property
    def endpoints_per_answer(self) -> int:
        """Return ``--max-endpoints``, or what it means where it is not set."""
        of_extension = bool(self.pool_name) and self.pool_group == POOL_GROUP
        return self.max_endpoints or (1 if of_extension else 3)

    def to_args(self) -> list[str]:
        """Return the shortest command line that gives these settings."""
        return arguments.to_args(self)

    @classmethod
    def from_args(cls, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Self:
        """Return the settings of a command line; argparse exits with 2 on what it cannot read. Raises
        SettingsError."""
        return cls(**arguments.parse(dataclasses.fields(cls), argv, environment or {}, PROGRAM))
