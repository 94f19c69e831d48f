"""Translate llm-d's ``EndpointPickerConfig`` to flags, and note what is not translated.

Scorers, filters and producers of load and prefixes have no counterpart one by one: one cost in seconds takes
the place of all of them and of their weights.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_epp.errors import SettingsError
from kvist_epp.settings.arguments import parse_seconds
from kvist_kube.quantity import parse_bytes

Json = Mapping[str, Any]
KIND: Final = "EndpointPickerConfig"
GROUPS: Final = ("llm-d.ai/", "inference.networking.x-k8s.io/")

COST: Final = frozenset(
    (
        "active-request-scorer",
        "approx-prefix-cache-producer",
        "burst-prefix-cache-producer",
        "core-metrics-extractor",
        "endpoint-notification-source",
        "inflight-load-producer",
        "kv-cache-utilization-scorer",
        "load-aware-scorer",
        "lora-affinity-scorer",
        "metrics-data-source",
        "models-data-extractor",
        "models-data-source",
        "no-hit-lru-scorer",
        "precise-prefix-cache-producer",
        "precise-prefix-cache-scorer",
        "prefix-cache-affinity-filter",
        "prefix-cache-scorer",
        "queue-scorer",
        "running-requests-size-scorer",
        "single-profile-handler",
        "token-load-scorer",
        "token-producer",
        "tokenizer",
        "utilization-filter",
    )
)
"""Plugins whose work is done by the index, the load tracker and the cost."""
PICKERS: Final = ("max-score-picker", "random-picker", "weighted-random-picker")
"""Plugins of which the number of endpoints is read."""
_PARSERS: Final = ("anthropic-parser", "openai-parser", "passthrough-parser", "vllmhttp-parser")
_SPLIT: Final = "prefill and decode are not disaggregated: the picked endpoint computes the whole prompt"
_LABELS: Final = "kvist also picks the pods that this filter excludes: exclude them in the pool's selector"
_SESSIONS: Final = "not needed: requests of a session go where their prefix is cached"
_TARGETS: Final = (
    "latency targets of single requests are ignored; the picker minimizes the time to first token"
)
OTHERWISE: Final[Mapping[str, str]] = {
    "by-label": _LABELS,
    "by-label-selector": _LABELS,
    "label-selector-filter": _LABELS,
    "decode-filter": "pods with the role prefill or encode are never picked",
    "prefill-filter": _SPLIT,
    "encode-filter": _SPLIT,
    "disagg-profile-handler": _SPLIT,
    "pd-profile-handler": _SPLIT,
    "disagg-headers-handler": _SPLIT,
    "prefill-header-handler": _SPLIT,
    "prefix-based-pd-decider": _SPLIT,
    "always-disagg-pd-decider": _SPLIT,
    "data-parallel-profile-handler": "each rank with a port of its own is an endpoint",
    "latency-scorer": _TARGETS,
    "predicted-latency-producer": _TARGETS,
    "slo-headroom-tier-filter": _TARGETS,
    "session-affinity-filter": _SESSIONS,
    "session-affinity-scorer": _SESSIONS,
    "session-id-producer": _SESSIONS,
}
"""Plugins that have no counterpart, and what happens instead."""


@dataclass(frozen=True, slots=True)
class Understood:
    """A file, read."""

    argv: list[str]
    notes: list[str]


def read(text: str, where: str) -> Understood:
    """Translate the text of a file. Raises SettingsError if the text is not such a file."""
    whole = _document(text, where)
    plugins = [each for each in _list(whole.get("plugins")) if isinstance(each, Mapping)]
    argv = [word for each in plugins for word in _flags(each, where)]
    argv += _queue(_fields(whole.get("flowControl")), where)
    notes = [f"{where}: {note}" for note in (*_instead(plugins), *_missed(whole))]
    if not any(word.startswith("--model=") for word in argv):
        notes.append(f"{where}: no plugin names the model; --model hf://… makes picks precise")
    return Understood(argv, notes)


def _document(text: str, where: str) -> Json:
    import yaml

    try:
        whole = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"{where}: is not YAML: {error}") from error
    if not isinstance(whole, Mapping) or whole.get("kind") != KIND:
        raise SettingsError(f"{where}: is not an {KIND} of llm-d; kvist's own settings are flags (--help)")
    if not str(whole.get("apiVersion", "")).startswith(GROUPS):
        raise SettingsError(f"{where}: apiVersion {whole.get('apiVersion')!r} is not llm-d's")
    return whole


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _fields(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


def _flags(plugin: Json, where: str) -> Iterator[str]:
    """Yield the flags that a plugin's parameters are translated to."""
    kind, parameters = str(plugin.get("type")), _fields(plugin.get("parameters"))
    if name := _model(kind, parameters):
        yield f"--model=hf://{name}"
    events = _fields(parameters.get("kvEventsConfig"))
    if str(events.get("zmqEndpoint", "")).startswith(("tcp://*:", "tcp://0.0.0.0:")):
        yield f"--kv-events-bind={events['zmqEndpoint']}"
    if kind in PICKERS and "maxNumOfEndpoints" in parameters:
        yield f"--max-endpoints={_amount(parameters['maxNumOfEndpoints'], f'{where}: maxNumOfEndpoints')}"
    if kind == "file-discovery" and parameters.get("path"):
        yield f"--endpoints-file={parameters['path']}"


