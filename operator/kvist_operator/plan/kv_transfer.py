"""vLLM's KV connector for ``spec.offload``: refusals, its configuration, and who may share blocks. Pure.

Sources: ``v1/kv_offload``, ``distributed/kv_transfer/kv_connector/v1/offloading`` and
``v1/attention/backends/rocm_*`` of vLLM 0.30 to 0.33, and ``lmcache/integration/vllm`` of LMCache 0.5.6.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

from kvist_operator.engine_version import EngineVersion
from kvist_operator.errors import SpecError
from kvist_operator.flag_table import Version, dotted
from kvist_operator.json_digest import json_digest
from kvist_operator.memory.layout import EngineSettings, Layout
from kvist_operator.models.shape import Facts
from kvist_operator.spec.offload import LMCACHE_PORT
from kvist_operator.spec.pool import Pool

from .kv import KvChoice
from .nixl import block_variables, nixl_connector, nixl_environment
from .plan import Hardware, StorageNamespace
from .resources import DISK_MOUNT, SHARED_MOUNT

SINCE: Final[Version] = (0, 30)
"""First version whose tiers are known to describe their events and to say where they are. The tiers pass
unknown keys to constructors, which fail."""
NO_CONNECTOR: Final = ("ROCM_ATTN",)
"""Attention backends whose cache has a layout that no KV connector reads (``supports_kv_connector``)."""
LMCACHE_MODULE: Final = "lmcache.integration.vllm.lmcache_mp_connector"
"""LMCache's own class, which reports what the server has; the one inside vLLM reports nothing."""
LMCACHE_MODE: Final = "LMCACHE_MP_TRANSFER_MODE"
ENGINE_DRIVEN: Final = "engine_driven"
"""Engines send their blocks to LMCache's server. The other mode hands it a handle of the GPU's memory, which
needs the IPC namespace of the host and a GPU in the server's pod."""
HEARTBEAT: Final = 3.0
"""Seconds between LMCache's looks at its server, and until one counts as failed: a request that comes after
a server has died waits for both. LMCache's default of 10 made it wait for 15 seconds."""
ANSWER: Final = 20.0
"""Seconds in which LMCache's server has to answer anything else. An engine that stores or loads when the
server dies does nothing else meanwhile, for two answers of a store: ten minutes with LMCache's default of
300. An engine that starts ends if the server is not there by then."""
HASH: Final = "sha256_cbor"
HASH_SEED: Final = "PYTHONHASHSEED"
SLUG: Final = 40
"""Most characters of the model's name in a namespace; a label value has at most 63."""
DIGEST: Final = 12
SERVER_DIGEST: Final = 6
"""Characters of the namespace's hash in the name of LMCache's servers."""
SHOWN: Final = 128
"""Most characters of a setting that are shown."""


def needs_connector(pool: Pool) -> bool:
    """Return whether engines have a KV connector: for slower places of blocks, or for other engines."""
    return pool.offload.needs_connector or pool.role is not None


def check_offload(pool: Pool, hardware: Hardware, version: EngineVersion) -> None:
    """Raise SpecError for places of KV cache blocks that the accelerator or this vLLM does not have."""
    offload, row = pool.offload, hardware.accelerator
    if offload.cpu_bytes and row.vendor not in ("nvidia", "amd"):
        raise SpecError("spec.offload.cpu", f"{row.name} engines cannot offload: leave it out")
    if offload.lmcache and pool.model.adapters:
        problem = (
            "LMCache does not tell the blocks of adapters apart, so that an adapter would answer with the "
            "base model's: use cpu, disk or shared, or a pool without adapters"
        )
        raise SpecError("spec.offload.lmcache", problem)
    backend = pool.engine.attention_backend
    if needs_connector(pool) and backend in NO_CONNECTOR:
        where = "offloaded" if offload.needs_connector else "sent to other engines"
        problem = f"{backend} has a cache that cannot be {where}: use TRITON_ATTN, or leave it out"
        raise SpecError("spec.engine.attentionBackend", problem)
    if version.stated is None or version.stated >= SINCE:
        return
    newer = f"vLLM {dotted(version.stated)} is older than {dotted(SINCE)}, the first that is known to have it"
    for field, given in (
        ("evictionPolicy", offload.eviction),
        ("generatedTokens", offload.generated),
        ("hostPath", offload.host_path),
        ("shared", offload.shared),
        ("lmcache", offload.lmcache),
    ):
        if given:
            raise SpecError(f"spec.offload.{field}", f"{newer}: use a newer image, or leave it out")


