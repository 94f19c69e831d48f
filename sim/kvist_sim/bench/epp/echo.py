"""A bare ext_proc server over HTTP/2: the fixed unit of the CPU times that ``kvist bench epp`` measures.

``python -m kvist_sim.bench.epp.echo PORT ENDPOINT`` answers each request with the endpoint and the request's
own body; Envoy shows it no responses. It has no index, no load, no log, no limits and no error handling. It
does not use the picker's own server, so that a change there does not change the unit; for the same reason
this file is not to be made faster or slower.

Frames: RFC 9113, sections 4 and 6. Messages: Envoy's ``ext_proc.proto``, bodies of requests in full duplex.
"""

import asyncio
import struct
import sys
from typing import Final, cast

import uvloop

from kvist_epp.extproc.pb import ext_proc_pb2 as pb

ENDPOINT_HEADER: Final = "x-gateway-destination-endpoint"
CHUNK_BYTES: Final = 62_000
"""Largest piece of a body in one message: Envoy takes up to 64 KB."""
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW, _FRAME_SIZE = 4, 5
"""Numbers of settings."""
_PREFACE_BYTES: Final = 24
_FRAME_HEAD: Final = 9
_MESSAGE_HEAD: Final = 5
_CONNECTION_WINDOW: Final = 1 << 30
_STREAM_WINDOW: Final = 1 << 24
_WINDOW_STEP: Final = 1 << 23
"""Bytes after which the connection's window is opened again."""
_STATUS: Final = b"\x88\x0f\x10\x10application/grpc"
"""HPACK: ":status: 200" and the content type, without Huffman coding."""
_TRAILERS: Final = b"\x00\x0bgrpc-status\x010"


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + _varint(len(value)) + value


def _body_answer(part: bytes) -> bytes:
    """Return a message that gives a part of a body back: field, common response, mutation, streamed part."""
    return _field(b"\x1a", _field(b"\x0a", _field(b"\x1a", _field(b"\x1a", part))))


