"""Reader of the custom resource: an InferencePool as a dict → ``Pool``. Pure.

The API server has already checked types and bounds. They are checked again here for ``kvist plan``, with
messages that say what to write instead.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from kvist_operator.engine_version import check_image, engine_version, parse_version
from kvist_operator.errors import SpecError
from kvist_operator.extra_args import read_extra
from kvist_operator.flag_table import dotted, flags
from kvist_operator.flag_values import choice_problem

from .consistency import check_pool
from .disaggregation_reader import check_disaggregation, read_disaggregation
from .fields import (
    NAME_LENGTH,
    OBJECT_NAME,
    Fields,
    check_unique,
    read_env,
    read_parent,
    read_resources,
    read_secret,
)
from .interconnect_reader import read_interconnect
from .network_policy_reader import read_network_policy
from .offload_reader import MIN_BYTES, read_offload
from .pod_template import ENGINES, ENVOYS, PICKERS, check_templates, read_template
from .pool import (
    DEFAULT_IMAGE,
    OBJECT_STORES,
    AcceleratorSpec,
    Adapter,
    EngineSpec,
    GatewaySpec,
    KvDtype,
    ModelRef,
    PickerSpec,
    Pool,
    Priority,
    Shape,
    Source,
    Speculative,
    Task,
    WeightsCache,
    Workload,
)
from .preset import PRESET_KIND, Preset, preset_name, with_preset
from .rollout_reader import read_rollout
from .tracing_reader import read_tracing

KIND: Final = "InferencePool"
GROUP: Final = "kvist.dev"
VERSION: Final = "v1alpha1"
OBJECT_FIELDS: Final = frozenset(("apiVersion", "kind", "metadata", "spec", "status"))
SOURCES: Final = (
    "write hf://org/model, pvc://claim/path, oci://image or an absolute path in the engine's image"
)
MODEL_SOURCES: Final = SOURCES.replace(" or ", ", s3://bucket/path, gs://bucket/path or ")
_PART: Final = r"(?!\.\.?(/|$))[^/\s\x00-\x1f\x7f]+"
"""One part of a path; neither ``.`` nor ``..``."""
LOCATIONS: Final[Mapping[str, str]] = {
    Source.HUB: r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?/*",
    Source.CLAIM: rf"[a-z0-9][a-z0-9.-]*(/{_PART})*/*",
    Source.IMAGE: r"[A-Za-z0-9][^\s\x00-\x1f\x7f]*",
    **dict.fromkeys(OBJECT_STORES, rf"[a-z0-9][a-z0-9._-]+(/{_PART})*/*"),
}
METHODS: Final = ("MTP", "EAGLE", "EAGLE3", "DraftModel", "NGram", "Suffix")
DRAFT_METHODS: Final = ("EAGLE", "EAGLE3", "DraftModel")
LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
POOL_NAME_LENGTH: Final = 40
MAX_PRIORITY: Final = 2**31 - 1
MODEL_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._:/-]*"
ADAPTER_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*"
"""Used as part of a path too, so neither ``.`` nor ``..``."""
CLASS_NAME: Final = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
HOSTNAME: Final = rf"(\*\.)?{OBJECT_NAME}"


def read_pool(
    resource: Mapping[str, Any],
    *,
    default_image: str = DEFAULT_IMAGE,
    preset: Mapping[str, Any] | None = None,
) -> Pool:
    """Return the resource as frozen data; ``default_image`` is for engines of pools that set none.

    ``preset`` is the object that ``spec.presetRef`` names; None where there is none.

    Raises:
        SpecError: an invalid field; the message says what is wrong with it and what to write.
    """
    name = preset_name(resource)
    if not name:
        return _read_pool(resource, default_image, None)
    if preset is None:
        raise SpecError("spec.presetRef", f"there is no {PRESET_KIND} {name}: create it, or correct the name")
    merged, used = with_preset(resource, preset)
    try:
        return _read_pool(merged, default_image, used)
    except SpecError as error:
        if any(f"{error.field}.".startswith(f"{each}.") for each in used.fields):
            raise SpecError(f"preset {used}: {error.field}", error.problem) from error
        raise


def _read_pool(resource: Mapping[str, Any], default_image: str, preset: Preset | None) -> Pool:
    group = str(resource.get("apiVersion") or "").partition("/")[0]
    if resource.get("kind") != KIND or group != GROUP:
        found = f"{resource.get('kind')} of {group or 'no group'}"
        hint = f"apiVersion: {GROUP}/{VERSION}, kind: {KIND}"
        raise SpecError("kind", f"{found} is not an {KIND} of {GROUP}: write {hint}")
    if resource["apiVersion"] != f"{GROUP}/{VERSION}":
        problem = f"{resource['apiVersion']!r} is not served: write {GROUP}/{VERSION}"
        raise SpecError("apiVersion", problem)
    for key in sorted(resource.keys() - OBJECT_FIELDS, key=str):
        problem = f"is not a field of an {KIND}: settings of a pool belong below spec, indented"
        raise SpecError(str(key), problem)
    meta = Fields(resource.get("metadata") or {}, "metadata")
    name = _name(meta)
    spec = Fields(resource.get("spec") or {}, "spec")
    monitoring = spec.section("monitoring")
    pool = Pool(
        name=name,
        namespace=meta.text("namespace", "default"),
        uid=meta.text("uid"),
        generation=meta.number("generation", 0, high=2**63 - 1),
        model=_model(spec.section("model")),
        engine=_engine(spec.section("engine"), default_image),
        accelerator=_accelerator(spec.section("accelerator")),
        workload=_workload(spec.section("workload")),
        offload=read_offload(spec.section("offload")),
        disaggregation=read_disaggregation(spec.optional("disaggregation")),
        replicas=spec.number("replicas", 1, high=10_000),
        paused=spec.boolean("paused"),
        rollout=read_rollout(spec.section("rollout")),
        picker=_picker(spec.section("picker")),
        gateway=_gateway(spec.section("gateway")),
        network=read_network_policy(spec.section("networkPolicy")),
        interconnect=read_interconnect(spec.section("interconnect")),
        tracing=read_tracing(spec.optional("tracing")),
        pod_monitor=monitoring.text("podMonitor", "Auto", choices=("Auto", "Enabled", "Disabled")),
        pod_template=read_template(spec.section("podTemplate"), ENGINES),
        preset=preset,
    )
    _preset_ref(spec.optional("presetRef"))
    monitoring.done(pool)
    spec.done(pool)
    check_templates(pool)
    check_pool(pool)
    check_disaggregation(pool)
    return pool


def _preset_ref(f: Fields | None) -> None:
    """Check the reference; the preset itself has been merged. Raises SpecError."""
    if f is not None:
        hint = f"the name of an {PRESET_KIND}"
        f.required("name", hint, pattern=OBJECT_NAME, like="h100", most=NAME_LENGTH)
        f.done(None)


def _name(meta: Fields) -> str:
    name = meta.required("name", "the pool needs one")
    if len(name) > POOL_NAME_LENGTH:
        problem = f"{len(name)} characters; at most {POOL_NAME_LENGTH}, because children's names are longer"
        raise SpecError("metadata.name", problem)
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        rule = "write a letter first, then lower-case letters, digits and dashes: Services are named after it"
        raise SpecError("metadata.name", f"{name!r}: {rule}")
    return name


def _model(f: Fields) -> ModelRef:
    source = f.required("source", MODEL_SOURCES)
    if source.endswith(".gguf"):
        raise SpecError(f.at("source"), f"{source!r}: vLLM does not load GGUF files; use safetensors")
    kind, location = split_source(source, f.at("source"), stores=True)
    task = f.text("task", choices=[str(each) for each in Task])
    model = ModelRef(
        kind=kind,
        location=location,
        task=Task(task) if task else None,
        revision=f.text("revision", most=128),
        served_name=f.text("servedName", pattern=MODEL_NAME, like="qwen3-8b", most=128),
        token=read_secret(f.optional("tokenSecretRef")),
        adapters=tuple(_adapter(a) for a in f.sections("adapters", most=64)),
        shape=_shape(f.optional("shape")),
        cache=_cache(f.optional("cache")),
    )
    if model.cache and kind is not Source.HUB:
        raise SpecError(f.at("cache"), f"is for weights of the hub; {source} needs none: leave it out")
    names = [adapter.name for adapter in model.adapters]
    check_unique(names, f.at("adapters"), "clients use it as a model name")
    return f.done(model)


def _cache(f: Fields | None) -> WeightsCache | None:
    if f is None:
        return None
    cache = WeightsCache(
        claim=f.text("claim", pattern=OBJECT_NAME, like="models", most=NAME_LENGTH),
        host_path=f.text("hostPath", pattern=rf"(/{_PART})+", like="/var/cache/models", most=1024),
    )
    if bool(cache.claim) == bool(cache.host_path):
        raise SpecError(f.path, "needs exactly one of claim and hostPath")
    return f.done(cache)


def split_source(text: str, path: str, *, stores: bool = False) -> tuple[Source, str]:
    """Split a model source: ``hf://org/model`` → (Source.HUB, ``org/model``).

    ``stores``: object stores are allowed, which only engines read, and only for the model itself.

    Raises:
        SpecError: it is no source, or not one that is allowed here.
    """
    sources = MODEL_SOURCES if stores else SOURCES
    scheme, colon, rest = text.partition("://")
    if scheme in OBJECT_STORES and not stores:
        raise SpecError(path, f"{text!r}: vLLM reads only the model from object stores: {sources}")
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise SpecError(path, f"{text!r} contains control characters: {sources}")
    if text.startswith("/"):
        return Source.PATH, text
    if not colon:
        raise SpecError(path, f"{text!r} has no scheme: {sources}")
    if scheme not in LOCATIONS or not re.fullmatch(LOCATIONS[scheme], rest):
        raise SpecError(path, f"{text!r} is not a model source: {sources}")
    return Source(scheme), rest.rstrip("/")


def _adapter(f: Fields) -> Adapter:
    adapter = Adapter(
        name=f.required(
            "name", "clients use it as a model name", pattern=ADAPTER_NAME, like="sql-lora", most=128
        ),
        source=f.required("source", SOURCES),
        rank=f.number("rank", 16, low=1, high=512),
    )
    split_source(adapter.source, f.at("source"))
    if adapter.rank not in LORA_RANKS:
        raise SpecError(f.at("rank"), f"{adapter.rank} is not one of {', '.join(map(str, LORA_RANKS))}")
    return f.done(adapter)


def _shape(f: Fields | None) -> Shape | None:
    if f is None:
        return None
    config = f.free("config")
    if not config:
        raise SpecError(f.at("config"), "is missing: write the keys of the model's config.json")
    return f.done(Shape(config=config, checkpoint_bytes=f.quantity("checkpointSize")))


def _engine(f: Fields, default_image: str) -> EngineSpec:
    engine = EngineSpec(
        image=f.text("image", default_image, pattern=".+", most=512),
        version=f.text("version", most=64),
        quantization=f.text("quantization", choices=("FP8",)),
        kv_dtype=KvDtype(f.text("kvCacheDtype", KvDtype.AUTO, choices=[str(k) for k in KvDtype])),
        attention_backend=f.text("attentionBackend", pattern=r"[A-Z][A-Z0-9_]*", like="FLASHINFER", most=64),
        prefix_caching=f.switch("prefixCaching", True),
        memory_percent=f.whole("gpuMemoryUtilizationPercent", low=10, high=99),
        max_model_len=f.whole("maxModelLen", low=128),
        max_num_seqs=f.whole("maxNumSeqs", high=65_536),
        max_num_batched_tokens=f.whole("maxNumBatchedTokens", low=64, high=1_048_576),
        tensor=f.whole("tensorParallelSize", high=64),
        pipeline=f.whole("pipelineParallelSize", high=64),
        data=f.whole("dataParallelSize", high=64),
        context=f.whole("decodeContextParallelSize", high=64),
        max_loras=f.whole("maxLoras", high=256),
        max_cpu_loras=f.whole("maxCpuLoras", high=4096),
        speculative=_speculative(f.optional("speculative")),
        scheduling_policy=f.text("schedulingPolicy", choices=("FCFS", "Priority")),
        api_key=read_secret(f.optional("apiKeySecretRef"), "api-key"),
        extra_args=f.texts("extraArgs", most=64, each=4096),
        env=tuple(read_env(e) for e in f.sections("env", most=64)),
    )
    check_unique([entry["name"] for entry in engine.env], f.at("env"), "leave one out")
    if engine.version and parse_version(engine.version) is None:
        raise SpecError(f.at("version"), f"{engine.version!r} is not a version of vLLM; write it like 0.33.0")
    _check_engine(engine, f)
    seqs, batched = engine.max_num_seqs, engine.max_num_batched_tokens
    if seqs and batched and batched < seqs:
        problem = (
            f"{batched} is less than maxNumSeqs ({seqs}), and each sequence takes a token a step: raise it"
        )
        raise SpecError(f.at("maxNumBatchedTokens"), problem)
    loras, kept = engine.max_loras, engine.max_cpu_loras
    if loras and kept and kept < loras:
        raise SpecError(f.at("maxCpuLoras"), f"{kept} is less than maxLoras ({loras}): set at least {loras}")
    return f.done(engine)


def _check_engine(engine: EngineSpec, f: Fields) -> None:
    """Raise SpecError for what this version of vLLM does not accept."""
    check_image(engine.image, f.at("image"), DEFAULT_IMAGE)
    version = engine_version(engine.image, engine.version)
    read_extra(engine.extra_args, version)
    backends = flags(version.flags)["attention-backend"]
    problem = choice_problem(backends, engine.attention_backend) if engine.attention_backend else ""
    if problem and version.known:
        raise SpecError(f.at("attentionBackend"), f"{problem} (vLLM {dotted(version.flags)})")


def _speculative(f: Fields | None) -> Speculative | None:
    if f is None:
        return None
    method = f.text("method", "", choices=METHODS)
    if not method:
        raise SpecError(f.at("method"), f"is missing: one of {', '.join(METHODS)}")
    speculative = Speculative(
        method=method,
        tokens=f.number("tokens", 3, low=1, high=32),
        model=f.text("model", most=512),
        shape=_shape(f.optional("shape")),
    )
    if method in DRAFT_METHODS and not speculative.model:
        raise SpecError(f.at("model"), f"is missing: {method} needs a draft model, hf://org/draft or a path")
    if speculative.model and method not in DRAFT_METHODS:
        raise SpecError(f.at("model"), f"{method} takes no draft model; leave it out")
    return f.done(speculative)


def _accelerator(f: Fields) -> AcceleratorSpec:
    accelerator = AcceleratorSpec(
        product=f.text("product", most=128),
        memory_bytes=f.quantity("memory", low=MIN_BYTES),
        resource=f.text("resourceName", pattern=r"[A-Za-z0-9./_-]+", like="nvidia.com/gpu", most=128),
        count=f.whole("count", high=512),
        per_node=f.whole("perNode", high=64),
    )
    return f.done(accelerator)


def _workload(f: Fields) -> Workload:
    workload = Workload(
        prompt_tokens=f.whole("promptTokens"),
        output_tokens=f.whole("outputTokens"),
        shared_prefix_tokens=f.whole("sharedPrefixTokens", low=0),
        images=f.whole("imagesPerRequest", low=0, high=1000),
        concurrency=f.whole("concurrency", high=65_536),
        ttft_ms=f.whole("ttftMilliseconds"),
        tpot_ms=f.whole("tpotMilliseconds"),
    )
    prompt, shared = workload.prompt_tokens, workload.shared_prefix_tokens
    if prompt is not None and shared is not None and shared > prompt:
        raise SpecError(
            f.at("sharedPrefixTokens"), f"{shared} is more than promptTokens ({prompt}): raise promptTokens"
        )
    return f.done(workload)


def _picker(f: Fields) -> PickerSpec:
    picker = PickerSpec(
        replicas=f.number("replicas", 2, low=1, high=64),
        mode=f.text("mode", "Auto", choices=("Auto", "Approximate", "Off")),
        tokenizer=f.text("tokenizer"),
        priorities=tuple(_priority(p) for p in f.sections("priorities", most=32)),
        image=f.text("image", most=512),
        resources=read_resources(f.section("resources")),
        env=tuple(read_env(e) for e in f.sections("env", most=64)),
        pod_template=read_template(f.section("podTemplate"), PICKERS),
    )
    check_unique([entry["name"] for entry in picker.env], f.at("env"), "leave one out")
    if picker.tokenizer:
        split_source(picker.tokenizer, f.at("tokenizer"))
    check_unique([p.name for p in picker.priorities], f.at("priorities"), "a class has one value")
    return f.done(picker)


def _priority(f: Fields) -> Priority:
    value = f.number("value", 0, low=-MAX_PRIORITY, high=MAX_PRIORITY)
    name = f.required("name", "requests name their class", pattern=CLASS_NAME, like="interactive", most=63)
    return f.done(Priority(name=name, value=value))


def _gateway(f: Fields) -> GatewaySpec:
    mode = f.text("mode", "None", choices=("None", "Envoy", "Route"))
    flavor = f.text("flavor", "InferencePool", choices=("InferencePool", "EnvoyGateway"))
    bare = GatewaySpec(mode=mode, flavor=flavor)
    named = 1 if bare.of_extension else bare.failover_endpoints
    gateway = GatewaySpec(
        mode=mode,
        flavor=flavor,
        parents=tuple(read_parent(p) for p in f.sections("parentRefs", most=16)),
        hostnames=f.texts("hostnames", most=32, each=NAME_LENGTH, pattern=HOSTNAME, like="llm.example.com"),
        failure_mode=f.text("failureMode", "FailOpen", choices=("FailOpen", "FailClose")),
        failover_endpoints=f.number("failoverEndpoints", named, low=1, high=16),
        pod_template=read_template(f.section("podTemplate"), ENVOYS),
    )
    if gateway.mode == "Route" and not gateway.has_route and not gateway.of_extension:
        raise SpecError(f.at("parentRefs"), "is missing: flavor EnvoyGateway needs the Gateway to attach to")
    return f.done(gateway)
