"""All exceptions of the operator; each message names the field and the remedy.

::

    OperatorError
    ├── SpecError        a field of the pool that has an invalid value
    ├── ModelError       a model whose facts cannot be used: no config.json, GGUF, an unknown layout
    │   └── ModelNotFound    no source has the facts
    ├── HardwareError    an accelerator that is not known, or nothing says which one
    ├── RenderError      a plan that cannot become objects on this cluster
    ├── ClusterError     the API server refused, or could not be reached
    │   ├── Conflict         409: the object has changed, or is another one
    │   ├── Forbidden        401, 403: the operator lacks a right
    │   ├── QuotaExceeded    403 of a ResourceQuota
    │   ├── Refused          400, 403, 413, 422: the object was rejected by validation or admission; 500: the
    │   │                    cluster's version of its kind lacks a field
    │   ├── NotServed        404 for a whole API, or for a namespace that has gone
    │   └── Unavailable      429, 5xx, no answer: to be tried again
    ├── FleetError       a picker does not answer GET /fleet, or not correctly
    ├── InternalError    a defect of the operator
    ├── LeadershipLost   another replica of the operator may lead now
    ├── StartError       the operator cannot start: no cluster, no CRD, rights that are missing
    └── OperatorSettingsError  flags that do not go together

A plan that does not fit is a verdict, not an exception: see ``plan.plan``.
"""

from typing import ClassVar, Final

INTERNAL_SERVER_ERROR: Final = 500


class OperatorError(Exception):
    """Base class; ``reason`` is the reason of the condition that the error becomes."""

    reason: ClassVar[str] = "Error"


class SpecError(OperatorError):
    """An invalid field; ``field`` is its path, such as ``spec.engine.maxModelLen``, with which the message
    begins."""

    reason = "InvalidSpec"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ModelError(OperatorError):
    """A model that cannot be used; the message names the model and the cause."""

    reason = "ModelUnusable"


class ModelNotFound(ModelError):
    """A model whose facts no source has; the message says where they can be given."""

    reason = "ModelNotFound"


class HardwareError(OperatorError):
    """An unknown accelerator; the message names the product, or the field to set."""

    reason = "AcceleratorUnknown"


class RenderError(OperatorError):
    """A missing API; the message names it and the remedy."""

    reason = "ApiMissing"


class ClusterError(OperatorError):
    """A failed request; ``status`` is that of the answer, 0 without one. The message has the API server's
    own."""

    reason = "ApiError"

    def __init__(self, message: str, status: int = 0, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        """Seconds that the API server asks to wait; 0 when it does not ask."""

    @property
    def aborts(self) -> bool:
        """Whether the other objects of a pool cannot be written now, either."""
        return False


class Conflict(ClusterError):
    """An object that has changed and has to be read again."""

    reason = "Conflict"

    @property
    def aborts(self) -> bool:
        """True: what is to be written follows from what is read again."""
        return True


class Forbidden(ClusterError):
    """A missing right, named by the message."""

    reason = "Forbidden"


class QuotaExceeded(ClusterError):
    """An exceeded quota, named by the message."""

    reason = "QuotaExceeded"


class Refused(ClusterError):
    """A rejected object; the message has the cause."""

    reason = "ObjectRefused"


class NotServed(ClusterError):
    """An absent API, named by the message."""

    reason = "ApiMissing"


class Unavailable(ClusterError):
    """A temporary failure; the request will be repeated."""

    reason = "ApiUnavailable"

    @property
    def aborts(self) -> bool:
        """False for 500: the API server answers, but cannot write this object, for example since an admission
        webhook is down."""
        return self.status != INTERNAL_SERVER_ERROR


class FleetError(OperatorError):
    """A missing or invalid answer of one picker; other pickers' answers still count."""

    reason = "PickerSilent"


class InternalError(OperatorError):
    """A defect of the operator; the log has the traceback."""

    reason = "InternalError"


class LeadershipLost(OperatorError):
    """The end of this replica's term as leader; the process ends and starts again as one that waits."""

    reason = "LeadershipLost"


class StartError(OperatorError):
    """A missing precondition of the start; the message has the remedy."""

    reason = "CannotStart"


class OperatorSettingsError(OperatorError):
    """An invalid flag, named by the message."""

    reason = "InvalidSettings"
