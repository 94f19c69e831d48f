"""The HTTP/2 server connection, rule by rule: bytes in, bytes out. Sections are RFC 9113's."""

import pytest
from hpack import Encoder
from tests.epp.http2.h2 import (
    RECORD,
    Client,
    data,
    ending,
    frame,
    grpc_fields,
    message,
    messages,
)

from kvist_epp.http2 import frames as f

CONNECTION_PROTOCOL = (f.GOAWAY, f.PROTOCOL_ERROR)
STREAM_PROTOCOL = (f.RST_STREAM, f.PROTOCOL_ERROR)
CONNECTION_SIZE = (f.GOAWAY, f.FRAME_SIZE_ERROR)


# -- the preface and SETTINGS


def test_the_server_introduces_itself_first() -> None:
    """SETTINGS with our limits and the connection's window are there before the client says a word."""
    first, second = Client(greet=False, streams=7).answer()
    assert (first.kind, second.kind) == (f.SETTINGS, f.WINDOW_UPDATE)
    assert dict(f.setting_pairs(first.payload))[f.SETTING_MAX_CONCURRENT_STREAMS] == 7


@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1\r\n\r\n", b"P\x00", f.PREFACE + f.frame(f.PING, 0, bytes(4), bytes(8))]
)
def test_a_client_must_introduce_itself(start: bytes) -> None:
    """Section 3.4: anything but the preface and SETTINGS ends the connection, as early as it is seen."""
    client = Client(greet=False)
    client.answer()
    assert ending(client.send(start)) == CONNECTION_PROTOCOL
    assert client.connection.closing


def test_settings_are_acknowledged() -> None:
    """Section 6.5.3: each SETTINGS frame is acknowledged, an acknowledgement is not."""
    client = Client()
    assert client.send(f.settings({0x99: 1})) == [(f.SETTINGS, f.ACK, 0, b"")]
    assert client.send(f.SETTINGS_ACK) == []


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (frame(f.SETTINGS, 0, 1), f.PROTOCOL_ERROR),
        (frame(f.SETTINGS, 0, 0, b"12345"), f.FRAME_SIZE_ERROR),
        (frame(f.SETTINGS, f.ACK, 0, bytes(6)), f.FRAME_SIZE_ERROR),
        (f.settings({f.SETTING_ENABLE_PUSH: 2}), f.PROTOCOL_ERROR),
        (f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 1 << 31}), f.FLOW_CONTROL_ERROR),
        (f.settings({f.SETTING_MAX_FRAME_SIZE: 16_383}), f.PROTOCOL_ERROR),
        (f.settings({f.SETTING_MAX_FRAME_SIZE: 1 << 24}), f.PROTOCOL_ERROR),
    ],
)
def test_bad_settings_end_the_connection(bad: bytes, code: int) -> None:
    """Section 6.5: sizes, streams and values of SETTINGS are checked."""
    assert ending(Client().send(bad)) == (f.GOAWAY, code)


# -- frames


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (frame(f.DATA, 0, 0, b"x"), CONNECTION_PROTOCOL),
        (frame(f.DATA, 0, 3, b"x"), CONNECTION_PROTOCOL),
        (frame(f.DATA, f.PADDED, 1, b"\x05abc"), CONNECTION_PROTOCOL),
        (frame(f.DATA, f.PADDED, 1), CONNECTION_SIZE),
        (frame(f.DATA, 0, 1, bytes(16_385)), CONNECTION_SIZE),
        (frame(f.HEADERS, f.END_HEADERS, 0), CONNECTION_PROTOCOL),
        (frame(f.HEADERS, f.END_HEADERS, 2), CONNECTION_PROTOCOL),
        (frame(f.HEADERS, f.END_HEADERS | f.PADDED, 3, b"\x09ab"), CONNECTION_PROTOCOL),
        (frame(f.HEADERS, f.END_HEADERS | f.WITH_PRIORITY, 3, b"123"), CONNECTION_SIZE),
        (frame(f.HEADERS, f.END_HEADERS | f.WITH_PRIORITY, 3, b"\0\0\0\x03\0"), CONNECTION_PROTOCOL),
        (frame(f.HEADERS, f.END_HEADERS, 3, b"\xff\xff\xff\xff\xff\xff"), (f.GOAWAY, f.COMPRESSION_ERROR)),
        (frame(f.PRIORITY, 0, 0, bytes(5)), CONNECTION_PROTOCOL),
        (frame(f.PRIORITY, 0, 1, bytes(4)), CONNECTION_SIZE),
        (frame(f.PRIORITY, 0, 1, b"\0\0\0\x01\0"), CONNECTION_PROTOCOL),
        (frame(f.RST_STREAM, 0, 0, bytes(4)), CONNECTION_PROTOCOL),
        (frame(f.RST_STREAM, 0, 1, bytes(5)), CONNECTION_SIZE),
        (frame(f.RST_STREAM, 0, 9, bytes(4)), CONNECTION_PROTOCOL),
        (frame(f.PUSH_PROMISE, f.END_HEADERS, 1, bytes(4)), CONNECTION_PROTOCOL),
        (frame(f.PING, 0, 1, bytes(8)), CONNECTION_PROTOCOL),
        (frame(f.PING, 0, 0, bytes(7)), CONNECTION_SIZE),
        (frame(f.GOAWAY, 0, 1, bytes(8)), CONNECTION_PROTOCOL),
        (frame(f.GOAWAY, 0, 0, bytes(7)), CONNECTION_SIZE),
        (frame(f.WINDOW_UPDATE, 0, 1, bytes(3)), CONNECTION_SIZE),
        (frame(f.WINDOW_UPDATE, 0, 0, bytes(4)), CONNECTION_PROTOCOL),
        (frame(f.WINDOW_UPDATE, 0, 9, b"\0\0\0\x01"), CONNECTION_PROTOCOL),
        (frame(f.WINDOW_UPDATE, 0, 1, bytes(4)), STREAM_PROTOCOL),
        (frame(f.CONTINUATION, f.END_HEADERS, 1), CONNECTION_PROTOCOL),
        (frame(f.HEADERS, 0, 3) + frame(f.CONTINUATION, 0, 5), CONNECTION_PROTOCOL),
        (frame(f.HEADERS, 0, 3) + frame(f.PING, 0, 0, bytes(8)), CONNECTION_PROTOCOL),
        (frame(f.HEADERS, 0, 3) + frame(f.DATA, 0, 1, b"x"), CONNECTION_PROTOCOL),
        (frame(f.HEADERS, 0, 3) + frame(0x77, 0, 0), CONNECTION_PROTOCOL),
    ],
)
def test_bad_frames_are_refused(bad: bytes, expected: tuple[int, int]) -> None:
    """Section 6: each frame's size, stream and place is checked; connection errors cancel open calls."""
    client = Client()
    client.send(client.request(path=RECORD))
    assert ending(client.send(bad)) == expected
    assert client.calls[0].events == ["cancelled"]


