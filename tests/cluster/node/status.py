"""The status of a pod as a kubelet reports it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .follow import Json, now

KILLED: Final = 137
"""128 + SIGKILL: how a shell writes the end of a killed process."""


@dataclass
class Condition:
    """One container as the API has it."""

    name: str
    image: str
    waiting: tuple[str, str] = ("ContainerCreating", "")
    """Reason and message, while it is about to run; no reason: it is not."""
    running: str = ""
    """Since when."""
    ended: Json | None = None
    """How it ended last, while it does not run."""
    before: Json | None = None
    """How the run before this one ended."""
    restarts: int = 0
    ready: bool = False
    started: bool = False
    id: str = ""

    def state(self) -> Json:
        """Exactly one of three."""
        if self.running:
            return {"running": {"startedAt": self.running}}
        if self.ended and not self.waiting[0]:
            return {"terminated": self.ended}
        reason, message = self.waiting
        return {"waiting": {"reason": reason, **({"message": message} if message else {})}}

    def json(self) -> Json:
        """Return the ``containerStatus``."""
        last = self.before if self.running or not self.waiting[0] else (self.ended or self.before)
        return {
            "name": self.name,
            "image": self.image,
            "imageID": self.image if self.id else "",
            "containerID": f"process://{self.id}" if self.id else "",
            "restartCount": self.restarts,
            "ready": self.ready,
            "started": self.started,
            "state": self.state(),
            "lastState": {"terminated": last} if last else {},
        }


def terminated(code: int, *, began: str, message: str, killed_by_us: bool) -> Json:
    """Return the ``terminated`` state of a container; ``code`` as ``wait`` returns it, negative for a signal.
    A process that exits with 137 is taken for one that exceeded its memory limit, which nothing here
    enforces."""
    reason = "Completed" if code == 0 else "Error"
    if code == KILLED and not killed_by_us:
        reason = "OOMKilled"
    found: Json = {
        "exitCode": code if code >= 0 else 128 - code,
        "reason": reason,
        "startedAt": began,
        "finishedAt": now(),
    }
    return found | ({"message": message} if message else {})


@dataclass
class PodCondition:
    """A pod as the API has it."""

    node_address: str
    address: str = ""
    began: str = field(default_factory=now)
    initialized: bool = False
    init: Sequence[Condition] = ()
    containers: Sequence[Condition] = ()
    gates: Sequence[str] = ()
    failure: tuple[str, str] = ("", "")
    """Reason and message of a pod that the kubelet itself has ended."""
    _since: dict[str, tuple[bool, str]] = field(default_factory=dict)

    def json(self, always: str) -> Json:
        """The status a kubelet writes; ``always`` is the pod's restart policy."""
        ready = all(c.ready for c in self.containers)
        found: Json = {
            "phase": self._phase(always),
            "hostIP": self.node_address,
            "hostIPs": [{"ip": self.node_address}],
            "startTime": self.began,
            "conditions": [
                self._condition("PodReadyToStartContainers", good=bool(self.address)),
                self._condition("Initialized", good=self.initialized),
                self._condition("ContainersReady", good=ready, why=self._unready()),
                self._condition("Ready", good=ready, why=self._unready()),
            ],
            "containerStatuses": [c.json() for c in self.containers],
        }
        if self.init:
            found["initContainerStatuses"] = [c.json() for c in self.init]
        if self.address:
            found |= {"podIP": self.address, "podIPs": [{"ip": self.address}]}
        if self.failure[0]:
            found |= {"phase": "Failed", "reason": self.failure[0], "message": self.failure[1]}
        return found

    def _phase(self, policy: str) -> str:
        over = [c.ended for c in self.containers if c.ended and not c.running and not c.waiting[0]]
        if len(over) == len(self.containers) and policy != "Always":
            failed = any(e["exitCode"] for e in over)
            if not failed or policy == "Never":
                return "Failed" if failed else "Succeeded"
        begun = any(c.running or c.ended for c in self.containers)
        return "Running" if begun and self.initialized else "Pending"

    def _unready(self) -> Mapping[str, str]:
        names = [c.name for c in self.containers if not c.ready]
        about = f"containers with unready status: [{' '.join(names)}]"
        return {"reason": "ContainersNotReady", "message": about}

    def _condition(self, kind: str, *, good: bool, why: Mapping[str, str] | None = None) -> Json:
        was, since = self._since.get(kind, (None, ""))
        if was is not good:
            since = now()
            self._since[kind] = (good, since)
        found: dict[str, Any] = {"type": kind, "status": "True" if good else "False"}
        return found | {"lastTransitionTime": since} | ({} if good or why is None else dict(why))
