"""``InferencePool.spec`` as frozen data; None or an empty value means that the plan decides."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum
from typing import Any, Final
from zoneinfo import ZoneInfo

from .disaggregation import Disaggregation, Role
from .offload import Offload
from .preset import Preset

DEFAULT_IMAGE: Final = "vllm/vllm-openai:v0.33.0"
WEEKDAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
ENGINE_CONTAINER, PICKER_CONTAINER, ENVOY_CONTAINER = "engine", "picker", "envoy"
"""Names of the containers that overlays of pods refer to."""
INSTANCE: Final = "app.kubernetes.io/instance"
COMPONENT: Final = "app.kubernetes.io/component"
MANAGED: Final = "app.kubernetes.io/managed-by"
"""This label and the two above are those by which Services, workloads and the operator select pods."""


class KvDtype(StrEnum):
    """``spec.engine.kvCacheDtype``; the value is what a user writes."""

    AUTO = "Auto"
    MODEL = "Model"
    FP8 = "FP8"
    FP8_E5M2 = "FP8E5M2"
    FP8_PER_TOKEN_HEAD = "FP8PerTokenHead"
    INT8_PER_TOKEN_HEAD = "Int8PerTokenHead"
    INT4_PER_TOKEN_HEAD = "Int4PerTokenHead"
    NVFP4 = "NVFP4"


class Source(StrEnum):
    """Origin of weights: the scheme of ``spec.model.source``."""

    HUB = "hf"
    CLAIM = "pvc"
    IMAGE = "oci"
    S3 = "s3"
    GCS = "gs"
    PATH = "path"


OBJECT_STORES: Final = (Source.S3, Source.GCS)
"""Origins that vLLM's Run:ai Model Streamer reads."""


class Task(StrEnum):
    """``spec.model.task``: what a model does with a prompt; the value is what a user writes."""

    GENERATE = "Generate"
    EMBED = "Embed"
    SCORE = "Score"
    CLASSIFY = "Classify"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKey:
    """One key of a Secret of the same namespace."""

    name: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter."""

    name: str
    source: str
    rank: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Facts of a model given by the user, because its source cannot be read."""

    config: Mapping[str, Any]
    """The keys of config.json that matter."""
    checkpoint_bytes: int = 0
    """0 = computed from the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCache:
    """Fields of ``spec.model.cache``: a volume that pods share; one of the two is set."""

    claim: str = ""
    host_path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """Fields of ``spec.model``."""

    kind: Source
    location: str
    """Repository, ``claim/path``, image reference, ``bucket/path`` or absolute path, without the scheme."""
    task: Task | None = None
    """None = as the files of the model say."""
    revision: str = ""
    served_name: str = ""
    token: SecretKey | None = None
    adapters: tuple[Adapter, ...] = ()
    shape: Shape | None = None
    cache: WeightsCache | None = None

    @property
    def claim(self) -> str:
        """Name of the PersistentVolumeClaim, for ``pvc://``."""
        return self.location.partition("/")[0]

    @property
    def path(self) -> str:
        """Folder inside the claim, for ``pvc://``."""
        return self.location.partition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculative:
    """Fields of ``spec.engine.speculative``."""

    method: str
    tokens: int
    model: str = ""
    """Repository or path of the draft model; empty for MTP and n-grams."""
    shape: Shape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Fields of ``spec.engine``."""

    image: str = DEFAULT_IMAGE
    version: str = ""
    quantization: str = ""
    """``FP8`` = quantize a 16-bit checkpoint while loading."""
    kv_dtype: KvDtype = KvDtype.AUTO
    attention_backend: str = ""
    prefix_caching: bool = True
    memory_percent: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    context: int | None = None
    """Decode context parallelism."""
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    speculative: Speculative | None = None
    scheduling_policy: str = ""
    api_key: SecretKey | None = None
    extra_args: tuple[str, ...] = ()
    env: tuple[Mapping[str, Any], ...] = ()
    """Entries of a container's ``env``, unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorSpec:
    """Fields of ``spec.accelerator``."""

    product: str = ""
    memory_bytes: int = 0
    resource: str = ""
    count: int | None = None
    """Accelerators of one replica."""
    per_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Fields of ``spec.workload``: hints, all of them optional."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    shared_prefix_tokens: int | None = None
    images: int | None = None
    """Images per request; 0 = never any."""
    concurrency: int | None = None
    """Requests at once, for each replica."""
    ttft_ms: int | None = None
    tpot_ms: int | None = None

    @property
    def typical_tokens(self) -> int | None:
        """Tokens of prompt and output of one request; None unless both hints are given."""
        if self.prompt_tokens is None or self.output_tokens is None:
            return None
        return self.prompt_tokens + self.output_tokens