def _model(kind: str, parameters: Json) -> str:
    """The tokenizer's repository: of the token producer, or of the older precise scorer."""
    if kind in ("token-producer", "tokenizer"):
        return str(parameters.get("modelName") or "")
    pool = _fields(_fields(parameters.get("indexerConfig")).get("tokenizersPoolConfig"))
    return str(pool.get("modelName") or "")


def byte_amount(text: str) -> int:
    """Return the bytes of a quantity that may end in ``B``: ``1Gi``, ``512MB``. Raises ValueError."""
    return parse_bytes(text.removesuffix("B"))


_QUEUE: Final[Mapping[str, tuple[str, Callable[[str], float]]]] = {
    "maxRequests": ("--queue-requests", byte_amount),
    "maxBytes": ("--queue-bytes", byte_amount),
    "defaultRequestTTL": ("--queue-seconds", parse_seconds),
    "noEndpointRequestTTL": ("--empty-pool-seconds", parse_seconds),
}


def _queue(flow: Json, where: str) -> Iterator[str]:
    for key, (flag, convert) in _QUEUE.items():
        if flow.get(key) is not None:
            yield f"{flag}={_amount(flow[key], f'{where}: flowControl.{key}', convert)}"


def _amount(value: object, where: str, convert: Callable[[str], float] = byte_amount) -> str:
    try:
        return f"{convert(str(value)):.15g}"
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from error


def _instead(plugins: list[Json]) -> Iterator[str]:
    """Yield what happens instead of each plugin; those that the cost replaces share one line."""
    kinds = list(dict.fromkeys(str(each.get("type")) for each in plugins))
    if done := [kind for kind in kinds if kind in COST]:
        yield f"one cost in seconds replaces {', '.join(done)}; weights and parameters are not used"
    for kind in kinds:
        if kind in OTHERWISE:
            yield f"plugin {kind}: {OTHERWISE[kind]}"
        elif kind not in (*COST, *PICKERS, *_PARSERS, "file-discovery"):
            yield f"plugin {kind}: ignored; kvist has no equivalent"


def _missed(whole: Json) -> Iterator[str]:
    """Sections that say something else than plugins."""
    flow = _fields(whole.get("flowControl"))
    bands = [
        key for key in ("priorityBands", "defaultPriorityBand", "defaultNegativePriorityBand") if key in flow
    ]
    for key in bands:
        yield f"flowControl.{key}: ignored: a priority has no bounds; its tenants take turns"
    for key in ("usageLimitPolicyPluginRef", "saturationDetector", "enableEviction"):
        if flow.get(key):
            yield f"flowControl.{key}: capacity is set by --max-backlog-seconds and --max-num-seqs"
    if whole.get("saturationDetector"):
        yield "saturationDetector: capacity is set by --max-backlog-seconds and --max-num-seqs"
    if len(_list(whole.get("schedulingProfiles"))) > 1:
        yield "schedulingProfiles: all requests are scheduled the same way"
    layer = _fields(whole.get("dataLayer"))
    for key in ("peerDiscovery", "crossReplicaSyncerPluginRef"):
        if layer.get(key):
            yield f"dataLayer.{key}: replicas find each other by --replicas"