class _Stream:
    __slots__ = ("body", "buffer", "started", "unsent", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.started = False
        self.buffer = b""
        self.body: list[bytes] = []
        self.unsent: list[bytes] = []


class Echo(asyncio.Protocol):
    """One connection of a gateway."""

    def __init__(self, endpoint: str) -> None:
        """``endpoint``: "ip:port" of the answer to every request."""
        option = {"header": {"key": ENDPOINT_HEADER, "raw_value": endpoint.encode()}}
        answer = pb.ProcessingResponse()
        answer.request_headers.response.header_mutation.set_headers.add(**option)
        answer.request_headers.response.clear_route_cache = True
        answer.dynamic_metadata.get_or_create_struct("envoy.lb")[ENDPOINT_HEADER] = endpoint
        self._picked = answer.SerializeToString()
        self._buffer = b""
        self._greeted = False
        self._streams: dict[int, _Stream] = {}
        self._window = self._first_window = 65_535
        self._frame_bytes = 16_384
        self._taken = 0
        self._out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings: large windows, many streams."""
        self._transport = cast("asyncio.WriteTransport", transport)
        settings = struct.pack(">HIHI", _INITIAL_WINDOW, _STREAM_WINDOW, 3, 100_000)
        opened = (_CONNECTION_WINDOW - 65_535).to_bytes(4, "big")
        self._transport.write(_frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, opened))

    def data_received(self, data: bytes) -> None:
        """Take all complete frames, then write all answers at once."""
        data = self._buffer + data if self._buffer else data
        at, end = 0, len(data)
        if not self._greeted:
            if end < _PREFACE_BYTES:
                self._buffer = data
                return
            at, self._greeted = _PREFACE_BYTES, True
        while end - at >= _FRAME_HEAD:
            size = int.from_bytes(data[at : at + 3], "big")
            if end - at < _FRAME_HEAD + size:
                break
            kind, flags = data[at + 3], data[at + 4]
            number = int.from_bytes(data[at + 5 : at + 9], "big")
            self._take(kind, flags, number, data[at + 9 : at + 9 + size])
            at += _FRAME_HEAD + size
        self._buffer = data[at:]
        if self._taken > _WINDOW_STEP:
            self._out.append(_frame(_WINDOW_UPDATE, 0, 0, self._taken.to_bytes(4, "big")))
            self._taken = 0
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out = []

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == _DATA:
            self._data(number, flags, payload)
        elif kind == _HEADERS:
            self._streams[number] = _Stream(self._first_window)
        elif kind == _WINDOW_UPDATE:
            self._opened(number, int.from_bytes(payload, "big"))
        elif kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at : at + 6])
                if name == _INITIAL_WINDOW:
                    self._first_window = value
                elif name == _FRAME_SIZE:
                    self._frame_bytes = value
            self._out.append(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._out.append(_frame(_PING, _ACK, 0, payload))
        elif kind == _RST_STREAM:
            self._streams.pop(number, None)

    def _opened(self, number: int, more: int) -> None:
        if number == 0:
            self._window += more
        elif number in self._streams:
            self._streams[number].window += more
        for waiting, stream in self._streams.items():
            if stream.unsent:
                self._send_waiting(waiting, stream)

    def _data(self, number: int, flags: int, payload: bytes) -> None:
        self._taken += len(payload)
        stream = self._streams.get(number)
        if stream is None:
            return
        data = stream.buffer + payload if stream.buffer else payload
        at, end = 0, len(data)
        while end - at >= _MESSAGE_HEAD:
            size = int.from_bytes(data[at + 1 : at + 5], "big")
            if end - at < _MESSAGE_HEAD + size:
                break
            self._message(number, stream, data[at + 5 : at + 5 + size])
            at += _MESSAGE_HEAD + size
        stream.buffer = data[at:]
        if flags & _END_STREAM:
            del self._streams[number]
            head = _TRAILERS if stream.started else _STATUS + _TRAILERS
            self._out.append(_frame(_HEADERS, _END_HEADERS | _END_STREAM, number, head))

    def _message(self, number: int, stream: _Stream, raw: bytes) -> None:
        message = pb.ProcessingRequest.FromString(raw)
        kind = message.WhichOneof("request")
        if kind == "request_body":
            stream.body.append(message.request_body.body)
            if message.request_body.end_of_stream:
                self._send(number, stream, self._picked)
                self._give_back(number, stream)
        elif kind == "request_headers" and message.request_headers.end_of_stream:
            self._send(number, stream, self._picked)

    def _give_back(self, number: int, stream: _Stream) -> None:
        body = b"".join(stream.body)
        for at in range(0, max(1, len(body)), CHUNK_BYTES):
            last = b"\x10\x01" if at + CHUNK_BYTES >= len(body) else b""
            part = _field(b"\x0a", body[at : at + CHUNK_BYTES]) + last
            self._send(number, stream, _body_answer(part))

    def _send(self, number: int, stream: _Stream, message: bytes) -> None:
        if not stream.started:
            stream.started = True
            self._out.append(_frame(_HEADERS, _END_HEADERS, number, _STATUS))
        data = b"\0" + len(message).to_bytes(4, "big") + message
        size = len(data)
        if not stream.unsent and size <= min(self._frame_bytes, stream.window, self._window):
            stream.window -= size
            self._window -= size
            self._out.append(_frame(_DATA, 0, number, data))
            return
        stream.unsent.append(data)
        self._send_waiting(number, stream)

    def _send_waiting(self, number: int, stream: _Stream) -> None:
        while stream.unsent:
            data = stream.unsent[0]
            size = min(len(data), self._frame_bytes, stream.window, self._window)
            if size <= 0:
                return
            stream.window -= size
            self._window -= size
            self._out.append(_frame(_DATA, 0, number, data[:size]))
            if size == len(data):
                del stream.unsent[0]
            else:
                stream.unsent[0] = data[size:]


async def serve(port: int, endpoint: str) -> None:
    """Answer on 127.0.0.1 until cancelled."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Echo(endpoint), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2]))
