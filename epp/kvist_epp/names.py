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

SESSION_HEADER: Final = "x-session-id"
"""vLLM copies it to ``BlockStored.session_id`` (0.32 on)."""

REQUEST_ID_HEADER: Final = "x-request-id"
DATA_PARALLEL_RANK_HEADER: Final = "x-data-parallel-rank"
PATH_HEADER: Final = "x-kvist-path"
"""``POST /debug/pick`` reads the path of the request under test from it."""

PROCESS_METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ACCESS_LOG_METHOD: Final = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
HEALTH_CHECK_METHOD: Final = "/grpc.health.v1.Health/Check"
HEALTH_WATCH_METHOD: Final = "/grpc.health.v1.Health/Watch"
HEALTH_LIST_METHOD: Final = "/grpc.health.v1.Health/List"

LIVENESS: Final = "liveness"
READINESS: Final = ("", "inference-extension", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
"""Health service names that answer SERVING only when the picker may be asked."""

BODY_CHUNK_BYTES: Final = 62_000
"""Largest body chunk in one ext_proc answer; Envoy-type proxies limit a chunk at 64 KB."""

KV_EVENTS_PORT: Final = 5557
KV_REPLAY_PORT: Final = 5657

LABEL_MAX_NUM_SEQS: Final = "kvist.dev/max-num-seqs"
"""Endpoint label that tells the engine's ``--max-num-seqs`` (vLLM does not export it)."""
