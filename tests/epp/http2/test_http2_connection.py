"""The HTTP/2 server connection, as calls and clients see it: bytes in, bytes out. Sections are RFC 9113's."""

import pytest
from tests.epp.http2.h2 import (
    ECHO,
    LASTING,
    RECORD,
    Client,
    Echo,
    data,
    ending,
    frame,
    get_fields,
    grpc_fields,
    kinds,
    message,
    messages,
)

from kvist_epp.http2 import frames as f

# -- calls


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_call_is_answered_and_ends() -> None:
    """A message is delivered, the answer comes as headers, message, trailers, and nothing is kept."""
    client = Client()
    answer = client.send(client.request(), data(1, message(b"hello"), ends=True))
    assert kinds(answer) == [f.HEADERS, f.DATA, f.HEADERS]
    assert client.fields(answer[0]) == [(":status", "200"), ("content-type", "application/grpc")]
    assert messages(answer) == [b"hello"]
    assert client.fields(answer[2]) == [("grpc-status", "0")]
    assert [found.flags for found in answer] == [f.END_HEADERS, 0, f.END_HEADERS | f.END_STREAM]
    assert client.connection.streams == 0


def test_an_unknown_method_is_unimplemented() -> None:
    """A gRPC path without a method gets only trailers, with grpc-status 12."""
    client = Client()
    (answer,) = client.send(client.request(path="/no.Such/Thing"))
    fields = dict(client.fields(answer))
    assert (fields[":status"], fields["grpc-status"]) == ("200", "12")
    assert answer.flags == f.END_HEADERS | f.END_STREAM


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_grpc_content_types_are_known(content_type: str) -> None:
    """A format or parameters after the gRPC content type change nothing."""
    client = Client()
    fields = [*grpc_fields(RECORD)[:-1], ("content-type", content_type)]
    client.send(frame(f.HEADERS, f.END_HEADERS, 1, client.block(fields)))
    assert len(client.calls) == 1


@pytest.mark.parametrize(
    "fields",
    [
        get_fields(),
        get_fields(ECHO, "POST"),
        [*grpc_fields()[:-1], ("content-type", "application/grpc-web")],
        [(":method", "CONNECT"), (":authority", "somewhere:443")],
        get_fields("*", "OPTIONS"),
    ],
)
def test_what_is_not_grpc_is_not_found(fields: list[tuple[str, str]]) -> None:
    """Everything but a gRPC POST gets a plain 404 with a small body."""
    client = Client()
    answer = client.send(frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 1, client.block(fields)))
    assert dict(client.fields(answer[0]))[":status"] == "404"
    assert b"".join(found.payload for found in answer[1:]) == b"not found\n"
    assert answer[-1].flags == f.END_STREAM


def test_head_has_no_body() -> None:
    """A HEAD request is answered by headers alone."""
    client = Client()
    block = client.block(get_fields(method="HEAD"))
    (answer,) = client.send(frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 1, block))
    assert answer.flags == f.END_HEADERS | f.END_STREAM


def test_messages_come_whole_however_they_are_framed() -> None:
    """Two messages over many frames, and many messages in one frame, arrive one by one."""
    client = Client()
    content = message(b"x" * 40_000) + message(b"") + message(b"yz")
    client.send(
        client.request(path=RECORD), data(1, content[:3]), data(1, content[3:]), data(1, b"", ends=True)
    )
    assert client.calls[0].events == [b"x" * 40_000, b"", b"yz", "half closed"]


def test_a_status_carries_its_message_encoded() -> None:
    """grpc-message is percent-encoded UTF-8, and a call that never answered ends with trailers only."""
    client = Client()
    client.send(client.request(path=RECORD))
    client.calls[0].sink.close(14, "100% på väg")
    (answer,) = client.answer()
    fields = dict(client.fields(answer))
    assert (fields["grpc-status"], fields["grpc-message"]) == ("14", "100%25 p%C3%A5 v%C3%A4g")


def test_a_sink_used_later_wakes_the_shell_once() -> None:
    """Output outside of receive wakes the shell; more before it looked does not."""
    woken: list[int] = []
    client = Client(wake=lambda: woken.append(1))
    client.send(client.request(path=RECORD))
    assert woken == []
    client.calls[0].sink.send(b"later")
    client.calls[0].sink.close()
    assert woken == [1]
    assert kinds(client.answer()) == [f.HEADERS, f.DATA, f.HEADERS]


def test_a_closed_sink_is_deaf() -> None:
    """After close nothing is sent and nothing is called."""
    client = Client()
    client.send(client.request(path=RECORD))
    call = client.calls[0]
    call.sink.close()
    client.answer()
    call.sink.send(b"more")
    call.sink.close(13)
    assert client.send(data(1, message(b"late"), ends=True)) == []
    assert call.events == []
    assert client.connection.streams == 0


def test_what_a_client_still_sends_after_the_answer_is_stopped() -> None:
    """Section 8.1: the rest of a request already answered is asked for no more, without an error."""
    client = Client()
    client.send(client.request(path=RECORD))
    client.calls[0].sink.close()
    client.answer()
    assert ending(client.send(data(1, b"unread"))) == (f.RST_STREAM, f.NO_ERROR)
    assert client.send(data(1, b"under way"), data(1, b"", ends=True)) == []


def test_a_reset_reaches_the_call() -> None:
    """RST_STREAM by the client cancels its call and forgets the stream; its sink then ignores writes."""
    client = Client()
    client.send(client.request(path=RECORD), frame(f.RST_STREAM, 0, 1, bytes(4)))
    client.calls[0].sink.send(b"into the void")
    assert client.calls[0].events == ["cancelled"]
    assert client.answer() == []
    assert client.connection.streams == 0


