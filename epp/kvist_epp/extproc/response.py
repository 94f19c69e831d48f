"""The response's half of an ext_proc stream that stays open (``session`` says when).

Chunks go back as they came, without being parsed. Token usage is read from their bytes, and the model's name
is restored where a request was renamed. Answers by body mode (Envoy's ``BodySendMode``):

====================  ========================================================================
FULL_DUPLEX_STREAMED  every byte is sent back, split as we like
STREAMED, BUFFERED    one answer to each chunk: empty, or the chunk's new bytes
NONE, GRPC, unknown   no body arrives, or it passes
====================  ========================================================================
"""

import re
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Final

import msgspec

from kvist_epp.extproc import gateway_messages as gateway
from kvist_epp.extproc.gateway_messages import BodyChunk, header_values, served_endpoint
from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pb.base_pb2 import Metadata
from kvist_epp.extproc.rewrite import ModelNameRestorer, value_end
from kvist_epp.http2.call import Message
from kvist_epp.names import REQUEST_ID_HEADER

MAX_USAGE_BYTES: Final = 4096
"""Longest usage object that is read; at most twice as much is kept between chunks."""
MAX_TOKEN_COUNT: Final = 1 << 40
"""Counts above this are not believed."""

EVENT_STREAM: Final = "text/event-stream"
_READABLE: Final = ("application/json", EVENT_STREAM)
RESPONSES_PATH: Final = "/responses"
"""End of the path of OpenAI's Responses API, whose first events come before any output."""
FIRST_OUTPUT: Final = b"response.output_item.added"
"""The first event of the Responses API that vLLM sends when the engine has made a token."""
_ECHOED: Final = pb.FULL_DUPLEX_STREAMED
_WHOLE_MESSAGE: Final = frozenset((pb.BUFFERED, pb.BUFFERED_PARTIAL))
_HEADERS: Final = frozenset((":status", "content-type", "content-encoding"))

