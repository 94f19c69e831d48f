"""The fault of one container: the kubelet's reason, or how it ended; and the fields that remedies name. Pure.

Reasons: ``pkg/kubelet/images/types.go``, ``pkg/kubelet/container/sync_result.go``,
``pkg/kubelet/kuberuntime`` of Kubernetes 1.36.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from kvist_operator.manifests.object_names import DOWNLOAD, ENGINE, ENVOY, KV_CLEANER, LMCACHE, PICKER
from kvist_operator.spec.pod_template import ENGINES, ENVOYS, PICKERS
from kvist_operator.spec.pool import COMPONENT

from .termination_message import DISK, cleaned, last_words
from .views import Object


@dataclass(frozen=True, slots=True)
class ComponentFields:
    """Fields of the pool that configure a component, in the words in which remedies name them."""

    component: str
    """Name of the component and of its own container; others come from an overlay or a webhook."""
    image: str
    resources: str
    starting: str
    """Field that allows a longer start; empty if there is none."""
    command: str
    """Fields from which the arguments come."""
    volumes: str
    overlay: str
    """Overlay of the component's pods."""


PARTS: Final[Mapping[str, ComponentFields]] = {
    ENGINE: ComponentFields(
        component=ENGINE,
        image="spec.engine.image",
        resources="spec.podTemplate.spec.containers[engine].resources",
        starting="spec.rollout.startupSeconds",
        command="spec.engine.extraArgs and spec.engine.env",
        volumes="spec.model.source, spec.model.cache and spec.podTemplate.spec.volumes",
        overlay=ENGINES.path,
    ),
    PICKER: ComponentFields(
        component=PICKER,
        image="spec.picker.image",
        resources="spec.picker.resources",
        starting="",
        command="spec.picker (use an image of the operator's own version)",
        volumes="spec.picker.tokenizer",
        overlay=PICKERS.path,
    ),
    ENVOY: ComponentFields(
        component=ENVOY,
        image="the Envoy image that the operator was installed with",
        resources="spec.gateway.podTemplate.spec.containers[envoy].resources",
        starting="",
        command="spec.gateway (use the Envoy image of the operator's own version)",
        volumes="the ConfigMaps of the pool",
        overlay=ENVOYS.path,
    ),
    DOWNLOAD: ComponentFields(
        component=DOWNLOAD,
        image="spec.picker.image",
        resources="the namespace's limits",
        starting="",
        command="spec.model.source and spec.model.tokenSecretRef",
        volumes="spec.model.cache",
        overlay=PICKERS.path,
    ),
    KV_CLEANER: ComponentFields(
        component=KV_CLEANER,
        image="spec.picker.image",
        resources="the namespace's limits",
        starting="",
        command="spec.offload.shared",
        volumes="spec.offload.shared.claim",
        overlay=PICKERS.path,
    ),
    LMCACHE: ComponentFields(
        component=LMCACHE,
        image="spec.offload.lmcache.image",
        resources="spec.offload.lmcache.memory",
        starting="",
        command="spec.offload.lmcache",
        volumes="spec.offload.lmcache",
        overlay=ENGINES.path,
    ),
}


def part_of(pod: Object) -> ComponentFields:
    """Return the fields of a pod's component, by its label; those of engines if it has none."""
    labels = pod["metadata"].get("labels") or {}
    return PARTS.get(labels.get(COMPONENT, ENGINE), PARTS[ENGINE])


CACHE_FULL: Final = (
    "Enlarge the claim or the disk of spec.model.cache, or remove models that are not used from it"
)

KILLED, SEGFAULT, BUS, TERMINATED = 137, 139, 135, 143
"""Exit codes after a signal: 128 and the number of the signal."""

IMAGE: Final = (
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "RegistryUnavailable",
    "ImageInspectError",
    "SignatureValidationFailed",
)
NOT_CREATED: Final = ("CreateContainerError", "RunContainerError", "StartError", "PostStartHookError")
_PULL_NOISE: Final = re.compile(
    r'^(Back-off pulling image "[^"]*": )?(ErrImagePull: )?(failed to pull and unpack image "[^"]*": )?'
    r"(rpc error: code = \w+ desc = )?"
)


@dataclass(frozen=True, slots=True)
class PodFinding:
    """A fault of a pod."""

    reason: str
    words: str
    """What is wrong, often in the words of the kubelet or of the container."""
    remedy: str


def waiting(state: Object, container: Object, part: ComponentFields) -> PodFinding | None:
    """Return the fault in ``state.waiting`` of a container's status; None while it is only being created."""
    why, message = str(state.get("reason") or ""), cleaned(state.get("message"))
    if why in IMAGE:
        words = _PULL_NOISE.sub("", message) or why
        return PodFinding("ImagePull", words, _pull_remedy(message, container, part))
    if why == "InvalidImageName":
        remedy = f"Write {_image(container, part)} like registry.example.com/team/image:tag"
        return PodFinding("InvalidImage", message or why, remedy)
    if why == "CreateContainerConfigError":
        return PodFinding("ConfigMissing", message or why, _config_remedy(message, part))
    if why in NOT_CREATED:
        return PodFinding("CannotStart", message or why, _start_remedy(message, container, part))
    return None


def _image(container: Object, part: ComponentFields) -> str:
    """Return the field with the image of a container."""
    name = container.get("name", "")
    return part.image if name == part.component else f"the image of container {name} in {part.overlay}"


