"""The meaning of every reason of a condition, and what to do about it. Pure.

The tables of docs/guides/troubleshooting.md have the same sentences; a test compares them. Field names and
commands are in backticks, as in the guide.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Reason(NamedTuple):
    """Explanation of one reason."""

    meaning: str
    remedy: str
    """What the pool's owner does; ``nothing`` where nothing is wrong."""


SPEC: Final[Mapping[str, Reason]] = MappingProxyType(
    {
        "Planned": Reason(
            "the plan fits",
            "nothing",
        ),
        "Unverified": Reason(
            "the plan should fit, but a part of it could not be verified",
            "read the message; `status.reportedKvTokens` shows the real size of the cache once engines run",
        ),
        "Pending": Reason(
            "the operator has not processed the pool yet",
            "wait; read the operator's log if the condition stays",
        ),
        "InvalidSpec": Reason(
            "a field has an invalid value",
            "change the field that the message names",
        ),
        "DoesNotFit": Reason(
            "no configuration holds the model and the required context: `spec.engine.maxModelLen`, or 8k "
            "tokens if it is not set",
            "the message has the shortfall and the nearest configuration that fits; try others with `kvist "
            "plan -f pool.yaml --gpu …`",
        ),
        "ModelNotFound": Reason(
            "no source knows the model's shape",
            "set `spec.model.shape`, or give the operator access to the hub",
        ),
        "ModelUnusable": Reason(
            "vLLM cannot serve a model with this config.json: GGUF, unknown quantisation, missing keys",
            "use another checkpoint, or correct `spec.model.shape.config`",
        ),
        "AcceleratorUnknown": Reason(
            "no source names the accelerator, or it is not in the operator's table",
            "set `spec.accelerator.product`, and `spec.accelerator.memory` for a product that is not in "
            "the table",
        ),
        "ApiMissing": Reason(
            "a required API is not installed",
            "install the API that the message names, or change the spec; engines run even if a gateway's "
            "API is missing",
        ),
    }
)
"""Reasons of ``Accepted``."""

CLUSTER: Final[Mapping[str, Reason]] = MappingProxyType(
    {
        "NameConflict": Reason(
            "the name is already used by an object that the pool does not own; it was not modified",
            "delete or rename that object, or rename the pool",
        ),
        "ObjectRefused": Reason(
            "the API server or an admission webhook refused an object",
            "the message quotes it; the cause is often a `podTemplate`, a policy of the cluster, or an "
            "installed API of another version",
        ),
        "QuotaExceeded": Reason(
            "a ResourceQuota forbids an object",
            "raise the quota, or request less in the pool",
        ),
        "Forbidden": Reason(
            "the operator lacks a right",
            "grant the rule that the message names",
        ),
        "ApiUnavailable": Reason(
            "the API server does not answer, or answers with an error",
            "wait: the operator retries; if the message names a webhook, see why that is down",
        ),
        "ApiError": Reason(
            "the API server does not answer, or answers with an error",
            "wait: the operator retries; if the message names a webhook, see why that is down",
        ),
        "Conflict": Reason(
            "an object was changed at the same time",
            "nothing: the operator retries",
        ),
        "InternalError": Reason(
            "a bug in the operator",
            "read its log, and please report it",
        ),
        "WaitingForApproval": Reason(
            "a new operator would change pods; nothing is changed yet",
            "read `status.pendingPlan`, then apply it with the command in the message, or leave it",
        ),
        "WaitingForWindow": Reason(
            "the same, with `spec.rollout.upgrade: Window`",
            "nothing, or set `Automatic`",
        ),
        "Paused": Reason(
            "`spec.paused` is true",
            "set it to false to have changes applied",
        ),
        "PickerSilent": Reason(
            "(only in the operator's log: \"did not report its engines' caches\") a picker does not answer "
            "`/fleet`, so deletion costs and recommendations are not updated",
            "open port 9090 of the pickers to the operator",
        ),
        "ChatFlagUnreadable": Reason(
            "the picker cannot use one of the engines' chat flags, so its pages of prompts differ from "
            "theirs",
            "change the flag that the message names",
        ),
        "LeadershipLost": Reason(
            "(only in the operator's log) this replica could not renew the Lease, so it stopped before "
            "another one leads",
            "nothing, if another replica leads; else look for what keeps the operator from the API server",
        ),
        "CannotStart": Reason(
            "(only in the operator's log) there is no cluster, CRD or right, or flags contradict each other",
            "follow the message",
        ),
        "InvalidSettings": Reason(
            "(only in the operator's log) there is no cluster, CRD or right, or flags contradict each other",
            "follow the message",
        ),
    }
)
"""Reasons about objects, rights and other operators."""

