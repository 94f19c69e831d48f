"""The response's half of an ext_proc stream that stays open (``--observe-responses``): pure.

Chunks go back as they came, without being parsed; usage is read from their bytes, and the model's name is
written back where a request was renamed. How each body mode is answered (Envoy's ``BodySendMode``):

====================  ========================================================================
FULL_DUPLEX_STREAMED  every byte is sent back, cut as we like
STREAMED, BUFFERED    one answer to each chunk: empty, or the chunk's new bytes
NONE, GRPC, unknown   nothing of the body is seen, or it is let pass
====================  ========================================================================
"""

from typing import Final

import msgspec

from kvist_epp.extproc import bodies
from kvist_epp.extproc import replies as reply
from kvist_epp.extproc.gateway_message import header_values
from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pb.base_pb2 import Metadata
from kvist_epp.extproc.rewrite import WriteBack
from kvist_epp.extproc.usage import Usage, UsageReader
from kvist_epp.names import DESTINATION_NAMESPACE, SERVED_KEY

_READABLE: Final = ("application/json", "text/event-stream")
_ECHOED: Final = pb.FULL_DUPLEX_STREAMED
_WHOLE_MESSAGE: Final = frozenset((pb.BUFFERED, pb.BUFFERED_PARTIAL))


class ObservedResponse(msgspec.Struct, frozen=True):
    """What was seen of a response, told once, when the stream ends."""

    session: str
    """The session of the pick."""
    request_id: str
    served: str | None
    """The endpoint that answered by the gateway's word, "ip:port" or "[v6]:port"."""
    status: int
    """HTTP status; 0 when no response was seen."""
    usage: Usage
    whole: bool
    """It was seen to its end; else the gateway ended the stream first."""


class Response:
    """Feed it the messages of one response; answers are serialised ``ProcessingResponse`` messages."""

    __slots__ = ("_back", "_mode", "_names", "_reader", "served", "status")

    def __init__(self, mode: int, names: tuple[str, str] | None) -> None:
        """``mode``: of the response's body. ``names``: the model's as the engine and as the client know it,
        where they differ."""
        self._mode = mode
        self._names = names
        self._reader: UsageReader | None = UsageReader()
        self._back = WriteBack(*names) if names else None
        self.served: str | None = None
        self.status = 0

    @property
    def usage(self) -> Usage:
        """As far as it was told."""
        return self._reader.usage if self._reader else Usage()

    def headers(self, message: pb.HttpHeaders, metadata: Metadata) -> bytes:
        """The answer to the headers; a body that is renamed loses its length."""
        headers = header_values(message)
        status = headers.get(":status", "")
        self.status = int(status) if status.isascii() and status.isdigit() else 0
        self.served = _served(metadata)
        if message.end_of_stream or not _is_readable(headers):
            self._reader = self._back = None
        if self._back and self._mode not in _WHOLE_MESSAGE:
            return reply.UNMEASURED_RESPONSE_HEADERS
        return reply.CONTINUE_RESPONSE_HEADERS

    def chunk(self, chunk: bodies.Chunk) -> list[bytes]:
        """The answers to one chunk of the body."""
        data = bytes(chunk.data) if self._reader or self._back else b""
        if self._reader:
            self._reader.feed(data)
        if self._back:
            return self._written_back(self._back.feed(data, last=chunk.end_of_stream), chunk.end_of_stream)
        return bodies.echo(chunk) if self._mode == _ECHOED else [reply.CONTINUE_RESPONSE_BODY]

    def trailers(self) -> list[bytes]:
        """The answers to trailers: what was kept back of the body, then they may pass.

        Only a full-duplex body can still grow; in other modes a body cut inside the model's key stays so."""
        kept = self._back.feed(b"", last=True) if self._back and self._mode == _ECHOED else b""
        body = bodies.streamed(bodies.RESPONSE_BODY - 1, kept, end_of_stream=False) if kept else []
        return [*body, reply.CONTINUE_RESPONSE_TRAILERS]

    def _written_back(self, data: bytes, end_of_stream: bool) -> list[bytes]:
        if self._mode == _ECHOED:
            if not data and not end_of_stream:
                return []
            return bodies.streamed(bodies.RESPONSE_BODY - 1, data, end_of_stream=end_of_stream)
        return [reply.response_body(data, measured=self._mode in _WHOLE_MESSAGE)]


def _is_readable(headers: dict[str, str]) -> bool:
    """JSON or SSE that is not compressed."""
    kind = headers.get("content-type", "").lower()
    return kind.startswith(_READABLE) and headers.get("content-encoding", "identity").lower() == "identity"


def _served(metadata: Metadata) -> str | None:
    """The endpoint that answered, as the Endpoint Picker Protocol has gateways report it."""
    if DESTINATION_NAMESPACE not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[DESTINATION_NAMESPACE].fields
    return fields[SERVED_KEY].string_value.strip() or None if SERVED_KEY in fields else None