def test_ping_is_answered() -> None:
    """Section 6.7: the same eight bytes come back; an answer is not answered."""
    client = Client()
    assert client.send(frame(f.PING, 0, 0, b"12345678")) == [(f.PING, f.ACK, 0, b"12345678")]
    assert client.send(frame(f.PING, f.ACK, 0, b"12345678")) == []


def test_unknown_frames_priority_and_goaway_are_ignored() -> None:
    """Section 5.5: unknown types are skipped; priorities ask for nothing; a client that leaves may finish."""
    client = Client()
    client.send(client.request())
    ignored = [frame(0x10, 0xFF, 1, b"x"), frame(f.PRIORITY, 0, 7, bytes(5)), frame(f.GOAWAY, 0, 0, bytes(8))]
    assert client.send(*ignored) == []
    assert messages(client.send(data(1, message(b"still here")))) == [b"still here"]


def test_padding_and_priority_fields_are_stripped() -> None:
    """Sections 6.1, 6.2: padding and priority of HEADERS and DATA are no content."""
    client = Client()
    block = client.block(grpc_fields(RECORD))
    flags = f.END_HEADERS | f.PADDED | f.WITH_PRIORITY
    client.send(frame(f.HEADERS, flags, 1, b"\x02" + b"\0\0\0\0\x10" + block + b"\0\0"))
    client.send(frame(f.DATA, f.PADDED | f.END_STREAM, 1, b"\x03" + message(b"hi") + b"\0\0\0"))
    assert client.calls[0].events == [b"hi", "half closed"]


def test_a_header_block_may_be_continued() -> None:
    """Section 6.10: HEADERS and its CONTINUATION frames are one block; END_STREAM of HEADERS counts."""
    client = Client()
    block = client.block(grpc_fields(RECORD))
    parts = [frame(f.HEADERS, f.END_STREAM, 1, block[:5]), frame(f.CONTINUATION, 0, 1, block[5:9])]
    client.send(*parts, frame(f.CONTINUATION, f.END_HEADERS, 1, block[9:]))
    assert client.calls[0].events == ["half closed"]


# -- header fields


@pytest.mark.parametrize(
    "fields",
    [
        [*grpc_fields(), ("X-Upper", "1")],
        [*grpc_fields(), ("a b", "1")],
        [*grpc_fields(), ("", "1")],
        [*grpc_fields(), ("x", "a\nb")],
        [*grpc_fields(), ("x", " padded")],
        [*grpc_fields(), (":late", "1")],
        [*grpc_fields(), (":path", "/late")],
        [(":unknown", "1"), *grpc_fields()],
        [(":status", "200"), *grpc_fields()],
        [(":path", "/twice"), *grpc_fields()],
        [(":method", "GET"), *grpc_fields()],
        [*grpc_fields(), ("connection", "close")],
        [*grpc_fields(), ("transfer-encoding", "chunked")],
        [*grpc_fields(), ("upgrade", "h2c")],
        [*grpc_fields(), ("te", "gzip")],
        [*grpc_fields(), ("host", "elsewhere")],
        [*grpc_fields(), ("content-length", "-1")],
        [*grpc_fields(), ("content-length", "1"), ("content-length", "2")],
        grpc_fields()[1:],
        [field for field in grpc_fields() if field[0] != ":scheme"],
        [field for field in grpc_fields() if field[0] != ":path"],
        grpc_fields(""),
        grpc_fields("relative"),
        grpc_fields("*"),
        [(":method", "CONNECT"), (":authority", "x"), (":path", "/")],
    ],
)
def test_malformed_requests_are_reset(fields: list[tuple[str, str]]) -> None:
    """Sections 8.2, 8.3: a malformed request resets its stream, and the next one is served."""
    client = Client()
    bad = frame(f.HEADERS, f.END_HEADERS, 1, client.block(fields))
    assert ending(client.send(bad)) == STREAM_PROTOCOL
    client.send(client.request(3, RECORD))
    assert len(client.calls) == 1


