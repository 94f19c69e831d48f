"""Names on the wire and on objects, once. Standard library only: the operator imports this module.

Sources: the Endpoint Picker Protocol v1.0.0 (Gateway API Inference Extension, proposal 004), Envoy's
ext_proc and access log services, vLLM's request headers (``vllm.entrypoints``).
"""

from typing import Final

DESTINATION_HEADER: Final = "x-gateway-destination-endpoint"
"""Request header and dynamic-metadata key that carry the picked endpoints, comma separated."""

DESTINATION_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
SERVED_KEY: Final = "x-gateway-destination-endpoint-served"

DROPPED_REASON_HEADER: Final = "x-kvist-dropped-reason"
DROPPED_REASON_ALIAS: Final = "x-llm-d-request-dropped-reason"

MODEL_REWRITE_HEADER: Final = "x-llm-d-model-name-rewrite"
MODEL_REWRITE_ALIAS: Final = "x-gateway-model-name-rewrite"
"""Request header that names the model to ask the engine for, instead of the body's."""

MODEL_HEADER: Final = "x-gateway-model-name"
BASE_MODEL_HEADER: Final = "x-gateway-base-model-name"
"""Request headers that routes choose a pool by: the body's model, and the one under it where that is an
adapter. Source: the body-based routing of the Gateway API Inference Extension. Set by the role
``model-header`` alone; those of clients are removed."""

GATEWAY_OWNED: Final = (SUBSET_KEY, SERVED_KEY, DROPPED_REASON_HEADER, DROPPED_REASON_ALIAS)
"""Names that only gateways and pickers may use: as request headers of a client they are removed."""

PRIORITY_HEADER: Final = "x-kvist-priority"
"""A whole number: higher goes first, negative is shed first."""
OBJECTIVE_HEADERS: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
"""Name an objective, which has a priority; canonical name first, then its alias."""
TENANT_HEADERS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
"""Name whose request it is: requests that wait take turns by it."""
ENGINE_PRIORITY_HEADER: Final = "x-vllm-priority"
"""A whole number, lower goes first; above the body's ``priority``. vLLM accepts values other than 0 only
with ``--scheduling-policy priority``."""

SESSION_HEADER: Final = "x-session-id"
"""vLLM copies it to ``BlockStored.session_id`` (0.32 on)."""

TRACE_PARENT_HEADER: Final = "traceparent"
TRACE_STATE_HEADER: Final = "tracestate"
"""Headers of W3C Trace Context, of requests and of gRPC calls."""

REQUEST_ID_HEADER: Final = "x-request-id"
DATA_PARALLEL_RANK_HEADER: Final = "x-data-parallel-rank"
UPGRADE_HEADER, WEBSOCKET = "upgrade", "websocket"
"""Header of a request for another protocol on its connection, and the value for WebSockets (RFC 6455)."""
REQUEST_HEADERS: Final = frozenset(
    (
        *(":method", ":path", *GATEWAY_OWNED, MODEL_REWRITE_HEADER, MODEL_REWRITE_ALIAS),
        *(MODEL_HEADER, BASE_MODEL_HEADER, PRIORITY_HEADER, *OBJECTIVE_HEADERS, *TENANT_HEADERS),
        *(SESSION_HEADER, REQUEST_ID_HEADER, DATA_PARALLEL_RANK_HEADER),
        *(TRACE_PARENT_HEADER, TRACE_STATE_HEADER, UPGRADE_HEADER),
    )
)
"""Headers of requests that pickers and filters read; they skip all others."""
PATH_HEADER: Final = "x-kvist-path"
"""``POST /debug/pick`` reads the path of the request under test from it."""

PROCESS_METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ACCESS_LOG_METHOD: Final = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
HEALTH_CHECK_METHOD: Final = "/grpc.health.v1.Health/Check"
HEALTH_WATCH_METHOD: Final = "/grpc.health.v1.Health/Watch"
HEALTH_LIST_METHOD: Final = "/grpc.health.v1.Health/List"

LASTING_METHODS: Final = frozenset({ACCESS_LOG_METHOD, HEALTH_WATCH_METHOD})
"""Methods whose calls end only when one side leaves: a drain does not wait for them."""

