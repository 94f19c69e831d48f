"""One endpoint, and all endpoints at one moment.

Both are immutable: a discovery makes a new ``EndpointSet``, and readers replace their reference, so that a
change is seen as a whole or not at all.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import MappingProxyType
from typing import Final, NamedTuple

from kvist_epp.names import (
    KV_EVENTS_PORT,
    KV_REPLAY_PORT,
    LABEL_KV_COMPATIBILITY,
    LABEL_KV_STORAGE,
    LABEL_KV_STORAGE_TOKENS,
    LABEL_MAX_NUM_SEQS,
    LABEL_ROLES,
    LMCACHE_PREFIX,
    LMCACHE_TIER,
    POD_KV_TIERS,
)

PREFILL_ROLES: Final = frozenset(
    {"prefill", "both", "prefill-decode", "encode-prefill", "encode-prefill-decode"}
)
"""Roles of endpoints that may compute a prompt for another one; the longer names are llm-d's."""
DECODE_ROLES: Final = frozenset({"decode", "both", "prefill-decode", "encode-prefill-decode"})
"""Roles of endpoints that may answer a request whose prompt another one has computed."""


class KvEventSource(NamedTuple):
    """Addresses at which one data-parallel rank publishes its KV events."""

    publisher: str
    """Name of the publisher in the index: ``<pod uid or namespace/name>/<rank>``."""
    rank: int
    events: str
    """ZMQ address of the PUB socket."""
    replay: str | None
    """ZMQ address of the replay ROUTER socket; None when lost events cannot be requested again."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine as the gateway reaches it; the picker answers with its ``hostport``.

    Equality compares every field. Labels and ``refusal`` may change while the engine stays the same: what is
    known of an engine is kept as long as its ``identity`` does not change."""

    name: str
    namespace: str
    address: str
    """IPv4 or IPv6 address in its canonical text, without brackets."""
    port: int
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    kv_events: str | None = None
    """``tcp://host:port`` of rank 0's KV events; None when the engine publishes none (approximate mode)."""
    kv_replay: str | None = None
    """``tcp://host:port`` of rank 0's replay socket; None when there is no replay."""
    ranks: int = 1
    """Data-parallel ranks behind this one address."""
    uid: str = ""
    """UID of the pod; empty outside of Kubernetes. A new pod of the same name has another one."""
    first_rank: int = 0
    """Data-parallel rank of the first engine behind this address: a pod with a port for each rank has several
    endpoints."""
    aliases: tuple[str, ...] = ()
    """Other names that the engine may use in the topic of its events: those of the whole pod."""
    refusal: str = ""
    """Why the endpoint receives no requests at present, though its events are still followed: ``not ready``,
    ``terminating``; empty when it may be picked."""
    hostport: str = field(init=False, compare=False)
    """``ip:port`` or ``[v6]:port``."""
    key: str = field(init=False, compare=False)
    """``namespace/name``: names the endpoint in the load tracker, in metrics and on pages."""
    role: str = field(init=False, compare=False)
    """The engine's role by its label; ``both`` without one."""
    can_prefill: bool = field(init=False, compare=False)
    """True if it may compute prompts for other endpoints."""
    can_decode: bool = field(init=False, compare=False)
    """True if it may answer requests whose prompts other endpoints have computed."""
    kv_compatibility: str = field(init=False, compare=False)
    """An opaque value that is equal for endpoints between which KV cache blocks can be transferred."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", MappingProxyType(dict(self.labels)))
        object.__setattr__(self, "hostport", hostport(self.address, self.port))
        object.__setattr__(self, "key", f"{self.namespace}/{self.name}")
        role = next((self.labels[label] for label in LABEL_ROLES if label in self.labels), "both")
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "can_prefill", role in PREFILL_ROLES)
        object.__setattr__(self, "can_decode", role in DECODE_ROLES)
        object.__setattr__(self, "kv_compatibility", self.labels.get(LABEL_KV_COMPATIBILITY, ""))

    @property
    def identity(self) -> tuple[object, ...]:
        """Values of which any change means another engine: all fields but labels and ``refusal``."""
        return (
            *(self.namespace, self.name, self.uid, self.address, self.port),
            *(self.kv_events, self.kv_replay, self.first_rank, self.ranks, self.aliases),
        )

    @property
    def max_num_seqs(self) -> int | None:
        """The engine's ``--max-num-seqs`` by its label, since vLLM does not export it; None without a
        number."""
        return self._positive(LABEL_MAX_NUM_SEQS)

    @property
    def storage_namespace(self) -> str:
        """The name of the storage of KV blocks that it shares with others; empty without one.

        The name of a server of LMCache begins with ``LMCACHE_PREFIX``; one without a name is shared with no
        other endpoint."""
        name = self.labels.get(LABEL_KV_STORAGE, "")
        if LMCACHE_TIER not in self.labels.get(POD_KV_TIERS, "").split(","):
            return name
        return f"{LMCACHE_PREFIX}{name or self.key}"

    @property
    def storage_tokens(self) -> int | None:
        """The tokens that its server of LMCache can hold; None if it does not say."""
        return self._positive(LABEL_KV_STORAGE_TOKENS)

    def _positive(self, label: str) -> int | None:
        text = self.labels.get(label, "")
        return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None

    @property
    def sources(self) -> tuple[KvEventSource, ...]:
        """Addresses of each rank's events: rank r adds r to both ports, as vLLM's publisher does. Empty when
        the engine publishes no events."""
        if self.kv_events is None:
            return ()
        return tuple(
            KvEventSource(
                f"{self.uid or self.key}/{rank}",
                rank,
                offset_port(self.kv_events, rank),
                None if self.kv_replay is None else offset_port(self.kv_replay, rank),
            )
            for rank in range(self.first_rank, self.first_rank + self.ranks)
        )


def hostport(address: str, port: int) -> str:
    """Return ``ip:port``, with brackets around an IPv6 address (RFC 3986 section 3.2.2)."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def canonical_ip(text: str) -> str:
    """Return the canonical text of an IPv4 or IPv6 address, given with or without brackets.

    Raises ``ValueError`` for anything else, zone identifiers included: a proxy could not connect to them.
    """
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") and ":" in text else text
    if "%" in bare:
        raise ValueError(f"{text!r} has a zone identifier")
    return str(ip_address(bare))


