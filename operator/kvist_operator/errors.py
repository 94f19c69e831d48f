"""Every exception of the operator; each message names the field and the remedy.

::

    OperatorError
    ├── SpecError        a field of the pool that cannot be used
    ├── ModelError       a model whose facts cannot be used: no config.json, GGUF, an unknown layout
    │   └── ModelNotFound    no source has the facts
    ├── HardwareError    an accelerator that is not known, or nothing says which one
    ├── RenderError      a plan that cannot become objects on this cluster
    ├── ClusterError     the API server refused, or could not be reached
    │   ├── Conflict         409: the object has changed, or is another one
    │   ├── Forbidden        401, 403: a right of ours is missing
    │   ├── QuotaExceeded    403 of a ResourceQuota
    │   ├── Refused          400, 403, 413, 422: the object, by validation or by somebody's admission
    │   ├── NotServed        404 for a whole API, or for a namespace that has gone
    │   └── Unavailable      429, 5xx, no answer: worth another try
    ├── FleetError       a picker does not answer for its fleet, or not as it should
    ├── InternalError    a fault of the operator's own
    ├── StartError       the operator cannot start: no cluster, no CRD, rights that are missing
    └── SettingsError    flags that do not go together

A plan that does not fit is no exception but a verdict: see ``plan.outcome``.
"""

from typing import ClassVar


class OperatorError(Exception):
    """Base of all; ``reason`` is the CamelCase reason of the condition it becomes."""

    reason: ClassVar[str] = "Error"


class SpecError(OperatorError):
    """``field`` is the path, ``spec.engine.maxModelLen``; the message starts with it."""

    reason = "InvalidSpec"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class ModelError(OperatorError):
    """Names the model and what about it cannot be used."""

    reason = "ModelUnusable"


class ModelNotFound(ModelError):
    """No source has the facts of the model; says where they can be given."""

    reason = "ModelNotFound"


class HardwareError(OperatorError):
    """Names the product that is not known, or the field that would tell."""

    reason = "AcceleratorUnknown"


class RenderError(OperatorError):
    """Names the API that is missing and what to do."""

    reason = "ApiMissing"


class ClusterError(OperatorError):
    """``status`` of the answer, 0 without one; the message has the API server's own."""

    reason = "ApiError"

    def __init__(self, message: str, status: int = 0, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        """Seconds that the API server asks to wait for; 0 where it does not say."""


class Conflict(ClusterError):
    """To be read again."""

    reason = "Conflict"


class Forbidden(ClusterError):
    """Names the right that is missing."""

    reason = "Forbidden"


class QuotaExceeded(ClusterError):
    """Names the quota."""

    reason = "QuotaExceeded"


class Refused(ClusterError):
    """What is wrong with the object, or who does not want it."""

    reason = "ObjectRefused"


class NotServed(ClusterError):
    """Names the API."""

    reason = "ApiMissing"


class Unavailable(ClusterError):
    """Comes again by itself."""

    reason = "ApiUnavailable"


class FleetError(OperatorError):
    """Says what is wrong with the answer; the others' still count."""

    reason = "PickerSilent"


class InternalError(OperatorError):
    """What Python says; the log has the rest."""

    reason = "InternalError"


class StartError(OperatorError):
    """What has to be there first, and how it gets there."""

    reason = "CannotStart"


class SettingsError(OperatorError):
    """Names the flag."""

    reason = "InvalidSettings"