REPLICA_FOLLOW_METHOD: Final = "/kvist.epp.peers.v1.Peers/Follow"
REPLICA_SNAPSHOT_METHOD: Final = "/kvist.epp.peers.v1.Peers/Snapshot"
REPLICA_PORT: Final = "peer"
"""Name of the port for other replicas in the label ``port`` of metrics."""

LIVENESS: Final = "liveness"
READINESS: Final = ("", "inference-extension", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
"""Health service names that answer SERVING only when the picker may be asked."""

BODY_CHUNK_BYTES: Final = 62_000
"""Largest body chunk in one ext_proc answer; Envoy-type proxies limit a chunk at 64 KB."""

KV_EVENTS_PORT: Final = 5557
KV_REPLAY_PORT: Final = 5657

LABEL_MAX_NUM_SEQS: Final = "kvist.dev/max-num-seqs"
"""Endpoint label with the engine's ``--max-num-seqs`` (vLLM does not export it)."""

LABEL_ROLES: Final = ("kvist.dev/role", "llm-d.ai/role")
"""Endpoint labels that state a pod's role; the first match counts: ``prefill``, ``decode``, ``both`` …"""

LABEL_KV_COMPATIBILITY: Final = "kvist.dev/kv-compatibility"
"""Endpoint label with an opaque value: KV cache blocks are transferred only between endpoints with equal
values, or between those without one. NIXL refuses a handshake between engines of different versions or
flags."""

PREFILLER_HEADER: Final = "x-prefiller-host-port"
"""Request header that names the prefill endpoint to llm-d's sidecar in a decode pod."""

LABEL_KV_STORAGE: Final = "kvist.dev/kv-storage-namespace"
"""Endpoint label, or annotation of a pod, that names the storage of KV blocks that its engine shares: engines
with the same name read what the others write."""

LABEL_POOL: Final = "kvist.dev/pool"
"""Label of the pods of our own InferencePool: its name."""

LABEL_KV_STORAGE_TOKENS: Final = "kvist.dev/kv-storage-tokens"
"""Endpoint label, or annotation of a pod: how many tokens a server of LMCache can hold, where it is one."""

POD_KV_STORAGE_SCOPE: Final = "kvist.dev/kv-storage-scope"
NODE_SCOPE: Final = "node"
"""Annotation of a pod, and its one value: each node has a storage of the name of its own."""

POD_KV_TIERS: Final = "kvist.dev/kv-tiers"
LMCACHE_TIER: Final = "lmcache"
"""Annotation of a pod, or endpoint label: the places of its KV cache blocks besides the GPU, comma separated,
of ``host``, ``disk``, ``shared`` and ``lmcache``; the last one says that its storage is a server of
LMCache."""
LMCACHE_PREFIX: Final = "lmcache/"
"""Before the names of such storages in the picker; no label has a slash."""
HOST_MEDIUM: Final = "CPU"
"""Host memory of one engine, as events name it."""
STORAGE_MEDIUM: Final = "STORAGE"
"""Storage of one engine, as events name it."""
SHARED_MEDIUM: Final = "SHARED"
"""The picker's name of storage that several engines share."""
LMCACHE_MEDIUM: Final = "LMCACHE"
"""The picker's name of servers of LMCache."""

THINKING_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
"""Efforts to think that a request of the Messages API may name."""

POOL_GROUP: Final = "inference.networking.k8s.io"
OWN_GROUP: Final = "kvist.dev"
POOL_GROUPS: Final = (POOL_GROUP, OWN_GROUP)
"""API groups whose ``InferencePool`` the picker can follow: ``v1`` of the first, ``v1alpha1`` of ours."""
OBJECTIVE_GROUPS: Final = ("inference.networking.x-k8s.io", "llm-d.ai")
"""API groups of ``InferenceObjective`` v1alpha2, older name first; the last one takes precedence."""

POD_KV_EVENTS: Final = "kvist.dev/kv-events"
POD_KV_EVENTS_PORT: Final = "kvist.dev/kv-events-port"
POD_KV_REPLAY_PORT: Final = "kvist.dev/kv-replay-port"
POD_DATA_PARALLEL_SIZE: Final = "kvist.dev/data-parallel-size"
"""Annotations of a pod (or labels, where there is no annotation) that say how its engine publishes KV events:
``"false"`` for none, the two ports of rank 0, and the ranks behind one port."""
