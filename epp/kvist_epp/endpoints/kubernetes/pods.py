"""Pods → endpoints, and endpoints → the fleet. Pure.

The rules of the Gateway API Inference Extension: a pod counts once it runs and has an address; every target
port of it is an endpoint of its own, ``<pod>-rank-<n>`` where there are several, with the n-th
data-parallel rank behind it. A pod that is not ready, or is on its way out, is no reason to forget what its
engine holds: it stays in the fleet with an objection until it has gone."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvist_epp.endpoints.endpoint import Endpoint, Fleet, canonical_ip, hostport
from kvist_epp.endpoints.kubernetes.objects import Meta, Pod, PodStatus, Settings
from kvist_epp.names import (
    KV_EVENTS_PORT,
    KV_REPLAY_PORT,
    POD_DATA_PARALLEL_SIZE,
    POD_KV_EVENTS,
    POD_KV_EVENTS_PORT,
    POD_KV_REPLAY_PORT,
)

NOT_READY: Final = "not ready"
TERMINATING: Final = "terminating"
MAX_RANKS: Final = 1024
NONE: Final = "none"

Complain = Callable[[str], None]
Born = tuple[str, str]
"""Creation time and uid of a pod: the larger one is the younger."""


def endpoints(pod: Pod, ports: Sequence[int], complain: Complain) -> tuple[Endpoint, ...]:
    """One endpoint for each target port; none for a pod that does not run or has no address.

    ``complain`` is told of settings that cannot be read; their defaults are used.
    """
    meta, address = pod.metadata, _address(pod.status)
    if pod.status.phase != "Running" or not address:
        return ()
    events, replay = _sources(meta, address, complain)
    several = len(ports) > 1
    shared = (meta.name, f"{meta.namespace}/{meta.name}", hostport(address, ports[0])) if several else ()
    return tuple(
        Endpoint(
            name=f"{meta.name}-rank-{number}" if several else meta.name,
            namespace=meta.namespace,
            address=address,
            port=port,
            labels=meta.labels or {},
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


def born(pod: Pod) -> Born:
    """How old it is, to be compared."""
    return pod.metadata.creation_timestamp or "", pod.metadata.uid


def fleet(found: Iterable[tuple[Born, tuple[Endpoint, ...]]]) -> Fleet:
    """All endpoints by name. Of two pods at one address only one can be there: a node that was lost leaves
    pods behind whose addresses are given away. The one without objections counts, else the younger one."""
    best: dict[str, tuple[tuple[bool, Born], Endpoint]] = {}
    for age, members in found:
        for endpoint in members:
            rank = (not endpoint.refusal, age)
            if endpoint.hostport not in best or best[endpoint.hostport][0] < rank:
                best[endpoint.hostport] = rank, endpoint
    return Fleet(tuple(sorted((endpoint for _, endpoint in best.values()), key=lambda e: e.key)))


def _address(status: PodStatus) -> str:
    """The pod's first address, which is the one gateways use; empty when it has none."""
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


def _sources(meta: Meta, address: str, complain: Complain) -> tuple[str | None, str | None]:
    """Where rank 0 publishes, and where it answers replays."""
    own = meta.annotations or Settings()
    told = _setting(meta, POD_KV_EVENTS, own.kv_events)
    if told not in ("", "true", "false"):
        complain(f"{meta.name}: {POD_KV_EVENTS}: {told!r} is neither true nor false")
    if told == "false":
        return None, None
    events = _port(meta, POD_KV_EVENTS_PORT, own.kv_events_port, KV_EVENTS_PORT, complain)
    replay = _setting(meta, POD_KV_REPLAY_PORT, own.kv_replay_port)
    if replay == NONE:
        return f"tcp://{hostport(address, events)}", None
    answers = _port(meta, POD_KV_REPLAY_PORT, own.kv_replay_port, KV_REPLAY_PORT, complain)
    return f"tcp://{hostport(address, events)}", f"tcp://{hostport(address, answers)}"


def _port(meta: Meta, name: str, annotation: str | None, default: int, complain: Complain) -> int:
    return _number(meta, name, annotation, default, 65_535 - MAX_RANKS, complain)


def _ranks(meta: Meta, complain: Complain) -> int:
    own = meta.annotations or Settings()
    return _number(meta, POD_DATA_PARALLEL_SIZE, own.data_parallel_size, 1, MAX_RANKS, complain)


def _number(
    meta: Meta, name: str, annotation: str | None, default: int, most: int, complain: Complain
) -> int:
    text = _setting(meta, name, annotation)
    if not text:
        return default
    if text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= most:
        return int(text)
    complain(f"{meta.name}: {name}: {text[:40]!r} is not a number from 1 to {most}; {default} is taken")
    return default


def _setting(meta: Meta, name: str, annotation: str | None) -> str:
    return annotation if annotation is not None else (meta.labels or {}).get(name, "")