def test_the_same_header_block_means_the_same_until_the_table_changes() -> None:
    """HPACK blocks are remembered by their bytes, and forgotten as soon as the dynamic table moves."""
    client = Client()
    encoder = Encoder()
    first, second = (encoder.encode(grpc_fields(RECORD)) for _ in range(2))
    other = encoder.encode(grpc_fields("/no.Such/Thing"))
    indexed = encoder.encode(grpc_fields(RECORD))
    blocks = [first, second, second, other, indexed]
    starts = [frame(f.HEADERS, f.END_HEADERS, 1 + 2 * at, block) for at, block in enumerate(blocks)]
    client.send(*starts)
    assert len(client.calls) == 4


def test_content_length_must_be_true() -> None:
    """Section 8.1.1: less or more content than announced is a stream error; as much is none."""
    for announced, ends in ((9, True), (3, False), (7, True)):
        client = Client()
        request = client.request(path=RECORD, more=[("content-length", str(announced))])
        answer = client.send(request, data(1, message(b"hi"), ends=ends))
        if announced == 7:
            assert client.calls[0].events == [b"hi", "half closed"]
        else:
            assert ending(answer) == STREAM_PROTOCOL
            assert client.calls[0].events[-1] == "cancelled"


@pytest.mark.parametrize(
    ("fields", "flags", "expected"),
    [
        ([("x", "1")], f.END_STREAM, None),
        ([("x", "1")], 0, STREAM_PROTOCOL),
        ([(":path", "/")], f.END_STREAM, STREAM_PROTOCOL),
        ([("connection", "close")], f.END_STREAM, STREAM_PROTOCOL),
    ],
)
def test_trailers_end_a_request(
    fields: list[tuple[str, str]], flags: int, expected: tuple[int, int] | None
) -> None:
    """Section 8.1: trailers must end the stream and have no pseudo-header fields."""
    client = Client()
    trailers = frame(f.HEADERS, f.END_HEADERS | flags, 1, client.block(fields))
    client.send(client.request(path=RECORD))
    answer = client.send(trailers)
    assert (ending(answer) if answer else None) == expected
    assert client.calls[0].events == ["half closed" if expected is None else "cancelled"]


# -- states of streams


def test_frames_on_a_half_closed_stream_are_refused() -> None:
    """Section 5.1: after END_STREAM more DATA or HEADERS reset the stream."""
    for late in (data(1, b"x"), frame(f.HEADERS, f.END_HEADERS, 1, b"\x82")):
        client = Client()
        client.send(client.request(path=RECORD, ends=True))
        assert ending(client.send(late)) == (f.RST_STREAM, f.STREAM_CLOSED)
        assert client.calls[0].events == ["half closed", "cancelled"]


def test_frames_on_a_closed_stream() -> None:
    """Section 5.1: DATA is a stream error, HEADERS a connection error, the others are nothing."""
    client = Client()
    client.send(client.request(), data(1, b"", ends=True))
    late = [frame(f.RST_STREAM, 0, 1, bytes(4)), frame(f.WINDOW_UPDATE, 0, 1, b"\0\0\0\x01")]
    assert client.send(*late, frame(f.PRIORITY, 0, 1, bytes(5))) == []
    assert ending(client.send(data(1, b"x"))) == (f.RST_STREAM, f.STREAM_CLOSED)
    closed = Client()
    closed.send(closed.request(), data(1, b"", ends=True))
    assert ending(closed.send(closed.request())) == (f.GOAWAY, f.STREAM_CLOSED)


def test_streams_we_have_reset_may_still_get_frames() -> None:
    """Section 5.4.2: what was under way to a stream we reset is ignored, and keeps HPACK in step."""
    client = Client()
    client.send(client.request(1), frame(f.WINDOW_UPDATE, 0, 1, bytes(4)))
    late = frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 1, client.block([("x-new", "entry")]))
    assert client.send(data(1, message(b"late")), late) == []
    fields = [*grpc_fields(RECORD), ("x-new", "entry")]
    client.send(frame(f.HEADERS, f.END_HEADERS, 3, client.block(fields)))
    assert len(client.calls) == 1


def test_stream_numbers_only_grow() -> None:
    """Section 5.1.1: a number below one already used, but never opened, ends the connection."""
    client = Client()
    client.send(client.request(5))
    assert ending(client.send(client.request(3))) == CONNECTION_PROTOCOL
