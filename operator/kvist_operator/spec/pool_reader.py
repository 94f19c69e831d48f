"""InferencePool dict → ``Pool``: the only reader of raw spec keys. Pure.

The API server has checked types and bounds before; this does so again, for ``kvist plan``, and says more.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvist_operator.engine_flags import check_extra, parse_version
from kvist_operator.errors import SpecError

from . import kubernetes
from .fields import Fields
from .pool import (
    DEFAULT_IMAGE,
    AcceleratorSpec,
    Adapter,
    EngineSpec,
    GatewaySpec,
    KvDtype,
    ModelRef,
    Offload,
    PickerSpec,
    Pool,
    Priority,
    Rollout,
    Shape,
    Source,
    Speculative,
    Workload,
)

KIND: Final = "InferencePool"
GROUP: Final = "kvist.dev"
SOURCES: Final = (
    "write hf://org/model, pvc://claim/path, oci://image or an absolute path in the engine's image"
)
_PART: Final = r"(?!\.\.?(/|$))[^/\s\x00-\x1f\x7f]+"
"""Of a path: no way up in it."""
LOCATIONS: Final[Mapping[str, str]] = {
    Source.HUB: r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?/*",
    Source.CLAIM: rf"[a-z0-9][a-z0-9.-]*(/{_PART})*/*",
    Source.IMAGE: r"[A-Za-z0-9][^\s\x00-\x1f\x7f]*",
}
METHODS: Final = ("MTP", "EAGLE", "EAGLE3", "DraftModel", "NGram", "Suffix")
NAME_LENGTH: Final = 40
LEAST_BYTES: Final = 1 << 20
"""Less memory than this is a number without its unit."""
MAX_PRIORITY: Final = 2**31 - 1
MODEL_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._:/-]*"
ADAPTER_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*"
"""Part of a path, too: no way up in it."""
CLASS_NAME: Final = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
HOSTNAME: Final = r"(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"


def read_pool(resource: Mapping[str, Any]) -> Pool:
    """The resource as frozen data.

    Raises:
        SpecError: names the field, what is wrong with it and what to write.
    """
    _check_kind(resource)
    meta = Fields(resource.get("metadata") or {}, "metadata")
    name = _name(meta)
    spec = Fields(resource.get("spec") or {}, "spec")
    pool = Pool(
        name=name,
        namespace=meta.text("namespace", "default"),
        uid=meta.text("uid"),
        generation=meta.number("generation", 0, high=2**63 - 1),
        model=_model(spec.section("model")),
        engine=_engine(spec.section("engine")),
        accelerator=_accelerator(spec.section("accelerator")),
        workload=_workload(spec.section("workload")),
        offload=_offload(spec.section("offload")),
        replicas=spec.number("replicas", 1, high=10_000),
        rollout=_rollout(spec.section("rollout")),
        picker=_picker(spec.section("picker")),
        gateway=_gateway(spec.section("gateway")),
        pod_monitor=_monitoring(spec.section("monitoring")),
        pod_template=kubernetes.template(spec.section("podTemplate")),
    )
    spec.done()
    return pool


def _name(meta: Fields) -> str:
    name = meta.required("name", "the pool needs one")
    if len(name) > NAME_LENGTH:
        raise SpecError("metadata.name", f"{len(name)} characters; at most {NAME_LENGTH}, children add to it")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        rule = "a letter first, then lower-case letters, digits and dashes: Services are named after it"
        raise SpecError("metadata.name", f"{name!r}: {rule}")
    return name


def _check_kind(resource: Mapping[str, Any]) -> None:
    group = str(resource.get("apiVersion") or "").partition("/")[0]
    if resource.get("kind") != KIND or group != GROUP:
        found = f"{resource.get('kind')} of {group or 'no group'}"
        hint = f"apiVersion: {GROUP}/v1alpha1, kind: {KIND}"
        raise SpecError("kind", f"{found} is not an {KIND} of {GROUP}: write {hint}")


def _model(f: Fields) -> ModelRef:
    kind, location = _source(f.required("source", SOURCES), f.at("source"))
    model = ModelRef(
        kind=kind,
        location=location,
        revision=f.text("revision", most=128),
        served_name=f.text("servedName", pattern=MODEL_NAME, most=128),
        token=kubernetes.secret(f.optional("tokenSecretRef")),
        adapters=tuple(_adapter(a) for a in f.sections("adapters", most=64)),
        shape=_shape(f.optional("shape")),
    )
    _once([adapter.name for adapter in model.adapters], f.at("adapters"), "names are models for clients")
    f.done()
    return model


def _once(names: Sequence[str], path: str, why: str) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise SpecError(path, f"{twice!r} is there twice; {why}")


def _source(text: str, path: str) -> tuple[Source, str]:
    if text.endswith(".gguf"):
        raise SpecError(path, f"{text!r}: GGUF is no format for serving under load; take safetensors")
    return split_source(text, path)


def split_source(text: str, path: str) -> tuple[Source, str]:
    """``hf://org/model`` → (Source.HUB, ``org/model``). Raises SpecError with this path."""
    scheme, colon, rest = text.partition("://")
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise SpecError(path, f"{text!r} has characters that nobody can read: {SOURCES}")
    if text.startswith("/"):
        return Source.PATH, text
    if not colon:
        raise SpecError(path, f"{text!r} has no scheme: {SOURCES}")
    if scheme not in LOCATIONS or not re.fullmatch(LOCATIONS[scheme], rest):
        raise SpecError(path, f"{text!r} is no source: {SOURCES}")
    return Source(scheme), rest.rstrip("/")


