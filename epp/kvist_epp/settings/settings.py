"""The picker's settings: one frozen object, to and from the command line.

Standard library only, because the operator renders the picker's arguments from it:
``Settings.from_args(s.to_args()) == s`` for every ``s``. Each flag can also be given as an environment
variable ``KVIST_EPP_<FLAG>`` (dashes as underscores); the command line wins, an empty one is none.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from kvist_epp.errors import SettingsError
from kvist_epp.flowcontrol.priorities import named_priorities
from kvist_epp.names import POOL_GROUP, POOL_GROUPS
from kvist_epp.settings import arguments, roles
from kvist_epp.settings.arguments import dashed
from kvist_epp.settings.replica_flags import check_replica_flags, parse_replica_names

TRANSPORTS: Final = ("fast", "grpc")
POLICIES: Final = ("fcfs", "priority")
TLS_VERSIONS: Final = ("1.2", "1.3")
CONTENT_FORMATS: Final = ("auto", "string", "openai")
LOG_FORMATS: Final = ("auto", "json", "text")
_LIMITS: Final = (
    "_per_second",
    "handshake_timeout",
    "stall_timeout",
    "idle_timeout",
    "keepalive_time",
    "keepalive_timeout",
)
"""How the names of rates and times end that must be above zero."""


def _flag(default: Any, text: str, *, choices: tuple[str, ...] | None = None, unit: str = "") -> Any:
    return field(default=default, metadata={"help": text, "choices": choices, "unit": unit})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be chosen. Field ``a_b`` is the flag ``--a-b``."""

    role: str = _flag(
        roles.PICKER,
        "model-header = no picker, but a filter before pickers: it sets x-gateway-model-name to the body's "
        "model, for routes to choose the pool by; it needs none of the flags of engines and models",
        choices=roles.ROLES,
    )
    base_models: str = _flag(
        "",
        "with --role=model-header: adapters and the models under them; these go to x-gateway-base-model-name",
        unit="ADAPTER=BASE,…",
    )
    endpoints_file: str = _flag("", "YAML or JSON list of the engines; reread when it changes", unit="FILE")
    endpoint_selector: str = _flag(
        "", "or: Kubernetes label selector of the engines' pods, such as app=vllm,env=prod", unit="SELECTOR"
    )
    endpoint_target_ports: str = _flag(
        "",
        "with it: 1 to 8 ports of each pod, separated by commas; port n has data-parallel rank n",
        unit="PORTS",
    )
    pool_name: str = _flag("", "or: InferencePool that tells pods and ports", unit="NAME")
    pool_namespace: str = _flag(
        "",
        "namespace of pool and pods (default: POD_NAMESPACE, NAMESPACE, the service account's, or default)",
        unit="NAME",
    )
    pool_group: str = _flag(
        POOL_GROUP,
        "API group of the pool: of the Gateway API Inference Extension, or ours",
        choices=POOL_GROUPS,
    )
    resync_interval: float = _flag(
        600.0, "time between two complete lists of what is watched in Kubernetes", unit="SECONDS"
    )
    model: str = _flag(
        "",
        "folder or hf://repo[@revision] with the tokenizer files; without: approximate mode",
        unit="SOURCE",
    )
    model_required: bool = _flag(
        False, "end when the hub does not give them; without: approximate mode until it does"
    )
    chat_template: str = _flag(
        "",
        "the engines' --chat-template, where they have one: a file, or the template itself",
        unit="TEMPLATE",
    )
    chat_template_content_format: str = _flag(
        "auto", "the engines' --chat-template-content-format", choices=CONTENT_FORMATS
    )
    default_chat_template_kwargs: str = _flag(
        "", "the engines' --default-chat-template-kwargs, a JSON object", unit="JSON"
    )
    host: str = _flag("", "address to listen on (default: every address, IPv4 and IPv6)", unit="ADDRESS")
    grpc_port: int = _flag(9002, "ext_proc, access log and health", unit="PORT")
    grpc_health_port: int = _flag(9003, "gRPC health alone", unit="PORT")
    metrics_port: int = _flag(9090, "/metrics, /healthz, /debug/…", unit="PORT")
    secure_serving: bool = _flag(True, "TLS on the ext_proc port; health and metrics stay plaintext")
    cert_path: str = _flag(
        "",
        "folder with tls.crt, tls.key and perhaps ca.crt, reread when they change (default: self-made)",
        unit="FOLDER",
    )
    client_ca_path: str = _flag(
        "",
        "PEM file, or folder with ca.crt: gateways must show a certificate of one of these authorities",
        unit="PATH",
    )
    tls_names: str = _flag(
        "",
        "comma list of DNS names and addresses that the self-made certificate is good for, besides this "
        "host's; a Service's name is enough where POD_NAMESPACE is set",
        unit="NAMES",
    )
    tls_min_version: str = _flag("1.2", "oldest TLS version taken", choices=TLS_VERSIONS)
    transport: str = _flag(
        "fast", "fast = our own HTTP/2; grpc = grpc.aio, the slower twin and fallback", choices=TRANSPORTS
    )
    observe_responses: bool = _flag(
        False, "see responses: count usage, write names back; a picker that dies then cuts what it observes"
    )
    drain_timeout: float = _flag(30.0, "from SIGTERM to the end, at most", unit="SECONDS")
    drain_delay: float = _flag(
        5.0,
        "part of it, at most half, in which connections are still taken: until gateways have noticed",
        unit="SECONDS",
    )
    max_message_bytes: int = _flag(
        33 << 20, "largest gRPC message taken: a request body of 32 MiB and what is around it", unit="BYTES"
    )
    max_connections: int = _flag(512, "open connections of each gRPC port", unit="N")
    max_streams: int = _flag(4096, "requests a connection may have open at once", unit="N")
    max_held_bytes: int = _flag(
        1 << 30,
        "memory of each gRPC port: requests half received or not answered yet, and answers not yet read",
        unit="BYTES",
    )
    max_header_bytes: int = _flag(16 << 10, "largest gRPC metadata taken", unit="BYTES")
    handshake_timeout: float = _flag(
        10.0, "from a connection's begin to the end of its TLS handshake and HTTP/2 preface", unit="SECONDS"
    )
    stall_timeout: float = _flag(
        30.0,
        "a gateway that reads nothing, or less than 1 KiB/s of a message begun goes to or fro: cut off",
        unit="SECONDS",
    )
    stream_idle_timeout: float = _flag(
        600.0,
        "a request on which neither side says a word for so long is ended; longer than any answer takes",
        unit="SECONDS",
    )
    idle_timeout: float = _flag(3600.0, "a connection without requests is told to go away", unit="SECONDS")
    keepalive_time: float = _flag(60.0, "a silent connection is asked for a sign of life", unit="SECONDS")
    keepalive_timeout: float = _flag(20.0, "and closed when it gives none", unit="SECONDS")
    max_resets_per_second: float = _flag(
        1000.0,
        "requests a connection may give up; as for the next four, ten seconds' worth at once",
        unit="RATE",
    )
    max_pings_per_second: float = _flag(
        50.0, "PING frames of a connection, besides one for 32 bytes of answers", unit="RATE"
    )
    max_settings_per_second: float = _flag(10.0, "SETTINGS frames of a connection", unit="RATE")
    max_empty_frames_per_second: float = _flag(100.0, "empty DATA frames of a connection", unit="RATE")
    max_control_frames_per_second: float = _flag(
        1000.0,
        "WINDOW_UPDATE, PRIORITY and unknown frames of a connection, besides one for 32 bytes of answers",
        unit="RATE",
    )
    scrape_interval: float = _flag(2.0, "time between two reads of each engine's /metrics", unit="SECONDS")
    scrape_timeout: float = _flag(2.0, "time one read of an engine's /metrics may take", unit="SECONDS")
    kv_events: bool = _flag(True, "follow the engines' KV events; false = approximate mode for all")
    kv_events_bind: str = _flag(
        "", "ZMQ address to bind for engines that connect, instead of connecting to each", unit="ADDRESS"
    )
    warm_seconds: float = _flag(
        20.0, "longest wait for the index to fill (replay) before the picker says it is ready", unit="SECONDS"
    )
    peers: str = _flag(
        "",
        "other replicas, with which load and index are shared: name:port of a headless Service, or a "
        "comma-separated list of host:port",
        unit="LIST",
    )
    peer_port: int = _flag(
        9004, "port for other replicas, which get load and index there; open only with --peers", unit="PORT"
    )
    peer_cert_path: str = _flag(
        "",
        "folder with tls.crt, tls.key and ca.crt: replicas present and require certificates of its authority",
        unit="FOLDER",
    )
    peer_insecure: bool = _flag(False, "replicas exchange plaintext, even in a cluster")
    gossip_interval: float = _flag(
        0.1, "interval in which each replica receives an update of the load", unit="SECONDS"
    )
    prefill_tokens_per_second: float = _flag(
        15_928.0, "prefill rate of an engine until its own is learned (Qwen3-32B on an H100)", unit="RATE"
    )
    max_num_seqs: int = _flag(
        256, "sequences an engine runs at once, where no kvist.dev/max-num-seqs label tells", unit="N"
    )
    max_owed_seconds: float = _flag(
        30.0, "an endpoint that owes more prefill than this is full", unit="SECONDS"
    )
    tpot_target: float = _flag(
        0.0,
        "time per output token to keep to: prompts wait in the picker, newest first, when an endpoint's "
        "sequences would become slower; 0: they go there all the same",
        unit="SECONDS",
    )
    queue_requests: int = _flag(
        10_000,
        "requests that may wait while every endpoint is full; 0: they go there all the same, sheddable ones "
        "are refused",
        unit="N",
    )
    queue_bytes: int = _flag(512 << 20, "memory that requests may hold while they wait", unit="BYTES")
    queue_seconds: float = _flag(
        60.0, "longest wait for room; the gateway's message timeout must be longer", unit="SECONDS"
    )
    empty_pool_seconds: float = _flag(
        180.0, "longest wait while there is no endpoint at all; on top of --queue-seconds", unit="SECONDS"
    )
    priorities: str = _flag(
        "", "priorities by name of objective, such as interactive=10,batch=-1", unit="NAME=N,…"
    )
    scheduling_policy: str = _flag(
        "fcfs", "the engines' own; priority = tell them each request's priority", choices=POLICIES
    )
    max_endpoints: int = _flag(3, "endpoints named per answer: the pick, then those for retries", unit="N")
    request_seconds: float = _flag(
        600.0, "a request that shows no sign of life for this long is taken off the books", unit="SECONDS"
    )
    hand_over_tokens: int = _flag(
        131_072,
        "prompt tokens to prewarm on an endpoint that joins, and of those that leaving endpoints held: "
        "prefixes that several tenants request most; 0: none",
        unit="TOKENS",
    )
    hand_over_step_tokens: int = _flag(
        256, "prompt tokens of a prefix to prewarm that are requested from an engine at once", unit="TOKENS"
    )
    engine_key_file: str = _flag(
        "", "file with the engines' API key, which prewarming needs if they require one", unit="FILE"
    )
    approximate_cache_tokens: int = _flag(
        250_000, "cache of an engine in approximate mode until it reports its own size", unit="TOKENS"
    )
    log_format: str = _flag("auto", "auto = text on a terminal, else JSON", choices=LOG_FORMATS)
    log_level: str = _flag(
        "info", "least severe level that is logged", choices=("debug", "info", "warning", "error")
    )
    log_requests: bool = _flag(True, "one line per request")
    debug_text: bool = _flag(False, "let prompt text into logs and debug pages")

    def __post_init__(self) -> None:
        for port in ("grpc_port", "grpc_health_port", "metrics_port", "peer_port"):
            if not 0 <= getattr(self, port) <= 65_535:
                raise SettingsError(f"--{dashed(port)}: {getattr(self, port)} is not a port (0 to 65535)")
        for f in dataclasses.fields(self):
            if isinstance(f.default, float) and not math.isfinite(getattr(self, f.name)):
                raise SettingsError(f"--{dashed(f.name)}: {getattr(self, f.name)} is no time or rate")
        _ports(self.endpoint_target_ports)
        for name in (
            "resync_interval",
            "scrape_interval",
            "scrape_timeout",
            "prefill_tokens_per_second",
            "request_seconds",
            "max_owed_seconds",
            "gossip_interval",
        ):
            if getattr(self, name) <= 0:
                raise SettingsError(f"--{dashed(name)}: must be above zero")
        whole = ("max_num_seqs", "max_endpoints", "max_message_bytes", "approximate_cache_tokens")
        for name in (*whole, "hand_over_step_tokens"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{dashed(name)}: must be at least 1")
        queue = ("tpot_target", "queue_requests", "queue_bytes", "queue_seconds", "empty_pool_seconds")
        for name in ("drain_timeout", "drain_delay", "warm_seconds", "hand_over_tokens", *queue):
            if getattr(self, name) < 0:
                raise SettingsError(f"--{dashed(name)}: must not be negative")
        self._check_chats()
        named_priorities(self.priorities)
        parse_replica_names(self.peers)
        roles.base_models_of(self.base_models)
        if self.gossip_interval > 1:
            raise SettingsError(
                "--gossip-interval: at most 1 s, because a replica that is silent for 3 s counts as gone"
            )
        self._check_limits()

    def _check_chats(self) -> None:
        if self.chat_template_content_format not in CONTENT_FORMATS:
            raise SettingsError(f"--chat-template-content-format: one of {', '.join(CONTENT_FORMATS)}")
        try:
            found = json.loads(self.default_chat_template_kwargs or "{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise SettingsError('--default-chat-template-kwargs: must be a JSON object, such as {"a": true}')

    def _check_limits(self) -> None:
        for f in dataclasses.fields(self):
            if f.name.endswith(_LIMITS) and getattr(self, f.name) <= 0:
                raise SettingsError(f"--{dashed(f.name)}: must be above zero")
        if not 1 <= self.max_streams < 1 << 31:
            raise SettingsError("--max-streams: must be from 1 to 2147483647")
        if self.max_connections < 1:
            raise SettingsError("--max-connections: must be at least 1")
        if self.max_header_bytes < 1024:
            raise SettingsError("--max-header-bytes: under 1024 hardly a gRPC client gets through")
        if self.max_held_bytes < self.max_message_bytes:
            raise SettingsError("--max-held-bytes: must not be less than --max-message-bytes")

    def check(self) -> Self:
        """What only matters when the picker is really started. Raises SettingsError."""
        self._check_tls()
        roles.check_role(self.role, self._given())
        if self.role == roles.MODEL_HEADER:
            return self
        self._check_discovery()
        insecure = self.peer_insecure
        check_replica_flags(self.peers, self.peer_cert_path, os.environ, insecure=insecure, host=self.host)
        if self.queue_seconds + self.empty_pool_seconds >= self.stream_idle_timeout:
            raise SettingsError("--queue-seconds, --empty-pool-seconds: not below --stream-idle-timeout")
        if self.queue_bytes > self.max_held_bytes:
            raise SettingsError(
                "--queue-bytes: must not exceed --max-held-bytes, which holds the same requests"
            )
        return self

    @property
    def target_ports(self) -> tuple[int, ...]:
        """``--endpoint-target-ports`` as numbers, each once."""
        return _ports(self.endpoint_target_ports)

    def _check_discovery(self) -> None:
        sources = ("endpoints_file", "endpoint_selector", "pool_name")
        given = [f"--{dashed(name)}" for name in sources if getattr(self, name)]
        if not given:
            raise SettingsError(
                "--endpoints-file, --endpoint-selector or --pool-name: one must say where the engines are"
            )
        if len(given) > 1:
            raise SettingsError(f"{' and '.join(given)}: only one of them can say where the engines are")
        if bool(self.endpoint_selector) != bool(self.endpoint_target_ports):
            raise SettingsError("--endpoint-selector and --endpoint-target-ports: each needs the other")
        if self.pool_namespace and self.endpoints_file:
            raise SettingsError("--pool-namespace: of no use with --endpoints-file")
        if self.pool_group != POOL_GROUP and not self.pool_name:
            raise SettingsError("--pool-group: of no use without --pool-name")

    def _check_tls(self) -> None:
        for name in ("cert_path", "client_ca_path", "tls_names"):
            if getattr(self, name) and not self.secure_serving:
                raise SettingsError(f"--{dashed(name)}: of no use with --secure-serving=false")
        if self.cert_path and self.tls_names:
            raise SettingsError("--tls-names: for the self-made certificate only, and --cert-path is given")
        if self.tls_min_version != "1.2" and self.transport == "grpc":
            raise SettingsError("--tls-min-version: --transport=grpc takes 1.2 and later; use fast")

    def to_args(self) -> list[str]:
        """The shortest command line that gives these settings."""
        return [f"--{dashed(name)}={arguments.written(getattr(self, name))}" for name in self._given()]

    def _given(self) -> list[str]:
        """The fields that are not at their default."""
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]

    @classmethod
    def from_args(cls, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Self:
        """Settings of a command line; argparse exits 2 on what it cannot read. Raises SettingsError."""
        return cls(**arguments.parse(dataclasses.fields(cls), argv, environment or {}))


def _ports(text: str) -> tuple[int, ...]:
    """``8000,8001`` → (8000, 8001); () for nothing."""
    words = text.split(",") if text else []
    ports = [int(word) if word.isascii() and word.isdigit() and len(word) < 6 else 0 for word in words]
    if len(ports) > 8 or not all(1 <= port <= 65_535 for port in ports):
        raise SettingsError(f"--endpoint-target-ports: {text!r} is not 1 to 8 ports, such as 8000,8001")
    return tuple(dict.fromkeys(ports))
