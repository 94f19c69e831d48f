"""The fields of pods that are read, and the endpoints that pods become. Pure.

The rules are those of the Gateway API Inference Extension: a pod counts once it is running and has an
address; each of its target ports is an endpoint, ``<pod>-rank-<n>`` where there are several, with the n-th
data-parallel rank behind it. A pod that is not ready, or terminating, keeps its endpoint, so that what is
known of its KV cache stays; the endpoint's ``refusal`` says why it receives no requests.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet, canonical_ip, hostport
from kvist_epp.names import (
    KV_EVENTS_PORT,
    KV_REPLAY_PORT,
    LABEL_KV_STORAGE,
    LABEL_KV_STORAGE_TOKENS,
    NODE_SCOPE,
    POD_DATA_PARALLEL_SIZE,
    POD_KV_EVENTS,
    POD_KV_EVENTS_PORT,
    POD_KV_REPLAY_PORT,
    POD_KV_STORAGE_SCOPE,
    POD_KV_TIERS,
)
from kvist_kube.object_cache import KubeObject, ObjectMeta

NOT_READY: Final = "not ready"
TERMINATING: Final = "terminating"
MAX_RANKS: Final = 1024
NONE: Final = "none"

Complain = Callable[[str], None]
PodAge = tuple[str, str]
"""Creation time and uid of a pod: the larger one is the younger pod."""


class PodAnnotations(msgspec.Struct, frozen=True):
    """Annotations of a pod that are read."""

    kv_events: str | None = msgspec.field(name=POD_KV_EVENTS, default=None)
    kv_events_port: str | None = msgspec.field(name=POD_KV_EVENTS_PORT, default=None)
    kv_replay_port: str | None = msgspec.field(name=POD_KV_REPLAY_PORT, default=None)
    data_parallel_size: str | None = msgspec.field(name=POD_DATA_PARALLEL_SIZE, default=None)
    kv_storage: str | None = msgspec.field(name=LABEL_KV_STORAGE, default=None)
    kv_storage_scope: str | None = msgspec.field(name=POD_KV_STORAGE_SCOPE, default=None)
    kv_storage_tokens: str | None = msgspec.field(name=LABEL_KV_STORAGE_TOKENS, default=None)
    kv_tiers: str | None = msgspec.field(name=POD_KV_TIERS, default=None)


class PodMeta(ObjectMeta, frozen=True, rename="camel"):
    """``metadata`` of a pod."""

    annotations: PodAnnotations | None = None


class PodCondition(msgspec.Struct, frozen=True):
    """One of ``status.conditions``."""

    type: str
    status: str


class PodAddress(msgspec.Struct, frozen=True):
    """One of ``status.podIPs``."""

    ip: str = ""


class PodStatus(msgspec.Struct, frozen=True):
    """``status`` of a pod."""

    phase: str = ""
    conditions: list[PodCondition] | None = None
    pod_ip: str = msgspec.field(name="podIP", default="")
    pod_ips: list[PodAddress] | None = msgspec.field(name="podIPs", default=None)


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """``spec`` of a pod."""

    node_name: str = ""


class Pod(KubeObject, frozen=True):
    """A pod with the fields that are read."""

    metadata: PodMeta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


def endpoints_of(pod: Pod, ports: Sequence[int], complain: Complain) -> tuple[Endpoint, ...]:
    """Return one endpoint for each target port; none for a pod that is not running or has no address.

    ``complain`` is called with each setting that cannot be read; its default is used.
    """
    meta, address = pod.metadata, _address(pod.status)
    if pod.status.phase != "Running" or not address:
        return ()
    events, replay = _event_addresses(meta, address, complain)
    several = len(ports) > 1
    shared = (meta.name, f"{meta.namespace}/{meta.name}", hostport(address, ports[0])) if several else ()
    return tuple(
        Endpoint(
            name=f"{meta.name}-rank-{number}" if several else meta.name,
            namespace=meta.namespace,
            address=address,
            port=port,
            labels=_labels(meta, pod.spec.node_name),
            kv_events=events,
            kv_replay=replay,
            ranks=1 if several else _ranks(meta, complain),
            uid=meta.uid,
            first_rank=number,
            aliases=shared,
            refusal=_refusal(pod),
        )
        for number, port in enumerate(ports)
    )


def _labels(meta: PodMeta, node: str) -> Mapping[str, str]:
    """Return the labels of a pod; its annotations of its places of KV blocks count as such.

    Where each node has a storage of its own, the name of the node is added to that of the storage.
    """
    labels, own = dict(meta.labels or {}), meta.annotations or PodAnnotations()
    places = (
        (LABEL_KV_STORAGE, own.kv_storage),
        (LABEL_KV_STORAGE_TOKENS, own.kv_storage_tokens),
        (POD_KV_TIERS, own.kv_tiers),
    )
    labels |= {label: value for label, value in places if value is not None}
    if own.kv_storage_scope == NODE_SCOPE and labels.get(LABEL_KV_STORAGE):
        labels[LABEL_KV_STORAGE] += f"@{node}"
    return labels


def pod_age(pod: Pod) -> PodAge:
    """Return a value by which pods can be ordered from old to young."""
    return pod.metadata.creation_timestamp or "", pod.metadata.uid


def endpoint_set(found: Iterable[tuple[PodAge, tuple[Endpoint, ...]]]) -> EndpointSet:
    """Return all endpoints, sorted by key, with each address once.

    A node that was lost leaves pods behind whose addresses are assigned again. Of two pods at one address the
    one without a refusal counts, else the younger one.
    """
    best: dict[str, tuple[tuple[bool, PodAge], Endpoint]] = {}
    for age, members in found:
        for endpoint in members:
            rank = (not endpoint.refusal, age)
            if endpoint.hostport not in best or best[endpoint.hostport][0] < rank:
                best[endpoint.hostport] = rank, endpoint
    return EndpointSet(tuple(sorted((endpoint for _, endpoint in best.values()), key=lambda e: e.key)))


def _address(status: PodStatus) -> str:
    """Return the pod's first address, which is the one gateways use; empty when it has none."""
    text = status.pod_ip or next((address.ip for address in status.pod_ips or ()), "")
    try:
        return canonical_ip(text)
    except ValueError:
        return ""