def _adapter(f: Fields) -> Adapter:
    found = Adapter(
        name=f.required("name", "clients ask for it as a model", pattern=ADAPTER_NAME, most=128),
        source=f.required("source", SOURCES),
        rank=f.number("rank", 16, low=1, high=512),
    )
    split_source(found.source, f.at("source"))
    if found.rank not in (1, 8, 16, 32, 64, 128, 256, 320, 512):
        raise SpecError(f.at("rank"), f"{found.rank} is not one of 1, 8, 16, 32, 64, 128, 256, 320, 512")
    f.done()
    return found


def _shape(f: Fields | None) -> Shape | None:
    if f is None:
        return None
    config = f.free("config")
    if not config:
        raise SpecError(f.at("config"), "is missing: the keys of the model's config.json")
    found = Shape(config=config, checkpoint_bytes=f.quantity("checkpointSize"))
    f.done()
    return found


def _engine(f: Fields) -> EngineSpec:
    engine = EngineSpec(
        image=f.text("image", DEFAULT_IMAGE, pattern=".+", most=512),
        version=f.text("version", most=64),
        quantization=f.text("quantization", choices=("FP8",)),
        kv_dtype=KvDtype(f.text("kvCacheDtype", KvDtype.AUTO, choices=[str(k) for k in KvDtype])),
        attention_backend=f.text("attentionBackend", pattern=r"[A-Z][A-Z0-9_]*", most=64),
        prefix_caching=f.switch("prefixCaching", True),
        memory_percent=f.whole("gpuMemoryUtilizationPercent", low=10, high=99),
        max_model_len=f.whole("maxModelLen", low=128),
        max_num_seqs=f.whole("maxNumSeqs", high=65_536),
        max_num_batched_tokens=f.whole("maxNumBatchedTokens", low=64, high=1_048_576),
        tensor=f.whole("tensorParallelSize", high=64),
        pipeline=f.whole("pipelineParallelSize", high=64),
        data=f.whole("dataParallelSize", high=64),
        speculative=_speculative(f.optional("speculative")),
        scheduling_policy=f.text("schedulingPolicy", choices=("FCFS", "Priority")),
        extra_args=f.texts("extraArgs", most=64, each=4096),
        env=tuple(kubernetes.env(e) for e in f.sections("env", most=64)),
    )
    _once([entry["name"] for entry in engine.env], f.at("env"), "leave one out")
    check_extra(engine.extra_args, f.at("extraArgs"))
    if engine.version and parse_version(engine.version) is None:
        raise SpecError(f.at("version"), f"{engine.version!r} is no version; write it like 0.33.0")
    _check_pair(engine, f)
    f.done()
    return engine


def _check_pair(engine: EngineSpec, f: Fields) -> None:
    seqs, batched = engine.max_num_seqs, engine.max_num_batched_tokens
    if seqs and batched and batched < seqs:
        raise SpecError(
            f.at("maxNumBatchedTokens"),
            f"{batched} is less than maxNumSeqs ({seqs}): each takes a token a step",
        )


def _speculative(f: Fields | None) -> Speculative | None:
    if f is None:
        return None
    method = f.text("method", "", choices=METHODS)
    if not method:
        raise SpecError(f.at("method"), f"is missing: one of {', '.join(METHODS)}")
    found = Speculative(
        method=method,
        tokens=f.number("tokens", 3, low=1, high=32),
        model=f.text("model", most=512),
        shape=_shape(f.optional("shape")),
    )
    needs = method in ("EAGLE", "EAGLE3", "DraftModel")
    if needs and not found.model:
        raise SpecError(f.at("model"), f"is missing: {method} needs a draft model, hf://org/draft or a path")
    if found.model and not needs:
        raise SpecError(f.at("model"), f"{method} takes no draft model; leave it out")
    f.done()
    return found


