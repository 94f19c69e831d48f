"""Every exception of the picker. Only the texts of ``PickError`` reach clients.

::

    KvistError
    ├── PickError            an answer other than an endpoint: status, reason, message
    │   ├── BadRequest       400
    │   ├── NoEndpoints      503
    │   ├── ShuttingDown     503
    │   ├── Cancelled        nobody hears it: the client has given up
    │   └── Shed             429 with Retry-After
    ├── ProtocolError        a peer broke HTTP/2, gRPC or ext_proc; ends a stream or a connection
    ├── EventError           an engine's event message that cannot be understood
    ├── SnapshotError        an invalid snapshot of another replica's index
    ├── ReplicaError         a call to another replica broke off
    ├── ModelFilesError      model files that are absent or unusable
    ├── EndpointsFileError   an endpoints file that cannot be used; the old fleet stays
    ├── CertificateError     a certificate, key or authority that cannot be used; the old one stays
    ├── UncleanShutdownError           a part of the picker failed, or its drain was cut short
    └── SettingsError        flags that do not go together
"""

from typing import ClassVar


class KvistError(Exception):
    """Base of all; never raised itself."""


class PickError(KvistError):
    """An answer other than an endpoint; ``extproc.replies`` turns it into OpenAI-style JSON.

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
    """What cannot be parsed as JSON where JSON is due, or lacks a model where one is due."""

    status = 400
    kind = "invalid_request_error"
    default_reason = "bad-request"


class NoEndpoints(PickError):
    """Nothing is eligible: subset, roles, readiness."""

    status = 503
    kind = "service_unavailable"
    default_reason = "rejected-no-endpoints"


class ShuttingDown(PickError):
    """It waited, and this picker's time is over: another one may have room."""

    status = 503
    kind = "service_unavailable"
    default_reason = "rejected-shutting-down"


class Cancelled(PickError):
    """The client gave up while its request waited: for the log and the metrics only."""

    status = 499
    kind = "cancelled"
    default_reason = "rejected-context-cancelled"


class Shed(PickError):
    """Dropped under load, or waited too long."""

    status = 429
    kind = "rate_limit_error"
    default_reason = "rejected-saturated"


class ProtocolError(KvistError):
    """A peer broke the protocol; ``code`` is the HTTP/2 error code (RFC 9113 section 7).

    ``reason`` is one of ``http2.port_stats.CONNECTION_ENDS``; empty: the reason that belongs to the code.
    """

    def __init__(self, message: str, code: int = 1, *, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class EventError(KvistError):
    """An event message that is no msgpack, of a wrong shape, or with fields of a wrong type."""


class ModelFilesError(KvistError):
    """Names the file and the remedy."""


class SnapshotError(KvistError):
    """A snapshot of a peer that cannot be what a peer sends; the engines' replay is asked instead."""


class ReplicaError(KvistError):
    """A call to another replica failed or broke off; the text is the reason."""


class EndpointsFileError(KvistError):
    """Names the entry and the field."""


class CertificateError(KvistError):
    """Names the file and what is wrong with it; never the content."""


class UncleanShutdownError(KvistError):
    """Why the process ends with a non-zero exit code although it was running."""


class SettingsError(KvistError):
    """Names the flag and the remedy."""
