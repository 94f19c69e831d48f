"""All exceptions of the picker. Only the texts of ``PickError`` reach clients.

::

    KvistError
    ├── PickError            an answer other than an endpoint: status, reason, message
    │   ├── BadRequest       400
    │   ├── NoEndpoints      503
    │   ├── ShuttingDown     503
    │   ├── Cancelled        logged only: the client has cancelled
    │   └── Shed             429 with Retry-After
    ├── ProtocolError        a peer broke HTTP/2, gRPC or ext_proc; ends a stream or a connection
    ├── EventError           an engine's event message that cannot be understood
    ├── SnapshotError        an invalid snapshot of another replica's index
    ├── ReplicaError         a call to another replica broke off
    ├── ModelFilesError      model files that are absent or unusable
    ├── EndpointsFileError   an endpoints file that cannot be used; the old fleet stays
    ├── CertificateError     a certificate, key or authority that cannot be used; the old one stays
    ├── ExportError          a collector that did not take spans
    ├── UncleanShutdownError           a part of the picker failed, or its drain was cut short
    └── SettingsError        flags that do not go together
"""

import traceback
from typing import ClassVar


class KvistError(Exception):
    """Base class of all exceptions of the picker; never raised itself."""


class PickError(KvistError):
    """An answer other than an endpoint; ``extproc.gateway_messages`` turns it into OpenAI-style JSON.

    ``reason`` is the machine-readable value of ``x-kvist-dropped-reason``; the message is for people
    and must never contain prompt text.
    """

    status: ClassVar[int]
    kind: ClassVar[str]
    default_reason: ClassVar[str]

    def __init__(self, message: str, *, reason: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.retry_after = retry_after


class BadRequest(PickError):
    """A body that is not JSON, or has no model, on a path that requires them."""

    status = 400
    kind = "invalid_request_error"
    default_reason = "bad-request"


class NoEndpoints(PickError):
    """No endpoint is eligible, by subset, role or readiness."""

    status = 503
    kind = "service_unavailable"
    default_reason = "rejected-no-endpoints"


class ShuttingDown(PickError):
    """The picker shuts down while the request is queued; another replica may have capacity."""

    status = 503
    kind = "service_unavailable"
    default_reason = "rejected-shutting-down"


class Cancelled(PickError):
    """The client cancelled its queued request; used for the log and the metrics only."""

    status = 499
    kind = "cancelled"
    default_reason = "rejected-context-cancelled"


class Shed(PickError):
    """The request was rejected under load, or was queued too long."""

    status = 429
    kind = "rate_limit_error"
    default_reason = "rejected-saturated"


class ProtocolError(KvistError):
    """A peer broke the protocol; ``code`` is the HTTP/2 error code (RFC 9113 section 7).

    ``reason`` is one of ``http2.limits.CONNECTION_ENDS``; empty: the reason that belongs to the code.
    """

    def __init__(self, message: str, code: int = 1, *, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class EventError(KvistError):
    """An event message that is not msgpack, has a wrong shape, or has fields of a wrong type."""


class ModelFilesError(KvistError):
    """Model files that are absent or unusable; the text names the file and the remedy."""


class SnapshotError(KvistError):
    """An invalid snapshot from another replica; the index is filled by the engines' replays instead."""


class ReplicaError(KvistError):
    """A call to another replica failed or broke off; the text is the reason."""


class EndpointsFileError(KvistError):
    """An unusable endpoints file; the text names the entry and the field."""


class CertificateError(KvistError):
    """An unusable certificate, key or authority; the text names the file and the fault, never the content."""


class ExportError(KvistError):
    """Spans that a collector did not take; ``retry``: it may take them later."""

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


class UncleanShutdownError(KvistError):
    """The reason why a running process exits with a non-zero code."""


class SettingsError(KvistError):
    """Invalid flags, or flags that exclude each other; the text names the flag and the remedy."""


def traceback_without_text(error: Exception) -> str:
    """Return the type and the traceback of an exception without its text, which may quote a prompt."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}"