def offset_port(source: str, rank: int) -> str:
    """Return ``tcp://host:port`` with ``rank`` added to the port (vLLM's ``offset_endpoint_port``)."""
    head, _, port = source.rpartition(":")
    return f"{head}:{int(port) + rank}"


def default_sources(address: str) -> tuple[str, str]:
    """Return the default addresses of an engine's events and of its replay socket."""
    return f"tcp://{hostport(address, KV_EVENTS_PORT)}", f"tcp://{hostport(address, KV_REPLAY_PORT)}"


def same_engine(one: Endpoint | None, other: Endpoint) -> bool:
    """Return whether both are the same engine, whatever their labels and refusals."""
    return one is other or (one is not None and one.identity == other.identity)


class EndpointChanges(NamedTuple):
    """Difference between two endpoint sets. An endpoint with another engine behind it has left and joined."""

    left: tuple[Endpoint, ...]
    joined: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class EndpointSet:
    """All endpoints at one moment."""

    endpoints: tuple[Endpoint, ...] = ()
    _by_hostport: Mapping[str, Endpoint] = field(init=False, compare=False, repr=False)
    _by_key: Mapping[str, Endpoint] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_hostport", {e.hostport: e for e in self.endpoints})
        object.__setattr__(self, "_by_key", {e.key: e for e in self.endpoints})

    def __len__(self) -> int:
        return len(self.endpoints)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self.endpoints)

    def by_hostport(self, hostport: str) -> Endpoint | None:
        """Return the endpoint at ``ip:port`` or ``[v6]:port``."""
        return self._by_hostport.get(hostport)

    def by_key(self, key: str) -> Endpoint | None:
        """Return the endpoint named ``namespace/name``."""
        return self._by_key.get(key)

    def since(self, old: "EndpointSet") -> EndpointChanges:
        """Return the endpoints that left and joined between ``old`` and this set."""
        left = tuple(e for e in old.endpoints if not same_engine(self._by_key.get(e.key), e))
        joined = tuple(e for e in self.endpoints if not same_engine(old.by_key(e.key), e))
        return EndpointChanges(left, joined)