PODS: Final[Mapping[str, Reason]] = MappingProxyType(
    {
        "PodsRefused": Reason(
            "pods cannot be created: quota, Pod Security, webhooks",
            "the message quotes the refusal; the cause is often a `podTemplate`",
        ),
        "InvalidImage": Reason(
            "the image reference is malformed",
            "correct `spec.engine.image` or `spec.picker.image`",
        ),
        "ConfigMissing": Reason(
            "a Secret, ConfigMap or key does not exist",
            "create it, or change `spec.model.tokenSecretRef` or `spec.engine.env`",
        ),
        "CannotStart": Reason(
            "the container's program cannot be executed",
            "use an image with `vllm` on its PATH",
        ),
        "BadArguments": Reason(
            "vLLM refuses its command line or configuration",
            "change the field that the message names, or `spec.engine.extraArgs`; set "
            "`spec.engine.version` if the image tag does not contain the version",
        ),
        "ModelUnsupported": Reason(
            "this vLLM does not support the model, or the model needs remote code",
            "use a newer `spec.engine.image`; or `--trust-remote-code` in `spec.engine.extraArgs` with a "
            "pinned `spec.model.revision`",
        ),
        "ModelUnavailable": Reason(
            "the model cannot be downloaded: gated, private, misspelt, rate-limited, or the hub is "
            "unreachable",
            "set `spec.model.tokenSecretRef`, correct `spec.model.source`, allow access to the hub, or use "
            "`pvc://` or `oci://`",
        ),
        "AcceleratorUnusable": Reason(
            "no device in the container, an old driver, or no kernels for this GPU",
            "check device plugin, driver, `spec.engine.image` and `spec.accelerator.resourceName`",
        ),
        "OutOfMemory": Reason(
            "GPU or host memory ran out, or the cache has no room for one sequence",
            "change the field that the message names",
        ),
        "DiskFull": Reason(
            "a volume or the node's disk is full",
            "use a claim for the volume `cache`, or load weights from a claim",
        ),
        "CannotWrite": Reason(
            "the process cannot write to a folder",
            "change `spec.engine.env`, or the permissions of mounted volumes",
        ),
        "CommunicationFailed": Reason(
            "the GPUs of a replica cannot communicate",
            "set `NCCL_DEBUG=INFO` in `spec.engine.env`; check network and devices of the nodes",
        ),
        "CrashLoop": Reason(
            "the container exits for a reason that is not in this table",
            "the message has its last output; `kubectl logs --previous` shows more",
        ),
        "ImagePull": Reason(
            "the image cannot be pulled",
            "check name, tag, pull secret (`imagePullSecrets` of the field that the message names) and "
            "architecture",
        ),
        "StartsTooSlowly": Reason(
            "the kubelet restarted the container because the engine was not ready in time",
            "raise `spec.rollout.startupSeconds`, or make the weights load faster",
        ),
        "VolumeMount": Reason(
            "a volume cannot be mounted",
            "check the claim and its access modes, or create the missing object",
        ),
        "SandboxFailed": Reason(
            "the node cannot set up pods",
            "check the node's network plugin and kubelet",
        ),
        "Unschedulable": Reason(
            "no node is suitable",
            "provide what the scheduler misses: accelerators, labels, tolerations, claims",
        ),
        "SchedulingGated": Reason(
            "a scheduling gate holds the pod back",
            "wait, or check the queueing system",
        ),
        "NodeRefused": Reason(
            "the node had fewer free resources than the scheduler assumed",
            "nothing; if it continues, check the device plugin",
        ),
        "Evicted": Reason(
            "a volume is full, the node ran short of disk or memory, or it shut down",
            "`spec.model.cache` for weights, `spec.offload.disk` for blocks, larger disks",
        ),
        "NodeLost": Reason(
            "the node does not answer",
            "repair the node or delete it",
        ),
        "ProbeFailed": Reason(
            "the container runs but is not healthy",
            "read its log",
        ),
        "DeadlineExceeded": Reason(
            "no pod became ready in time, and none reports a reason",
            "read the logs; raise `spec.rollout.startupSeconds`",
        ),
    }
)
"""Reasons about pods of the newest generation: ``Progressing``, for pickers ``Ready``, for
Envoys ``GatewayAttached``."""

