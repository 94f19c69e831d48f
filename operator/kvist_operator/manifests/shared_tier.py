"""The claim for KV cache blocks that pods share, its cleaner, and what pods say of their blocks. Pure.

vLLM's file-system tier never deletes, and a claim has many writers: one Deployment of a pool, not a container
in each engine's pod, keeps the folder below ``spec.offload.shared.size``. It cleans the whole folder, so that
blocks of engines that are gone are removed as well: nothing reads them, so they are the oldest.
"""

from collections.abc import Mapping
from typing import Final

from kvist_epp import names as wire
from kvist_operator.plan import Plan
from kvist_operator.plan.resources import SHARED_MOUNT
from kvist_operator.spec.pool import Pool

from . import disk_tier, pods
from .object_names import KV_CLEANER, Json, Note, ObjectNames, Site
from .overlays import helper
from .weights_cache import SHARED as MANY_NODES

VOLUME: Final = "kv-shared"
MEDIA: Final = ("host", "disk", "shared", "lmcache")
"""Names of places in the plan that are in the annotation."""


def marks(pool: Pool, plan: Plan) -> tuple[dict[str, str], dict[str, str]]:
    """Return labels and annotations of an engine's pod: the places of its blocks, and who shares them."""
    offload = pool.offload
    media = {tier.medium: tier.tokens for tier in plan.tiers if tier.medium in MEDIA}
    places = [*media, *([wire.LMCACHE_TIER] if offload.lmcache and not media else [])]
    annotations = {wire.POD_KV_TIERS: ",".join(places)} if places else {}
    if offload.lmcache and offload.lmcache.memory_bytes:
        annotations |= {
            wire.POD_KV_STORAGE_SCOPE: wire.NODE_SCOPE,
            wire.LABEL_KV_STORAGE_TOKENS: str(media[wire.LMCACHE_TIER] // plan.nodes),
        }
    shares = plan.storage is not None and (offload.shared or offload.lmcache)
    labels = {wire.LABEL_KV_STORAGE: plan.storage.name} if plan.storage and shares else {}
    return labels, annotations


def mounted(pool: Pool) -> list[pods.Mounted]:
    """Return the claim and its mount; none without ``spec.offload.shared``."""
    if pool.offload.shared is None:
        return []
    return [pods.Mounted(_volume(pool.offload.shared.claim), {"name": VOLUME, "mountPath": SHARED_MOUNT})]


def _volume(claim: str) -> Json:
    return {"name": VOLUME, "persistentVolumeClaim": {"claimName": claim}}


def cleaner(pool: Pool, site: Site, user: int) -> list[Json]:
    """Return the Deployment that cleans the folder; none without ``spec.offload.shared``."""
    shared = pool.offload.shared
    if shared is None:
        return []
    names = ObjectNames.of(pool)
    paths = SHARED_MOUNT, f"{SHARED_MOUNT}/{shared.path}"
    container = disk_tier.container(pool, site, KV_CLEANER, VOLUME, paths, shared.size_bytes, {})
    container["args"] = [*container["args"], "--create"]  # the first pod of a new claim finds no folder
    pod = {
        "serviceAccountName": names.engine_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {**pods.pod_security(user, site), "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [container],
        "volumes": [_volume(shared.claim)],
    }
    spec = {"replicas": 1, "strategy": {"type": "Recreate"}}
    made = helper(pool, pods.template(names, KV_CLEANER, pod))
    return [pods.deployment(names, names.cleaner, KV_CLEANER, spec, made)]


def notes(pool: Pool, plan: Plan, site: Site) -> list[Note]:
    """Return advice for a claim that pods on several nodes cannot mount, and for pools that could share its
    blocks but for some of their settings."""
    shared = pool.offload.shared
    if shared is None:
        return []
    found = []
    modes = site.claims.get(shared.claim, frozenset())
    if modes and MANY_NODES not in modes:
        text = (
            f"spec.offload.shared.claim: claim {shared.claim} is {', '.join(sorted(modes))}, so that its "
            f"pods run on one node only: use a claim with {MANY_NODES}"
        )
        found.append(Note("", "ClaimNotShared", text))
    own = plan.storage.agreed if plan.storage else {}
    for name, other in sorted(site.storage.items()):
        if name != pool.name and (text := _apart(shared.claim, name, own, other)):
            found.append(Note("", "BlocksNotShared", text))
    return found


def _apart(claim: str, name: str, own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return why two pools on one claim share no blocks of the same model; empty if they do, or if nothing
    could be shared."""
    agreed = {key: value for key, value in other.items() if key != "namespace"}
    if _model(own) != _model(agreed) or own == agreed:
        return ""
    differences = [
        f"{key} is {own.get(key) or 'empty'} here and {agreed.get(key) or 'empty'} there"
        for key in own
        if own[key] != agreed.get(key)
    ]
    if not _same_claim(own, agreed):
        return ""
    return (
        f"spec.offload.shared: pool {name} has the same model on claim {claim}, but no blocks are shared: "
        f"{'; '.join(differences)}"
    )


def _model(agreed: Mapping[str, str]) -> str:
    return agreed.get("model", "").partition(" as ")[0]


def _same_claim(own: Mapping[str, str], other: Mapping[str, str]) -> bool:
    volumes = [each.get("volume", "").split("/")[:2] for each in (own, other)]
    return volumes[0] == volumes[1]