def _accelerator(f: Fields) -> AcceleratorSpec:
    found = AcceleratorSpec(
        product=f.text("product", most=128),
        memory_bytes=f.quantity("memory", low=LEAST_BYTES),
        resource=f.text("resourceName", pattern=r"[A-Za-z0-9./_-]+", most=128),
        count=f.whole("count", high=512),
        per_node=f.whole("perNode", high=64),
    )
    f.done()
    return found


def _workload(f: Fields) -> Workload:
    found = Workload(
        prompt_tokens=f.whole("promptTokens"),
        output_tokens=f.whole("outputTokens"),
        shared_prefix_tokens=f.whole("sharedPrefixTokens", low=0),
        images=f.whole("imagesPerRequest", low=0, high=1000),
        concurrency=f.whole("concurrency", high=65_536),
        ttft_ms=f.whole("ttftMilliseconds"),
        tpot_ms=f.whole("tpotMilliseconds"),
    )
    prompt, shared = found.prompt_tokens, found.shared_prefix_tokens
    if prompt is not None and shared is not None and shared > prompt:
        raise SpecError(f.at("sharedPrefixTokens"), f"{shared} is more than promptTokens ({prompt})")
    f.done()
    return found


def _offload(f: Fields) -> Offload:
    found = Offload(
        cpu_bytes=f.quantity("cpu", low=LEAST_BYTES), disk_bytes=f.quantity("disk", low=LEAST_BYTES)
    )
    if found.disk_bytes and not found.cpu_bytes:
        raise SpecError(f.at("disk"), "needs spec.offload.cpu too: blocks reach the disk through memory")
    f.done()
    return found


def _rollout(f: Fields) -> Rollout:
    unavailable = f.get("maxUnavailable")
    found = Rollout(
        strategy=f.text("strategy", "ReplaceFirst", choices=("ReplaceFirst", "SurgeFirst")),
        max_unavailable=_amount(unavailable, f.at("maxUnavailable")),
        drain_seconds=f.number("drainSeconds", 60, high=3600),
        startup_seconds=f.whole("startupSeconds", low=30, high=86_400),
    )
    f.done()
    return found


def _amount(value: Any, path: str) -> int | str:
    if value is None:
        return 1
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if (
        isinstance(value, str)
        and value.endswith("%")
        and value[:-1].isdigit()
        and 1 <= int(value[:-1]) <= 100
    ):
        return value
    raise SpecError(path, f"{value!r} is neither a number above 0 nor a percentage like 25%")


def _picker(f: Fields) -> PickerSpec:
    found = PickerSpec(
        replicas=f.number("replicas", 2, low=1, high=64),
        mode=f.text("mode", "Auto", choices=("Auto", "Approximate", "Off")),
        tokenizer=f.text("tokenizer"),
        priorities=tuple(_priority(p) for p in f.sections("priorities", most=32)),
        image=f.text("image", most=512),
        resources=kubernetes.resources(f.section("resources")),
    )
    if found.tokenizer:
        split_source(found.tokenizer, f.at("tokenizer"))
    _once([p.name for p in found.priorities], f.at("priorities"), "a class has one value")
    f.done()
    return found


def _priority(f: Fields) -> Priority:
    value = f.number("value", 0, low=-MAX_PRIORITY, high=MAX_PRIORITY)
    name = f.required("name", "requests name their class", pattern=CLASS_NAME, most=63)
    f.done()
    return Priority(name=name, value=value)


def _gateway(f: Fields) -> GatewaySpec:
    found = GatewaySpec(
        mode=f.text("mode", "None", choices=("None", "Envoy", "Route")),
        flavor=f.text("flavor", "InferencePool", choices=("InferencePool", "EnvoyGateway")),
        parents=tuple(kubernetes.parent(p) for p in f.sections("parentRefs", most=16)),
        hostnames=f.texts("hostnames", most=32, each=kubernetes.NAME, pattern=HOSTNAME),
        failure_mode=f.text("failureMode", "FailOpen", choices=("FailOpen", "FailClose")),
        failover_endpoints=f.number("failoverEndpoints", 3, low=1, high=16),
    )
    if found.mode == "Route" and not found.parents:
        raise SpecError(f.at("parentRefs"), "is missing: mode Route needs the Gateway to attach to")
    f.done()
    return found


def _monitoring(f: Fields) -> str:
    found = f.text("podMonitor", "Auto", choices=("Auto", "Enabled", "Disabled"))
    f.done()
    return found
