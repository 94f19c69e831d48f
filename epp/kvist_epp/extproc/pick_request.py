"""The question that ext_proc puts to the picker, the picker's answer: at once, refused, or deferred, and the
steps of a stream in which both are.
"""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kvist_epp.errors import PickError
from kvist_epp.extproc.response import FirstToken, ObservedResponse
from kvist_epp.http2.call import Message


class PickRequest(msgspec.Struct, frozen=True):
    """One request for which an endpoint is to be picked."""

    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """Those of ``names.REQUEST_HEADERS`` but pseudo headers; latin-1, repeated ones joined by a comma."""
    body: bytes
    """The body, with the model's name already rewritten where a header asks for that."""
    subset: tuple[str, ...] | None
    """Endpoints the gateway allows, "ip" or "ip:port" each; ``None`` = no hint, empty = none is allowed."""
    partial: bool = False
    """True if the request has more body than ``body`` shows; its shape must then not be judged."""
    websocket: bool = False
    """True if it opens a WebSocket, which stays open as long as its client likes and may compute nothing."""


class PickResult(msgspec.Struct, frozen=True):
    """The endpoints a request is sent to, and the changes to make to it."""

    endpoints: tuple[str, ...]
    """Endpoints in order of preference, "ip:port" or "[v6]:port"; empty if this role does not pick."""
    headers: tuple[tuple[str, str], ...] = ()
    """Request headers to set besides the destination."""
    body: bytes | None = None
    """A replacement for the body, used only if the body was seen whole; ``content-length`` is adjusted."""
    session: str = ""
    """The picker's name for this request, repeated in the report on its response."""
    remove: tuple[str, ...] = ()
    """Request headers to remove."""


class SessionStep(msgspec.Struct, frozen=True):
    """Actions that follow from one message, to be performed in the order of the fields."""

    replies: tuple[Message, ...] = ()
    """Serialised ``ProcessingResponse`` messages to send."""
    request: PickRequest | None = None
    """A question to the picker, whose decision goes to `ExtProcSession.on_decision`."""
    end: bool = False
    """Whether to end the stream with grpc-status 0."""
    observed: ObservedResponse | None = None
    """The report on the response, at most once per stream."""
    first_token: FirstToken | None = None
    """The report on the first output of the response, at most once per stream."""


NOTHING: Final = SessionStep()
"""No action: the step of most messages."""


class Effect:
    """A step to carry out before a request can be answered, such as to ask an engine (``disaggregation``)."""

    __slots__ = ()


Decision = PickResult | PickError

DecisionCallback = Callable[[Decision | Exception], None]
"""Receives the decision, or the exception that was raised while it was made."""


class PendingResult:
    """A decision that is made later, for a queued request. Used on the event loop's thread only.

    A callback instead of a task: tens of thousands of requests may be queued at once, and a task with its
    coroutine costs each of them two kilobytes.
    """

    __slots__ = ()

    def then(self, callback: DecisionCallback) -> None:
        """Register the one callback, right after creation; it is never called from within this call."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Abandon the request: the callback will not be called. Harmless after the decision."""
        raise NotImplementedError