SERVING: Final[Mapping[str, Reason]] = MappingProxyType(
    {
        "AsAsked": Reason(
            "everything works",
            "nothing",
        ),
        "Serving": Reason(
            "everything works",
            "nothing",
        ),
        "Settled": Reason(
            "everything works",
            "nothing",
        ),
        "Scaling": Reason(
            "a change is in progress",
            "wait; loading a model takes minutes",
        ),
        "RollingOut": Reason(
            "a change is in progress",
            "wait; loading a model takes minutes",
        ),
        "Waiting": Reason(
            "the next step waits for another one, such as freeing the old workload's accelerators",
            "wait",
        ),
        "NotStarted": Reason(
            "no engines have been created",
            "see `Accepted`",
        ),
        "NoReplicaReady": Reason(
            "no replica serves requests",
            "see `Progressing`",
        ),
        "JustReady": Reason(
            "replicas became ready less than ten seconds (`minReadySeconds`) ago, and gateways that "
            "resolve names may not know them yet",
            "wait",
        ),
        "ScaledToZero": Reason(
            "the pool asks for no replicas",
            "raise `spec.replicas`",
        ),
        "PickerUnavailable": Reason(
            "no picker pod is ready; with `FailOpen` requests are spread evenly",
            "follow the message of its pod",
        ),
        "NoTokenizer": Reason(
            "the picker cannot read the model's tokenizer and uses its routing history",
            "set `spec.picker.tokenizer`",
        ),
        "KvEvents": Reason(
            "picks use the engines' KV events",
            "nothing",
        ),
        "EnvoyServing": Reason(
            "the gateway accepts the pool",
            "nothing",
        ),
        "RouteAccepted": Reason(
            "the gateway accepts the pool",
            "nothing",
        ),
        "EnvoyUnavailable": Reason(
            "no Envoy pod is ready",
            "follow the message of its pod",
        ),
        "NoAnswer": Reason(
            "no controller has reported on the HTTPRoute",
            "check the Gateway's name and namespace in `spec.gateway.parentRefs`, and whether it allows "
            "routes from this namespace",
        ),
        "NoRoute": Reason(
            "the pool has no route of its own, and no gateway reports another one to its InferencePool",
            "create a route that names the InferencePool, or set `spec.gateway.parentRefs`; nothing, if your "
            "gateway does not report on InferencePools",
        ),
        "Paired": Reason(
            "every ready engine has one to exchange blocks with",
            "nothing",
        ),
        "PartlyPaired": Reason(
            "some ready engines have none to exchange blocks with: they are of another generation",
            "wait for the rollout",
        ),
        "NoPairs": Reason(
            "no two ready engines may exchange blocks, so each computes its own prompts",
            "wait for the rollout; `Progressing` says what holds it up",
        ),
        "NoPrefill": Reason(
            "no engine for prefill is ready, so engines that decode compute prompts by themselves",
            "see `Progressing`; raise `spec.disaggregation.prefill.replicas`, or let its autoscaler do so",
        ),
        "NoDecode": Reason(
            "no engine for decode is ready",
            "see `Progressing`; raise `spec.replicas` or `spec.disaggregation.decode.replicas`",
        ),
        "OneEngine": Reason(
            "one engine is ready, and to compute a prompt elsewhere takes two",
            "raise `spec.replicas`",
        ),
        "TransferOverTcp": Reason(
            "(advice) engines send each other blocks over TCP, which takes CPU time and delays answers",
            "set `spec.interconnect.rdma` where nodes have RDMA devices, or accept the cost",
        ),
        "GatewayTimeoutUnknown": Reason(
            "(advice) how long the gateway waits for the picker is set elsewhere, and must include a prefill",
            "raise the message timeout of its ext_proc filter",
        ),
        "TlsPolicyMissing": Reason(
            "(advice) Istio asks the pickers in plaintext, which they refuse: requests fail with 500",
            "install the BackendTLSPolicy of Gateway API 1.4, or create a DestinationRule",
        ),
        "PolicyForeign": Reason(
            "(advice) a policy with the name of the operator's exists and does not belong to the pool",
            "keep it, or delete it to have the operator's",
        ),
        "PolicyRefused": Reason(
            "(advice) a policy for the gateway could not be created, and the pool is attached without it",
            "upgrade the gateway, or give the operator the rights of its chart",
        ),
        "InServiceMesh": Reason(
            "(advice) a service mesh has added its proxy to pods of the pool, or redirects their traffic",
            "leave the pods out of the mesh with the label or annotation that the advice names",
        ),
        "NodesUnknown": Reason(
            "(advice) no node label names the accelerator",
            "set `spec.podTemplate.spec.nodeSelector`",
        ),
        "ClaimNotShared": Reason(
            "(advice) pods on several nodes cannot use the claim of weights or KV cache blocks",
            "use a claim with `ReadWriteMany`, or for weights `spec.model.cache.hostPath`",
        ),
        "BlocksNotShared": Reason(
            "(advice) another pool has the same model on the claim for blocks, but other settings",
            "set what the advice names alike, or leave it: the pools only share the space",
        ),
        "ClientsUnknown": Reason(
            "(advice) the gateway's pods are not known, so every pod may connect to the engines",
            "name them in `spec.networkPolicy.from`, or accept it with `spec.networkPolicy.mode: Open`",
        ),
        "MetricsClosed": Reason(
            "(advice) no PodMonitors are created, so nothing but the picker reads the engines' metrics",
            "name the collectors and the gateway in `spec.networkPolicy.from`",
        ),
    }
)
"""Reasons about what works, waits or starts, and of advice."""

REASONS: Final[Mapping[str, Reason]] = MappingProxyType({**SPEC, **CLUSTER, **PODS, **SERVING})