def test_a_lost_connection_reaches_every_call() -> None:
    """Each open call is cancelled once, calls that ended are not, and nothing is left."""
    client = Client()
    client.send(*(client.request(number, RECORD) for number in (1, 3, 5)), data(5, message(b"part")[:-1]))
    client.calls[1].sink.close()
    client.connection.on_lost()
    assert [call.events for call in client.calls] == [["cancelled"], [], ["cancelled"]]
    assert client.connection.streams == 0
    assert client.answer() == []


def test_a_failing_call_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    """An exception in a call ends it with status 2, without details for the client; other calls continue."""

    class Failing:
        def on_message(self, data: bytes) -> None:
            raise ValueError(f"no {data!r}")

        def on_half_closed(self) -> None: ...

        def on_cancelled(self) -> None:
            raise ValueError("again")

    client = Client(methods={RECORD: lambda _sink: Failing(), ECHO: Echo})
    answer = client.send(client.request(1, RECORD), data(1, message(b"secret prompt")))
    assert dict(client.fields(answer[0]))["grpc-status"] == "2"
    assert messages(client.send(client.request(3), data(3, message(b"fine"))), 3) == [b"fine"]
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"\x01\0\0\0\x01x", "12"), (b"\x80\0\0\0\x01x", "13"), (message(b"cut")[:-1], "13"), (b"\0\0", "13")],
)
def test_messages_that_cannot_be_read_end_the_call(content: bytes, status: str) -> None:
    """Compressed, reserved or cut messages end the call with the status gRPC names."""
    client = Client()
    answer = client.send(client.request(path=RECORD), data(1, content, ends=True))
    assert dict(client.fields(answer[-1]))["grpc-status"] == status
    assert client.calls[0].events == ["cancelled"]


# -- drain


def test_drain_serves_what_is_under_way_and_refuses_later_streams() -> None:
    """Section 6.8: GOAWAY twice, a round trip apart; the end comes when both sides ended all calls."""
    client = Client()
    client.send(client.request(1, RECORD))
    client.connection.drain()
    first, ping = client.answer()
    assert (first.kind, first.code, first.payload[:4]) == (f.GOAWAY, f.NO_ERROR, b"\x7f\xff\xff\xff")
    client.send(client.request(3, RECORD))
    (second,) = client.send(frame(f.PING, f.ACK, 0, ping.payload))
    assert (second.kind, second.payload[:4]) == (f.GOAWAY, b"\0\0\0\x03")
    assert ending(client.send(client.request(5, RECORD))) == (f.RST_STREAM, f.REFUSED_STREAM)
    client.calls[0].sink.close()
    client.send(data(1, b"", ends=True))
    client.calls[1].sink.close()
    assert not client.connection.closing
    client.send(frame(f.RST_STREAM, 0, 3, bytes(4)))
    assert client.connection.closing


def test_drain_ends_calls_that_never_end() -> None:
    """Calls of lasting methods do not hold up a drain; they end with status 14 after all others."""
    client = Client()
    client.send(client.request(1, LASTING), client.request(3, RECORD))
    client.connection.drain()
    ping = client.answer()[-1]
    client.send(frame(f.PING, f.ACK, 0, ping.payload))
    assert client.calls[0].events == []
    client.calls[1].sink.close()
    assert client.calls[0].events == ["cancelled"]
    ended = {found.stream: dict(client.fields(found)) for found in client.answer()}
    assert {number: fields["grpc-status"] for number, fields in ended.items()} == {1: "14", 3: "0"}
    client.send(data(1, b"", ends=True), data(3, b"", ends=True))
    assert client.connection.closing


def test_drain_ends_any_number_of_lasting_calls() -> None:
    """A drain ends as many watches at once as a connection may have."""
    client = Client()
    client.send(*(client.request(number, LASTING, ends=True) for number in range(1, 4001, 2)))
    client.connection.drain()
    ping = client.answer()[-1]
    client.send(frame(f.PING, f.ACK, 0, ping.payload))
    assert client.connection.closing
    assert client.connection.streams == 0


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ([], {}),
        ([("tracestate", "a=b")], {}),
        ([("traceparent", PARENT)], {"traceparent": PARENT}),
        ([("traceparent", PARENT), ("tracestate", "a=b")], {"traceparent": PARENT, "tracestate": "a=b"}),
        ([("traceparent", PARENT), ("tracestate", "x" * 513)], {"traceparent": PARENT}),
        ([("traceparent", "x" * 513)], {}),
    ],
)
def test_a_call_has_its_trace_context(more: list[tuple[str, str]], kept: dict[str, str]) -> None:
    """The headers of W3C Trace Context reach the call, but for values longer than they may be."""
    client = Client()
    client.send(client.request(path=RECORD, more=more), client.request(3, RECORD))
    first, second = client.calls
    assert first.sink.trace_headers == kept
    assert second.sink.trace_headers == {}


def test_a_call_of_an_envoy_is_known() -> None:
    """Metadata that only Envoy's own gRPC client sends tells it; headers that pass an Envoy do not."""
    client = Client()
    proxied = [("x-forwarded-for", "192.0.2.2"), ("x-envoy-attempt-count", "1")]
    client.send(
        client.request(path=RECORD, more=[("x-envoy-internal", "true")]),
        client.request(3, RECORD),
        client.request(5, RECORD, more=proxied),
        client.request(7, RECORD, more=[("x-envoy-internal", "true"), ("traceparent", PARENT)]),
    )
    assert [call.sink.from_envoy for call in client.calls] == [True, False, False, True]