class Upgrade(StrEnum):
    """Times at which a new operator may change the pods of a pool whose spec stays the same."""

    MANUAL = "Manual"
    WINDOW = "Window"
    AUTOMATIC = "Automatic"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceWindow:
    """Fields of ``spec.rollout.window``: a span of time on some days of the week."""

    days: tuple[str, ...] = ()
    """``Mon`` to ``Sun``, on which a window begins; empty = every day."""
    start_minute: int = 0
    """Minutes after midnight."""
    minutes: int = 60
    time_zone: str = "UTC"

    def is_open(self, now: datetime) -> bool:
        """Return whether a window has begun and not ended; ``now`` has a time zone."""
        latest = self._openings(now, (-1, 0))
        return any(begin <= now < begin + timedelta(minutes=self.minutes) for begin in latest)

    def next_opening(self, now: datetime) -> datetime:
        """Return the begin of the first window after ``now``, in UTC."""
        return min(begin for begin in self._openings(now, range(9)) if begin > now).astimezone(UTC)

    def _openings(self, now: datetime, days: Iterable[int]) -> list[datetime]:
        zone = ZoneInfo(self.time_zone)
        today = now.astimezone(zone).date()
        hour, minute = divmod(self.start_minute, 60)
        begins = [datetime.combine(today + timedelta(days=n), time(hour, minute), zone) for n in days]
        return [each for each in begins if not self.days or WEEKDAYS[each.weekday()] in self.days]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Fields of ``spec.rollout``."""

    strategy: str = "ReplaceFirst"
    max_unavailable: int | str = 1
    drain_seconds: int = 60
    startup_seconds: int | None = None
    """None = from the size of the weights."""
    upgrade: Upgrade = Upgrade.MANUAL
    window: MaintenanceWindow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """A named priority class of requests."""

    name: str
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerSpec:
    """Fields of ``spec.picker``."""

    replicas: int = 2
    mode: str = "Auto"
    tokenizer: str = ""
    priorities: tuple[Priority, ...] = ()
    image: str = ""
    resources: Mapping[str, Any] = field(default_factory=dict)
    env: tuple[Mapping[str, Any], ...] = ()
    pod_template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySpec:
    """Fields of ``spec.gateway``."""

    mode: str = "None"
    flavor: str = "InferencePool"
    parents: tuple[Mapping[str, Any], ...] = ()
    """Gateways of the pool's own route; none: it has no route, others name its InferencePool."""
    hostnames: tuple[str, ...] = ()
    failure_mode: str = "FailOpen"
    failover_endpoints: int = 3
    """Endpoints named in each answer: the one picked, and those for retries. By default 1 for gateways
    ``of_extension``, most of which take no list."""
    pod_template: Mapping[str, Any] = field(default_factory=dict)
    """Overlay of the pods of the pool's own Envoy."""

    @property
    def of_extension(self) -> bool:
        """Return whether any gateway that implements the Gateway API Inference Extension may be attached."""
        return (self.mode, self.flavor) == ("Route", "InferencePool")

    @property
    def has_route(self) -> bool:
        """Return whether the operator creates a route to the pool."""
        return self.mode == "Route" and bool(self.parents)

    @property
    def is_envoy(self) -> bool:
        """Return whether the gateway is known to be an Envoy: the pool's own, or Envoy Gateway's."""
        return self.mode == "Envoy" or (self.mode, self.flavor) == ("Route", "EnvoyGateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSpec:
    """Fields of ``spec.tracing``: where traces of the pool's Envoy, pickers and engines go."""

    endpoint: str
    """``http://host:port`` of a collector's OTLP over gRPC."""
    sampling_percent: int = 10
    """Of the requests that come without a trace context."""
    engines: bool = True

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of the collector."""
        host, _, port = self.endpoint.removeprefix("http://").rpartition(":")
        return host, int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """RDMA devices of one pod."""

    resource: str
    count: int = 1
    ipc_lock: bool = True
    """Run as root with the capability IPC_LOCK."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterconnectSpec:
    """Fields of ``spec.interconnect``, for replicas over several nodes."""

    placement: str = "Preferred"
    topology_key: str = "topology.kubernetes.io/zone"
    """Node label within one value of which a replica's pods are."""
    rdma: Rdma | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPolicySpec:
    """Fields of ``spec.networkPolicy``."""

    mode: str = "Auto"
    clients: tuple[Mapping[str, Any], ...] = ()
    """``from``: peers of a NetworkPolicy that may reach engines; empty = as far as the gateway is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One InferencePool of ``kvist.dev``."""

    name: str
    namespace: str
    uid: str = ""
    generation: int = 0
    model: ModelRef
    engine: EngineSpec = EngineSpec()
    accelerator: AcceleratorSpec = AcceleratorSpec()
    workload: Workload = Workload()
    offload: Offload = field(default_factory=Offload)
    disaggregation: Disaggregation | None = None
    """None: each engine computes the prompts of its own requests."""
    role: Role | None = None
    """Set in the pools that ``pools_by_role`` makes of a disaggregated one."""
    replicas: int = 1
    paused: bool = False
    """Nothing is written except the status and certificates."""
    rollout: Rollout = Rollout()
    picker: PickerSpec = PickerSpec()
    gateway: GatewaySpec = GatewaySpec()
    network: NetworkPolicySpec = NetworkPolicySpec()
    interconnect: InterconnectSpec = InterconnectSpec()
    tracing: TracingSpec | None = None
    """None: no traces, unless flags and variables of the user ask for them."""
    pod_monitor: str = "Auto"
    pod_template: Mapping[str, Any] = field(default_factory=dict)
    preset: Preset | None = None
    """The preset that was merged into this spec."""

    @property
    def served_name(self) -> str:
        """The model name clients use: ``spec.model.servedName``, or the pool's name."""
        return self.model.served_name or self.name

    @property
    def by_priority(self) -> bool:
        """Whether engines schedule by priority: as requested, otherwise if priority classes are declared."""
        if self.engine.scheduling_policy:
            return self.engine.scheduling_policy == "Priority"
        return bool(self.picker.priorities)
