"""Targets of fuzzing: each takes bytes and fails by an exception; each has seeds to begin with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError
from tests.epp.extproc import messages
from tests.epp.http2.h2 import frame
from tests.fuzz import conversation
from tests.fuzz.conversation import Script

from kvist_epp.errors import BadRequest, NoEndpoints, PickError, ProtocolError
from kvist_epp.extproc.access_log import decode_access_log
from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pb.accesslog_pb2 import HTTPAccessLogEntry, StreamAccessLogsMessage
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.extproc.session import ExtProcSession
from kvist_epp.http2 import frames as f
from kvist_epp.http2.call import Message
from kvist_epp.names import BODY_CHUNK_BYTES, MODEL_REWRITE_HEADER
from kvist_epp.prompt.request import Request, parse

BODY: Final = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/inference/v1/generate",
    "/tokenize",
    "/",
)


@dataclass(frozen=True)
class Target:
    """One thing that must survive any bytes."""

    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


def http2(data: bytes) -> None:
    """A connection, by the steps of ``conversation``."""
    conversation.play(data)


def exchange(data: bytes) -> None:
    """An ext_proc stream: messages with two bytes of length each, or made of parts; answers are protobuf."""
    script = Script(data)
    stream = ExtProcSession(observe_responses=bool(script.number() & 1))
    try:
        while script.left > 0:
            step = stream.feed(_message(script))
            _checked(step.replies)
            if step.request is not None:
                _checked(stream.on_decision(_decision(script)).replies)
            if step.end:
                return
    except ProtocolError:
        return


def access_log(data: bytes) -> None:
    """A message of Envoy's access log."""
    bad: list[int] = []
    try:
        entries = decode_access_log(data, bad.append)
    except ProtocolError:
        return
    assert all(count > 0 for count in bad)
    assert all(entry.status >= 0 for entry in entries)


def request(data: bytes) -> None:
    """A body for one of the engines' paths."""
    path, body = PATHS[data[0] % len(PATHS)] if data else "/", data[1:]
    try:
        assert isinstance(parse(path, body), Request)
    except BadRequest:
        return


def _message(script: Script) -> bytes:
    kind = script.number()
    content = script.bytes(script.number(2))
    match kind % 8:
        case 0:
            return messages.request_headers(end=True)
        case 1:
            modes = messages.config(kind // 8 % 6, script.number() % 6)
            return messages.request_headers(modes, headers=_header(kind, content))
        case 2:
            return messages.request_body(content, end=bool(kind & 8))
        case 3:
            return messages.response_headers(
                end=bool(kind & 8), headers={"content-type": "text/event-stream"}
            )
        case 4:
            return messages.response_body(content, end=bool(kind & 8))
        case 5:
            return messages.request_trailers() if kind & 8 else messages.response_trailers()
        case _:
            return content


def _header(kind: int, content: bytes) -> dict[str, str]:
    name = MODEL_REWRITE_HEADER if kind & 64 else "x-a"
    return {name: content.decode("latin-1")}


def _decision(script: Script) -> PickResult | PickError:
    choice = script.number()
    if choice & 1:
        return NoEndpoints("nobody")
    body = script.bytes(choice) if choice & 2 else None
    return PickResult(("10.0.0.1:8000",), (("x-session-id", "r.1"),), body=body)


def _checked(replies: Iterable[Message]) -> None:
    for reply in replies:
        try:
            answer = pb.ProcessingResponse.FromString(bytes(reply))
        except DecodeError as error:
            raise AssertionError("an answer that is no ProcessingResponse") from error
        chunk = answer.request_body.response.body_mutation.streamed_response.body
        assert len(chunk) <= BODY_CHUNK_BYTES


def _steps(*steps: bytes) -> bytes:
    return b"".join(steps)


def _log() -> bytes:
    entry = HTTPAccessLogEntry()
    entry.request.request_headers["x-session-id"] = "r.1"
    entry.common_properties.duration.FromMilliseconds(5)
    logs = StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=[entry.SerializeToString(), b"\xff"])
    return StreamAccessLogsMessage(http_logs=logs).SerializeToString()


def _sized(*parts: bytes) -> bytes:
    return b"".join(b"\x06" + len(part).to_bytes(2, "big") + part for part in parts)


OPEN_ECHO: Final = bytes((3, 0, 0))
SAY: Final = bytes((4, 0, 0, 50, 0, 0))
PING: Final = frame(f.PING, 0, 0, bytes(8))

TARGETS: Final = {
    "http2": Target(
        http2,
        (
            _steps(OPEN_ECHO, SAY, bytes((11, 255, 255)), bytes((4, 0, 1, 0, 0, 1))),
            _steps(
                OPEN_ECHO, bytes((3, 0, 1)), bytes((9, 1, 250, 0)), bytes((7, 200)), bytes(9), bytes((14,))
            ),
            _steps(bytes((8, 4, 0, 0, 0, 0)), OPEN_ECHO, SAY, bytes((13, 255)), bytes((13, 255))),
            _steps(bytes((2, 0, 2, 0, 0)), bytes((4, 0, 4, 0, 3, 0)), bytes((12,)), bytes((6, 0))),
            _steps(bytes((0, len(PING))), PING, b"\xff", bytes((10, 0, 5))),
            _steps(*(bytes((3, 0, 1)) for _ in range(8)), bytes((4, 0, 60, 0, 1, 0)), bytes((13, 200))),
        ),
    ),
    "exchange": Target(
        exchange,
        (
            b"\0"
            + _sized(messages.request_headers(messages.config(pb.BUFFERED)), messages.request_body(BODY)),
            b"\1"
            + _sized(
                messages.request_headers(messages.config(pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED)),
                messages.request_body(BODY),
            )
            + b"\0"
            + _sized(
                messages.response_headers(),
                messages.response_body(b'data: {"usage":{"prompt_tokens":1}}\n\n'),
            ),
            b"\0\x09\0\1x\2\x0a\0\3{} \x0c",
        ),
    ),
    "accesslog": Target(access_log, (_log(), b"")),
    "request": Target(request, tuple(bytes((at,)) + BODY for at in range(len(PATHS)))),
}