def _refusal(pod: Pod) -> str:
    if pod.metadata.deletion_timestamp is not None:
        return TERMINATING
    ready = any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())
    return "" if ready else NOT_READY


def _event_addresses(meta: PodMeta, address: str, complain: Complain) -> tuple[str | None, str | None]:
    """Return the ZMQ addresses of rank 0's events and of its replay socket."""
    own = meta.annotations or PodAnnotations()
    enabled = _setting(meta, POD_KV_EVENTS, own.kv_events)
    if enabled not in ("", "true", "false"):
        complain(f"{meta.name}: {POD_KV_EVENTS}: {enabled!r} is neither true nor false")
    if enabled == "false":
        return None, None
    most = 65_535 - MAX_RANKS
    events = _number(meta, POD_KV_EVENTS_PORT, own.kv_events_port, KV_EVENTS_PORT, most, complain)
    if _setting(meta, POD_KV_REPLAY_PORT, own.kv_replay_port) == NONE:
        return f"tcp://{hostport(address, events)}", None
    replay = _number(meta, POD_KV_REPLAY_PORT, own.kv_replay_port, KV_REPLAY_PORT, most, complain)
    return f"tcp://{hostport(address, events)}", f"tcp://{hostport(address, replay)}"


def _ranks(meta: PodMeta, complain: Complain) -> int:
    own = meta.annotations or PodAnnotations()
    return _number(meta, POD_DATA_PARALLEL_SIZE, own.data_parallel_size, 1, MAX_RANKS, complain)


def _number(
    meta: PodMeta, name: str, annotation: str | None, default: int, most: int, complain: Complain
) -> int:
    text = _setting(meta, name, annotation)
    if not text:
        return default
    if text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= most:
        return int(text)
    complain(f"{meta.name}: {name}: {text[:40]!r} is not a number from 1 to {most}; using {default}")
    return default


def _setting(meta: PodMeta, name: str, annotation: str | None) -> str:
    """Return a setting of a pod: its annotation, else its label of the same name."""
    return annotation if annotation is not None else (meta.labels or {}).get(name, "")
