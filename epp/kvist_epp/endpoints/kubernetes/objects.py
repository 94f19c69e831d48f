"""The few fields of Kubernetes objects that are read, and the answers that carry them. Pure.

Decoded straight into these structs: a pod is read in microseconds, whatever else it carries. Shapes: the
Kubernetes API conventions; ``InferencePool`` v1 and ``InferenceObjective`` v1alpha2 of the Gateway API
Inference Extension and llm-d."""

from typing import TypeVar

import msgspec

from kvist_epp.names import (
    POD_DATA_PARALLEL_SIZE,
    POD_KV_EVENTS,
    POD_KV_EVENTS_PORT,
    POD_KV_REPLAY_PORT,
)


class Settings(msgspec.Struct, frozen=True):
    """The annotations of a pod that are read."""

    kv_events: str | None = msgspec.field(name=POD_KV_EVENTS, default=None)
    kv_events_port: str | None = msgspec.field(name=POD_KV_EVENTS_PORT, default=None)
    kv_replay_port: str | None = msgspec.field(name=POD_KV_REPLAY_PORT, default=None)
    data_parallel_size: str | None = msgspec.field(name=POD_DATA_PARALLEL_SIZE, default=None)


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    """``metadata`` of any object."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: Settings | None = None
    creation_timestamp: str | None = None
    """RFC 3339 in UTC, so that text sorts as time does."""
    deletion_timestamp: str | None = None


class Object(msgspec.Struct, frozen=True):
    """What every object has."""

    metadata: Meta


class Condition(msgspec.Struct, frozen=True):
    """One of ``status.conditions``."""

    type: str
    status: str


class PodAddress(msgspec.Struct, frozen=True):
    """One of ``status.podIPs``."""

    ip: str = ""


class PodStatus(msgspec.Struct, frozen=True):
    """``status`` of a pod."""

    phase: str = ""
    conditions: list[Condition] | None = None
    pod_ip: str = msgspec.field(name="podIP", default="")
    pod_ips: list[PodAddress] | None = msgspec.field(name="podIPs", default=None)


class Pod(Object, frozen=True):
    """A pod."""

    status: PodStatus = PodStatus()


class Port(msgspec.Struct, frozen=True):
    """One of ``targetPorts``."""

    number: int


class Selector(msgspec.Struct, frozen=True, rename="camel"):
    """``spec.selector`` of an InferencePool."""

    match_labels: dict[str, str] | None = None


class PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    """``spec`` of an InferencePool of the Gateway API Inference Extension."""

    selector: Selector = Selector()
    target_ports: list[Port] | None = None


class Pool(Object, frozen=True):
    """``InferencePool``, ``inference.networking.k8s.io/v1``."""

    spec: PoolSpec = PoolSpec()


class OwnPoolStatus(msgspec.Struct, frozen=True, rename="camel"):
    """``status`` of our own InferencePool."""

    target_ports: list[Port] | None = None


class OwnPool(Object, frozen=True):
    """``InferencePool``, ``kvist.dev/v1alpha1``: only what the picker needs of it."""

    status: OwnPoolStatus = OwnPoolStatus()


class Reference(msgspec.Struct, frozen=True):
    """``spec.poolRef`` of an InferenceObjective."""

    name: str = ""


class ObjectiveSpec(msgspec.Struct, frozen=True, rename="camel"):
    """``spec`` of an InferenceObjective."""

    priority: int | None = None
    pool_ref: Reference = Reference()


class Objective(Object, frozen=True):
    """``InferenceObjective``, v1alpha2 of ``llm-d.ai`` or, older, ``inference.networking.x-k8s.io``."""

    spec: ObjectiveSpec = ObjectiveSpec()


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    """``metadata`` of a list."""

    resource_version: str
    continue_: str = msgspec.field(name="continue", default="")


class Page(msgspec.Struct, frozen=True):
    """One page of a list; its items are decoded one by one, so that a bad one spoils nothing."""

    metadata: ListMeta
    items: list[msgspec.Raw] | None = None


class Event(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Failure(msgspec.Struct, frozen=True):
    """``Status``: why a request was refused, or a watch ended."""

    code: int = 0
    reason: str = ""
    message: str = ""


T = TypeVar("T")


def decoded(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """JSON as ``kind``. Raises ``ValueError`` saying what does not fit."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from None
    except RecursionError:
        raise ValueError(f"not a {kind.__name__}: nested too deeply") from None