def check_layout(pool: Pool, hardware: Hardware, layout: Layout) -> None:
    """Raise SpecError for files of blocks where the ranks of an engine are on several nodes.

    vLLM's scheduler writes the memory of its own node to files (``TieringOffloadingSpec.get_manager``), in
    which the parts of workers on other nodes would be missing.
    """
    if layout.gpus // layout.data <= hardware.per_node:
        return
    for field, given in (("disk", pool.offload.disk_bytes), ("shared", pool.offload.shared)):
        if given:
            problem = (
                f"an engine of this plan is on {hardware.nodes(layout)} nodes, and vLLM writes only the "
                "blocks of the first node to files: leave it out, or let the engine fit one node (larger "
                "accelerators, a smaller spec.engine.maxModelLen)"
            )
            raise SpecError(f"spec.offload.{field}", problem)


def engines_per_node(hardware: Hardware, layout: Layout) -> int:
    """Return how many data-parallel ranks a node runs, each of which has a memory of its own for blocks."""
    return max(1, min(layout.gpus, hardware.per_node) * layout.data // layout.gpus)


def transfer_arguments(
    pool: Pool, hardware: Hardware, layout: Layout, settings: EngineSettings, folder: str, *, events: bool
) -> dict[str, Any]:
    """Return the arguments that offload blocks, or send them to other engines; none without both.

    ``folder``: the namespace of blocks that outlive a pod. ``events``: engines publish KV events.
    """
    offload = pool.offload
    between: list[dict[str, Any]] = []
    if pool.role is not None and pool.disaggregation is not None:
        # asked first: it has blocks for requests only that another engine has prefilled
        between = [nixl_connector(pool.role, pool.disaggregation)]
    if not offload.needs_connector:
        return {"kv_transfer_config": combined(*between)} if between else {}
    described = settings.version >= SINCE
    if not described and not offload.disk_bytes and not between:
        return {"kv_offloading_size": round(offload.cpu_bytes / 2**30, 2)}
    if offload.lmcache:
        return {"kv_transfer_config": combined(*between, _lmcache(pool, folder))}
    extra: dict[str, Any] = {"cpu_bytes_to_use": offload.cpu_bytes // engines_per_node(hardware, layout)}
    if described and events:
        extra["self_describing_kv_events"] = True
    if offload.generated:
        extra["offload_prompt_only"] = False
    if offload.eviction:
        extra["eviction_policy"] = offload.eviction.lower()
    tiers = []
    if offload.disk_bytes:
        inside = f"{DISK_MOUNT}/{folder}" if offload.host_path else DISK_MOUNT
        tiers.append(_files(inside, "LOCAL" if described else "", events=events))
    if offload.shared:
        tiers.append(_files(f"{SHARED_MOUNT}/{offload.shared.path}/{folder}", "REMOTE", events=events))
    if tiers:
        extra = {"spec_name": "TieringOffloadingSpec", **extra, "secondary_tiers": tiers}
    return {"kv_transfer_config": combined(*between, connector("OffloadingConnector", extra))}


def connector(name: str, extra: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the configuration of one connector. Blocks that cannot be loaded are computed again: by default
    vLLM would answer such a request with an error."""
    return {
        "kv_connector": name,
        **more,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }


def combined(*connectors: Mapping[str, Any]) -> dict[str, Any]:
    """Return one configuration for several connectors, the one that is asked first at the beginning.

    One alone stays as it is; ``MultiConnector`` loads from the first that has blocks and stores into all.
    """
    if len(connectors) == 1:
        return dict(connectors[0])
    return connector("MultiConnector", {"connectors": [dict(each) for each in connectors]})


def _files(folder: str, locality: str, *, events: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "fs", "root_dir": folder}
    if locality:
        found |= {"enable_kv_events": events, "locality": locality}
    return found


def lmcache_service(pool: str, namespace: str) -> str:
    """Return the name of the Service, and the DaemonSet, of a pool's LMCache servers.

    ``namespace``: who may share blocks. Servers outlive engines and tell models apart by their path alone, so
    that engines that differ in anything else need other servers.
    """
    return f"{pool}-lmcache-{namespace.rpartition('-')[2][:SERVER_DIGEST]}"


def _lmcache(pool: Pool, namespace: str) -> dict[str, Any]:
    offload = pool.offload
    address = offload.lmcache.address if offload.lmcache else ""
    if not address:
        service = lmcache_service(pool.name, namespace)
        address = f"tcp://{service}.{pool.namespace}.svc:{LMCACHE_PORT}"
    host, _, port = address.rpartition(":")
    extra: dict[str, Any] = {
        "lmcache.mp.host": host,
        "lmcache.mp.port": int(port),
        "lmcache.mp.heartbeat_interval": HEARTBEAT,
        "lmcache.mp.mq_timeout": ANSWER,
    }
    if offload.generated:
        extra["lmcache.mp.save_decode_cache"] = True
    return connector("LMCacheMPConnector", extra, kv_connector_module_path=LMCACHE_MODULE)


def transfer_environment(pool: Pool, facts: Facts) -> dict[str, str]:
    """Return the variables of engines with a connector: equal hashes in every process, LMCache's mode, and
    the port for other engines."""
    if not needs_connector(pool):
        return {}
    lmcache = {LMCACHE_MODE: ENGINE_DRIVEN} if pool.offload.lmcache else {}
    return {HASH_SEED: "0", **lmcache, **nixl_environment(pool, facts)}


def storage_namespace(
    pool: Pool,
    facts: Facts,
    hardware: Hardware,
    layout: Layout,
    settings: EngineSettings,
    kv: KvChoice,
    version: EngineVersion,
    model: str,
) -> StorageNamespace | None:
    """Return who may use the blocks of a place that outlives a pod; None if there is no such place.

    vLLM itself keeps blocks of different model names, dtypes and groups of layers apart, but not revisions of
    a model, other models at the same path, adapters or attention backends (``v1/kv_offload/file_mapper.py``).
    Engines whose namespaces differ therefore write to different folders. LMCache's keys are the model's path,
    tokens and salt (``IPCCacheServerKey``): such engines get different servers.
    """
    offload = pool.offload
    if not (offload.shared or offload.host_path or offload.lmcache):
        return None
    volume = f"hostPath {offload.host_path}"
    if offload.lmcache:
        volume = offload.lmcache.address or f"LMCache of {pool.namespace}/{pool.name}"
    if offload.shared:
        volume = f"{pool.namespace}/{offload.shared.claim}/{offload.shared.path}"
    chosen = {choice.field: str(choice.value) for choice in kv.choices}
    draft = pool.engine.speculative
    sizes = (("tensor", layout.tensor), ("pipeline", layout.pipeline), ("context", layout.context))
    own = {entry["name"]: str(entry.get("value", "")) for entry in pool.engine.env}
    agreed = {
        "volume": volume,
        "model": f"{pool.model.kind}://{pool.model.location} as {model}",
        "revision": pool.model.revision or "not pinned",
        "engine": dotted(version.stated) if version.stated else pool.engine.image,
        "dtype": f"{facts.shape.dtype}{', weights in FP8' if settings.online_fp8 else ''}",
        "kvCacheDtype": " ".join((kv.flag or "auto", *(("without windows",) if kv.plain_windows else ()))),
        "attentionBackend": f"{chosen.get('attentionBackend', '')} on {hardware.accelerator.vendor}",
        "block": str(settings.block),
        "hash": f"{HASH}, seed {own.get(HASH_SEED, '0')}",
        "parallelism": ", ".join(f"{name} {number}" for name, number in sizes),
        "speculative": f"{draft.method} {draft.tokens} {draft.model}".strip() if draft else "off",
        "adapters": _short(", ".join(sorted(f"{a.name}={a.source}" for a in pool.model.adapters))),
        "extraArgs": _short(" ".join(pool.engine.extra_args)),
        "variables": _short(", ".join(block_variables(pool))),
    }
    digest = json_digest(agreed, DIGEST)
    slug = re.sub(r"[^a-z0-9]+", "-", pool.model.location.lower().rpartition("/")[2])[:SLUG].strip("-")
    return StorageNamespace(name=f"{slug or 'model'}-{digest}", agreed=agreed)


def _short(text: str) -> str:
    """Return a text for the status: a long one as its beginning and its hash."""
    if len(text) <= SHOWN:
        return text
    return f"{text[:SHOWN]}… {hashlib.sha256(text.encode()).hexdigest()[:DIGEST]}"


def offload_doubts(pool: Pool, facts: Facts) -> list[str]:
    """Return why engines with this offload may not run as planned."""
    if not pool.offload.lmcache:
        return []
    found = ["spec.offload.lmcache: the image needs LMCache 0.5, whose connector reports what its server has"]
    if len({type(mixer) for mixer in facts.shape.mixers}) > 1:
        found.append(
            "spec.offload.lmcache: layers of several kinds are newer in LMCache than in vLLM's own tiers"
        )
    return found


def offload_warnings(pool: Pool) -> list[str]:
    """Return blocks that may be used with other weights than they were computed with."""
    offload, model = pool.offload, pool.model
    kept = "shared" if offload.shared else "hostPath" if offload.host_path else ""
    kept = "lmcache" if offload.lmcache else kept
    found = []
    if kept and not model.revision and model.kind == "hf":
        found.append(
            f"spec.model.revision is not set, and blocks in spec.offload.{kept} outlive the engines: a newer "
            "revision would be answered with blocks of the old one; pin it"
        )
    if offload.lmcache and offload.lmcache.address and model.revision:
        found.append(
            "spec.offload.lmcache.address: LMCache does not tell revisions of a model apart; empty the "
            "server before you change spec.model.revision"
        )
    if offload.lmcache and offload.lmcache.address and model.kind in ("pvc", "oci"):
        found.append(
            "spec.offload.lmcache.address: LMCache tells models apart by their path in the engine, which is "
            "the same in every pool with such a source; use this server for no other model"
        )
    return found