_USAGE_KEY: Final = b'"usage"'
_OBJECT_FOLLOWS: Final = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+(?=\{)")
_OBJECT_MAY_FOLLOW: Final = re.compile(rb"[ \t\n\r]*+(?::[ \t\n\r]*+)?\Z")


class Usage(msgspec.Struct):
    """Token counts that the engine reported; ``None`` where it reported none."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    """Tokens of the prompt that were taken from the prefix cache."""

    @property
    def known(self) -> bool:
        """Return whether the engine reported a count of prompt or completion tokens."""
        return self.prompt is not None or self.completion is not None


class ObservedResponse(msgspec.Struct, frozen=True):
    """The report on one response, made once, when its stream ends."""

    session: str
    """The session of the pick."""
    request_id: str
    served: str | None
    """The endpoint that answered according to the gateway, "ip:port" or "[v6]:port"."""
    status: int
    """HTTP status; 0 when no response was seen."""
    usage: Usage
    complete: bool
    """True if the whole response was observed, false if the gateway ended the stream before."""
    first_token_seconds: float | None = None
    """Time from the request's arrival to its first token; None if none was observed."""
    seconds: float = 0.0
    """Time from the request's arrival to the end of the stream."""


class FirstToken(msgspec.Struct, frozen=True):
    """The report on the first output of a streamed response, made when it passes."""

    session: str
    """The session of the pick."""
    request_id: str
    served: str | None
    """The endpoint that answers, as in `ObservedResponse`."""
    status: int
    seconds: float
    """Time since the request's headers arrived at the picker, its wait in the queue included."""


class _UsageObject(msgspec.Struct):
    prompt_tokens: Any = None
    input_tokens: Any = None
    completion_tokens: Any = None
    output_tokens: Any = None
    prompt_tokens_details: Any = None
    input_tokens_details: Any = None
    cache_read_input_tokens: Any = None


_decoder: Final = msgspec.json.Decoder(_UsageObject)


class UsageReader:
    """Reads token counts from the bytes of one response, JSON or SSE, however it is split into chunks.

    A ``"usage": {…}`` can only be the key of an object: inside the text that a model generated quotes are
    escaped. Neither lines nor documents therefore need to be kept together, and a carry of a few bytes is
    enough. Names of the counts: OpenAI's chat, completions and Responses, and Anthropic's messages, whose
    first event has the prompt's count and whose later ones the answer's. The last count of each kind counts.
    """

    __slots__ = ("_carry", "usage")

    def __init__(self) -> None:
        self._carry = b""
        self.usage = Usage()

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the response."""
        text = self._carry + data
        at = text.find(_USAGE_KEY)
        if at >= 0 and (b"}" in data or len(self._carry) < len(_USAGE_KEY)):
            at = self._read(text, at)
        if at < 0 or len(text) - at > 2 * MAX_USAGE_BYTES:
            at = max(len(text) - len(_USAGE_KEY) + 1, 0)
        self._carry = text[at:]

    def _read(self, text: bytes, at: int) -> int:
        """Read every complete usage object from ``at`` on; return the start of an incomplete one, else -1."""
        while at >= 0:
            after = at + len(_USAGE_KEY)
            if follows := _OBJECT_FOLLOWS.match(text, after):
                after = follows.end()
                value = text[after : after + MAX_USAGE_BYTES]
                end = value_end(value, 0)
                if end < 0 and len(value) < MAX_USAGE_BYTES:
                    return at
                if end > 0:
                    self._merge(value[:end])
            elif _OBJECT_MAY_FOLLOW.match(text, after):
                return at
            at = text.find(_USAGE_KEY, after)
        return -1

    def _merge(self, encoded: bytes) -> None:
        try:
            found = _decoder.decode(encoded)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        usage, cached = self.usage, found.cache_read_input_tokens
        for details in (found.prompt_tokens_details, found.input_tokens_details):
            if isinstance(details, dict):
                cached = details.get("cached_tokens")
        usage.prompt = _first_count(found.prompt_tokens, found.input_tokens, usage.prompt)
        usage.completion = _first_count(found.completion_tokens, found.output_tokens, usage.completion)
        usage.cached = _first_count(cached, usage.cached)


def _first_count(*counts: Any) -> int | None:
    return next((count for count in counts if type(count) is int and 0 <= count <= MAX_TOKEN_COUNT), None)


class Response:
    """Answers the messages of one response; every answer is a serialised ``ProcessingResponse``."""

    __slots__ = (
        "_arrived",
        "_before_output",
        "_clock",
        "_first_token_seconds",
        "_mode",
        "_reader",
        "_reported",
        "_restorer",
        "_streams",
        "served",
        "status",
    )

    def __init__(
        self,
        mode: int,
        names: tuple[str, str] | None,
        path: str = "",
        arrived: float = 0.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``mode`` is the response's body mode.

        ``names`` are the model's names for the engine and for the client, where these differ. ``path`` is the
        request's, and ``arrived`` the time by ``clock`` at which its headers arrived.
        """
        self._arrived, self._clock = arrived, clock
        self._first_token_seconds: float | None = None
        self._reported = False
        self._mode = mode
        self._streams = False
        self._before_output: bytes | None = b"" if path.endswith(RESPONSES_PATH) else None
        """Last bytes of events that come before the first output; None: any body is output."""
        self._reader: UsageReader | None = UsageReader()
        self._restorer = ModelNameRestorer(*names) if names else None
        self.served: str | None = None
        self.status = 0

    @property
    def usage(self) -> Usage:
        """Return the token counts read so far."""
        return self._reader.usage if self._reader else Usage()

    def headers(self, message: pb.HttpHeaders, metadata: Metadata) -> bytes:
        """Return the answer to the headers; ``content-length`` goes if the body will be changed."""
        headers = header_values(message, _HEADERS)
        status = headers.get(":status", "")
        self.status = int(status) if status.isascii() and status.isdigit() else 0
        self.served = served_endpoint(metadata)
        self._streams = self._mode not in _WHOLE_MESSAGE and _is_event_stream(headers)
        if message.end_of_stream or not _is_readable(headers):
            self._reader = self._restorer = None
        if self._restorer and self._mode not in _WHOLE_MESSAGE:
            return gateway.RESPONSE_HEADERS_WITHOUT_LENGTH
        return gateway.CONTINUE_RESPONSE_HEADERS

    def chunk(self, chunk: BodyChunk) -> Sequence[Message]:
        """Return the answers to one chunk of the body."""
        if self._streams and self._first_token_seconds is None and chunk.data:
            self._look_for_output(bytes(chunk.data))
        data = bytes(chunk.data) if self._reader or self._restorer else b""
        if self._reader:
            self._reader.feed(data)
        if not self._restorer:
            return gateway.encode_echo(chunk) if self._mode == _ECHOED else [gateway.CONTINUE_RESPONSE_BODY]
        data = self._restorer.feed(data, last=chunk.end_of_stream)
        if self._mode != _ECHOED:
            return [gateway.replace_response_chunk(data, set_length=self._mode in _WHOLE_MESSAGE)]
        if not data and not chunk.end_of_stream:
            return []
        return gateway.encode_streamed(gateway.REPLY_RESPONSE_BODY, data, end_of_stream=chunk.end_of_stream)

    def _look_for_output(self, data: bytes) -> None:
        if self._before_output is not None:
            text = self._before_output + data
            self._before_output = text[-len(FIRST_OUTPUT) :]
            if FIRST_OUTPUT not in text:
                return
        self._first_token_seconds = self._clock() - self._arrived

    def first_token(self, session: str, headers: Mapping[str, str]) -> FirstToken | None:
        """Return the report on the first output once, after it has passed; ``headers`` are the request's."""
        seconds = self._first_token_seconds
        if seconds is None or self._reported:
            return None
        self._reported = True
        return FirstToken(session, headers.get(REQUEST_ID_HEADER, ""), self.served, self.status, seconds)

    def report(self, session: str, headers: Mapping[str, str], *, complete: bool) -> ObservedResponse:
        """Return the report on the whole response, now that it has ended."""
        return ObservedResponse(
            session,
            headers.get(REQUEST_ID_HEADER, ""),
            self.served,
            self.status,
            self.usage,
            complete,
            self._first_token_seconds,
            self._clock() - self._arrived,
        )

    def trailers(self) -> Sequence[Message]:
        """Return the answers to trailers: the bytes held back of the body, then the trailers pass.

        Only a full-duplex body can still grow; in other modes a body that was split inside the model's key
        stays split there.
        """
        held = self._restorer.feed(b"", last=True) if self._restorer and self._mode == _ECHOED else b""
        body = gateway.encode_streamed(gateway.REPLY_RESPONSE_BODY, held, end_of_stream=False) if held else []
        return [*body, gateway.CONTINUE_RESPONSE_TRAILERS]


def _is_event_stream(headers: dict[str, str]) -> bool:
    return headers.get("content-type", "").lower().startswith(EVENT_STREAM)


def _is_readable(headers: dict[str, str]) -> bool:
    """Return whether the body is JSON or SSE and not compressed."""
    kind = headers.get("content-type", "").lower()
    return kind.startswith(_READABLE) and headers.get("content-encoding", "identity").lower() == "identity"