def _pull_remedy(message: str, container: Object, part: ComponentFields) -> str:
    field = _image(container, part)
    image = container.get("image", "")
    if re.search(r"(?i)unauthorized|forbidden|denied|401|403|no basic auth", message):
        secret = f"{part.overlay}.spec.imagePullSecrets"
        return f"Check {field} ({image}); a private registry needs a pull secret, in {secret}"
    if re.search(r"(?i)no match for platform|no matching manifest|exec format", message):
        return f"{field} ({image}) has no variant for the node's architecture: use another image"
    if re.search(r"(?i)not found|manifest unknown|does not exist", message):
        return f"Check the name and tag of {field} ({image})"
    if "no space left" in message:
        return "The node's disk is full: free space on it, or use a node with a larger disk"
    return f"Check {field} ({image}), and that the nodes can reach its registry"


def _config_remedy(message: str, part: ComponentFields) -> str:
    found = re.search(r'(?P<kind>secret|configmap) "(?P<name>[^"]+)" not found', message)
    if found:
        own = "spec.engine.apiKeySecretRef, spec.model.tokenSecretRef or spec.engine.env"
        fields = own if part.component == ENGINE else "spec.picker"
        kind = {"secret": "Secret", "configmap": "ConfigMap"}[found["kind"]]
        return f"Create the {kind} {found['name']} in this namespace, or change {fields}"
    if "couldn't find key" in message:
        return (
            "Add the key to the object, or name another key: spec.engine.apiKeySecretRef.key, "
            "spec.model.tokenSecretRef.key, spec.engine.env"
        )
    if "runAsNonRoot" in message or "run as root" in message:
        return f"Set a numeric user: {part.overlay}.spec.securityContext.runAsUser"
    return f"Check {part.command}"


def _start_remedy(message: str, container: Object, part: ComponentFields) -> str:
    if "executable file not found" in message or "no such file or directory" in message:
        return f"{_image(container, part)} has no such program on its PATH: use an image that has it"
    return f"Check {_image(container, part)} and {part.volumes}"


def ended(state: Object, container: Object, restarts: int, part: ComponentFields) -> PodFinding:
    """Return the fault of a container that should not have ended, from its ``terminated`` state."""
    code = int(state.get("exitCode") or 0)
    if state.get("reason") == "OOMKilled":
        return _killed_for_memory(container, part)
    if state.get("reason") in ("ContainerCannotRun", "StartError"):
        message = cleaned(state.get("message"))
        return PodFinding("CannotStart", message, _start_remedy(message, container, part))
    said = last_words(str(state.get("message") or ""))
    if said.reason and part.component in (ENGINE, DOWNLOAD):
        full = said.reason == DISK and container.get("name") == DOWNLOAD
        return PodFinding(said.reason, said.words, CACHE_FULL if full else said.remedy)
    slow = _slow(state, container, part) if code in (0, KILLED, TERMINATED) else None
    return slow or _crashed(said.words, code, restarts, part)


def _killed_for_memory(container: Object, part: ComponentFields) -> PodFinding:
    limit = ((container.get("resources") or {}).get("limits") or {}).get("memory", "what the node has")
    words = f"container {container.get('name')} was killed because it used more memory than {limit}"
    more = " (spec.offload.cpu counts against it)" if part.component == ENGINE else ""
    limit = f"{part.resources}.limits.memory" if part.resources.endswith("resources") else part.resources
    return PodFinding("OutOfMemory", words, f"Raise the limit, {limit}{more}")


def _slow(state: Object, container: Object, part: ComponentFields) -> PodFinding | None:
    """Return the fault of a container that the kubelet ended because its startup probe failed for too
    long."""
    probe, begun, over = container.get("startupProbe"), state.get("startedAt"), state.get("finishedAt")
    if not probe or not begun or not over:
        return None
    allowed = probe.get("failureThreshold", 3) * probe.get("periodSeconds", 10)
    if (datetime.fromisoformat(str(over)) - datetime.fromisoformat(str(begun))).total_seconds() < allowed:
        return None
    words = f"container {container.get('name')} was not ready after {allowed} s and was restarted"
    remedy = f"Raise {part.starting}" if part.starting else "See its logs"
    faster = ", or make it load faster (spec.model.source: pvc:// or oci://)" if part.starting else ""
    return PodFinding("StartsTooSlowly", words, remedy + faster)


def _crashed(words: str, code: int, restarts: int, part: ComponentFields) -> PodFinding:
    times = f"{restarts + 1} times" if restarts else "once"
    signals = {KILLED: "SIGKILL", SEGFAULT: "SIGSEGV", BUS: "SIGBUS", TERMINATED: "SIGTERM", 134: "SIGABRT"}
    signal = f" ({signals[code]})" if code in signals else ""
    head = f"the container has exited {times}, with code {code}{signal}"
    said = f"{head}: {words}" if words else f"{head} and printed nothing"
    remedies = {
        BUS: "Shared memory is too small: enlarge the volume shm in spec.podTemplate.spec.volumes",
        127: f"Check {part.image}: the program is not in it",
    }
    otherwise = f"See the container's log (kubectl logs --previous); check {part.command}"
    return PodFinding("CrashLoop", said, remedies.get(code, otherwise))
