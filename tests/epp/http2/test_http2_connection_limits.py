"""Bounds on the effect that a peer has on the HTTP/2 connection: windows, buffers, floods."""

from typing import Any

import pytest
from tests.epp.http2.h2 import (
    ECHO,
    RECORD,
    Client,
    Frame,
    data,
    ending,
    frame,
    get_fields,
    kinds,
    message,
    messages,
)

from kvist_epp.http2 import frames as f
from kvist_epp.http2.limits import Budget, Rate
from kvist_epp.http2.stream_table import STREAM_BYTES

CALM = (f.GOAWAY, f.ENHANCE_YOUR_CALM)
STREAM_CALM = (f.RST_STREAM, f.ENHANCE_YOUR_CALM)
FEW = Rate(10, 1.0)


def window_update(stream: int, increment: int) -> bytes:
    """The client opens a window further."""
    return frame(f.WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def content(answer: list[Frame]) -> int:
    """Bytes of DATA."""
    return sum(len(found.payload) for found in answer if found.kind == f.DATA)


# -- the client's windows


def test_answers_keep_to_both_windows() -> None:
    """Nothing is sent beyond the stream's or the connection's window; each lets through what it adds."""
    client = Client()
    client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 30}), client.request(path=RECORD))
    client.calls[0].sink.send(b"x" * 95)
    client.calls[0].sink.close()
    got = client.answer()
    assert content(got) == 30
    got += client.send(window_update(1, 20))
    assert content(got) == 50
    got += client.send(window_update(0, 1000))
    assert content(got) == 50
    got += client.send(window_update(1, 1000))
    assert messages(got) == [b"x" * 95]
    assert dict(client.fields(got[0]))[":status"] == "200"
    assert dict(client.fields(got[-1]))["grpc-status"] == "0"


def test_who_reads_no_echo_sends_no_more() -> None:
    """The window of a stream whose answers wait is opened again only when they have left."""
    client = Client(stream_window=100_000)
    client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 30_000}), client.request(path=ECHO))
    granted = [
        found
        for _ in range(6)
        for found in client.send(data(1, message(b"x" * 15_000)), window_update(0, 20_000))
        if found.kind == f.WINDOW_UPDATE and found.stream == 1
    ]
    assert granted == []
    opened = client.send(window_update(1, 100_000))
    assert [found.kind for found in opened if found.kind == f.WINDOW_UPDATE and found.stream == 1]


def test_the_connection_window_is_shared() -> None:
    """Streams wait while the connection's window is shut, and all continue when it opens."""
    client = Client()
    client.send(client.request(1, RECORD), client.request(3, RECORD))
    for call in client.calls:
        call.sink.send(b"x" * 50_000)
        call.sink.close()
    got = client.answer()
    assert content(got) == f.DEFAULT_WINDOW
    got += client.send(window_update(0, 1 << 20))
    assert [len(text) for number in (1, 3) for text in messages(got, number)] == [50_000, 50_000]


def test_a_changed_initial_window_applies_to_open_streams() -> None:
    """Section 6.9.2: a smaller one may make windows negative, and the difference counts both ways."""
    client = Client()
    client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 100}), client.request(path=RECORD))
    client.calls[0].sink.send(b"x" * 195)
    assert content(client.answer()) == 100
    assert content(client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 40}))) == 0
    assert content(client.send(window_update(1, 59))) == 0
    assert content(client.send(window_update(1, 2))) == 1
    assert kinds(client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 50})))[:2] == [f.SETTINGS, f.DATA]


def test_frames_are_no_larger_than_the_client_takes() -> None:
    """MAX_FRAME_SIZE of the client cuts messages; 16 KiB until it says otherwise."""
    client = Client()
    client.send(client.request(path=RECORD))
    client.calls[0].sink.send(b"x" * 40_000)
    assert max(len(found.payload) for found in client.answer()) == f.DEFAULT_FRAME_BYTES
    client.send(f.settings({f.SETTING_MAX_FRAME_SIZE: 20_000}))
    client.calls[0].sink.send(b"x" * 22_000)
    assert max(len(found.payload) for found in client.answer()) == 20_000


def test_windows_that_overflow_are_errors() -> None:
    """Section 6.9.1: above 2**31 - 1 a stream is reset, the connection ended."""
    for number, kind in ((1, f.RST_STREAM), (0, f.GOAWAY)):
        client = Client()
        client.send(client.request())
        answer = client.send(window_update(number, f.LARGEST_WINDOW))
        assert ending(answer) == (kind, f.FLOW_CONTROL_ERROR)
    client = Client()
    client.send(client.request(), window_update(1, f.LARGEST_WINDOW - f.DEFAULT_WINDOW))
    answer = client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 70_000}))
    assert ending(answer) == (f.GOAWAY, f.FLOW_CONTROL_ERROR)


# -- our windows


def test_windows_are_renewed_by_halves() -> None:
    """A WINDOW_UPDATE comes only after half a window is used, for the stream and for the connection."""
    client = Client(stream_window=100_000, connection_window=200_000)
    client.send(client.request(path=RECORD))
    assert client.send(data(1, bytes(40_000))) == []
    got = client.send(data(1, bytes(80_000)))
    renewed = {found.stream: found.number for found in got if found.kind == f.WINDOW_UPDATE}
    assert set(renewed) == {0, 1}
    assert all(increment >= 50_000 for increment in renewed.values())


@pytest.mark.parametrize("limits", [{"stream_window": 1000}, {"connection_window": 70_000}])
def test_more_than_a_window_is_an_error(limits: dict[str, Any]) -> None:
    """A client that sends more than it was allowed is cut off."""
    client = Client(frame_bytes=1 << 17, **limits)
    client.send(client.request(path=RECORD))
    answer = client.send(frame(f.DATA, 0, 1, bytes(100_000)))
    assert ending(answer) == (f.GOAWAY, f.FLOW_CONTROL_ERROR)


def test_padding_counts_for_windows() -> None:
    """Section 6.1: padding uses up windows as content does."""
    client = Client(connection_window=70_000)
    padded = frame(f.DATA, f.PADDED, 1, b"\xff" + bytes(255))
    client.send(client.request(path=RECORD))
    assert f.WINDOW_UPDATE in kinds(client.send(padded * 140))


# -- sizes


def test_a_message_over_the_limit_is_refused() -> None:
    """RESOURCE_EXHAUSTED from the prefix alone; the largest allowed message passes."""
    client = Client(message_bytes=1000)
    client.send(client.request(1, RECORD), data(1, message(bytes(1000))))
    assert client.calls[0].events == [bytes(1000)]
    answer = client.send(client.request(3, RECORD), data(3, message(bytes(1001))[:5]))
    assert dict(client.fields(answer[-1]))["grpc-status"] == "8"
    assert client.calls[1].events == ["cancelled"]


def test_an_unread_body_is_bounded() -> None:
    """A request that is not gRPC may not send without end."""
    client = Client(message_bytes=1000)
    client.send(frame(f.HEADERS, f.END_HEADERS, 1, client.block(get_fields(method="PUT"))))
    assert client.send(data(1, bytes(1000))) == []
    assert ending(client.send(data(1, b"x"))) == STREAM_CALM


def test_incomplete_messages_of_all_streams_are_bounded() -> None:
    """The stream that passes the limit is reset, the others may complete."""
    client = Client(held_bytes=3600 + 3 * STREAM_BYTES)
    for number in (1, 3, 5):
        client.send(client.request(number, RECORD))
    client.send(data(1, message(bytes(2000))[:1500]), data(3, message(bytes(2000))[:1400]))
    assert ending(client.send(data(5, message(bytes(2000))[:1500]))) == STREAM_CALM
    client.send(data(1, message(bytes(2000))[1500:]))
    assert [call.events for call in client.calls] == [[bytes(2000)], [], ["cancelled"]]


def test_a_message_in_tiny_pieces_is_joined() -> None:
    """A message sent byte by byte arrives whole."""
    client = Client()
    text = bytes(range(256)) * 12
    client.send(client.request(path=RECORD))
    for byte in message(text):
        client.send(data(1, bytes((byte,))))
    assert client.calls[0].events == [text]


def test_a_slow_reader_is_reset() -> None:
    """A stream with too many unread bytes is reset and its call cancelled; other streams are not."""
    client = Client(stream_send_bytes=100_000)
    client.send(client.request(1, RECORD), client.request(3, RECORD))
    for _ in range(3):
        client.calls[0].sink.send(bytes(70_000))
    assert client.calls[0].events == ["cancelled"]
    client.calls[1].sink.send(b"small")
    client.send(window_update(0, 1 << 20))
    assert client.connection.streams == 1
    assert client.connection.outbox.waiting_bytes == 0


def test_a_connection_that_reads_nothing_is_bounded() -> None:
    """Unread bytes are bounded over all streams, whatever their windows are."""
    client = Client(connection_send_bytes=1_000_000)
    client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 1 << 24}), window_update(0, 1 << 24))
    client.connection.receive(b"".join(client.request(number, RECORD) for number in range(1, 41, 2)))
    for call in client.calls:
        call.sink.send(bytes(100_000))
    assert client.connection.outbox.size < 1_001_000
    assert [call.events for call in client.calls].count(["cancelled"]) == 11


def test_header_lists_and_blocks_are_bounded() -> None:
    """Too many fields, too long a block or too many CONTINUATION frames end the connection."""
    for flood in (
        [frame(f.HEADERS, 0, 1, bytes(900)), frame(f.CONTINUATION, 0, 1, bytes(101))],
        [frame(f.HEADERS, f.END_HEADERS, 1, bytes(1001))],
        [frame(f.HEADERS, f.END_HEADERS, 1, f.literal(b"a", b"") * 31)],
        [frame(f.HEADERS, 0, 1), frame(f.CONTINUATION, 0, 1) * 4],
    ):
        client = Client(header_bytes=1000, continuations=3)
        assert ending(client.send(*flood)) == CALM
        assert client.stats.connections_ended["header-bytes"] == 1


def test_a_header_bomb_is_not_unpacked() -> None:
    """Two kilobytes that stand for eight megabytes (an indexed field, repeated) end the connection."""
    client = Client()
    big = b"\x40" + f._length(b"x") + f._length(b"v" * 3900)
    client.send(client.request(1, RECORD), frame(f.HEADERS, f.END_HEADERS, 3, big))
    assert ending(client.send(frame(f.HEADERS, f.END_HEADERS, 5, b"\xbe" * 2000))) == CALM


# -- streams


def test_streams_are_bounded() -> None:
    """One stream too many is refused in a way that may be retried, and ended ones make room."""
    client = Client(streams=2)
    client.send(client.request(1, RECORD), client.request(3, RECORD))
    assert ending(client.send(client.request(5, RECORD))) == (f.RST_STREAM, f.REFUSED_STREAM)
    client.send(frame(f.RST_STREAM, 0, 1, bytes(4)))
    assert client.send(client.request(7, RECORD)) == []


def test_answered_streams_that_never_end_are_closed() -> None:
    """A client that does not end its side of answered calls is not locked out."""
    client = Client(streams=2)
    client.send(client.request(1, RECORD), client.request(3, RECORD))
    client.calls[0].sink.close()
    client.answer()
    assert ending(client.send(client.request(5, RECORD))) == (f.RST_STREAM, f.NO_ERROR)
    assert len(client.calls) == 3


# -- floods


PING = frame(f.PING, 0, 0, bytes(8))
UNKNOWN = frame(0x42, 0, 0)
PRIORITY = frame(f.PRIORITY, 0, 1, bytes(5))
EMPTY = frame(f.DATA, 0, 1)
CLOSED = frame(f.RST_STREAM, 0, 3, bytes(4))


@pytest.mark.parametrize(
    ("limits", "flood"),
    [
        ({"pings": FEW}, PING),
        ({"pings": FEW}, frame(f.PING, f.ACK, 0, bytes(8))),
        ({"settings": FEW}, f.settings({})),
        ({"settings": FEW}, f.SETTINGS_ACK),
        ({"settings": FEW}, frame(f.GOAWAY, 0, 0, bytes(8))),
        ({"empty_frames": FEW}, EMPTY),
        ({"empty_frames": FEW}, frame(f.DATA, f.PADDED, 1, b"\x02\0\0")),
        ({"control_frames": FEW}, UNKNOWN),
        ({"control_frames": FEW}, PRIORITY),
        ({"control_frames": FEW}, window_update(1, 1)),
        ({"control_frames": FEW}, window_update(0, 1)),
        ({"control_frames": FEW}, CLOSED),
    ],
)
def test_floods_end_the_connection(limits: dict[str, Any], flood: bytes) -> None:
    """Frames that cost us and carry no data are counted; a flood of them ends with ENHANCE_YOUR_CALM."""
    client = Client(**limits)
    client.send(client.request(1, RECORD), client.request(3), data(3, b"", ends=True))
    client.send(flood * 9)
    assert not client.connection.closing
    assert ending(client.send(flood * 3)) == CALM
    assert client.calls[0].events == ["cancelled"]


def test_a_flood_has_a_name() -> None:
    """Each flood is counted under its own reason."""
    for reason, flood in {"pings": PING, "settings": f.settings({}), "control-frames": UNKNOWN}.items():
        limits: dict[str, Any] = {reason.replace("-", "_"): FEW}
        client = Client(**limits)
        client.send(flood * 11)
        ended = {name for name, count in client.stats.connections_ended.items() if count}
        assert ended == {reason}


def test_answers_earn_control_frames() -> None:
    """Answers earn PING and WINDOW_UPDATE frames; what the peer can ask for at will earns nothing."""
    client = Client(pings=Rate(10, 1.0, 1 / 32))
    client.send(client.request(1, RECORD))
    for _ in range(100):
        client.calls[0].sink.send(bytes(150))
        client.send(PING * 4)
    assert not client.connection.closing
    idle = Client(pings=Rate(10, 1.0, 1 / 32))
    assert ending([found for _ in range(100) for found in idle.send(PING)]) == CALM


def test_a_window_opened_byte_by_byte_is_a_flood() -> None:
    """An answer torn into bytes does not earn the WINDOW_UPDATE frames that tear it ("data dribble")."""
    client = Client(control_frames=Rate(10, 1.0, 1 / 32))
    client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 0}), client.request(1, RECORD))
    client.calls[0].sink.send(bytes(10_000))
    answers = [found for _ in range(1000) for found in client.send(window_update(1, 1))]
    assert ending(answers) == CALM
    assert content(answers) < 50


def test_what_was_under_way_to_a_refused_stream_is_no_flood() -> None:
    """A client may have megabytes on their way when its message is found too long."""
    client = Client(message_bytes=1000, control_frames=FEW)
    client.send(client.request(1, RECORD), data(1, message(bytes(2000))[:5]))
    client.send(data(1, bytes(16_384)) * 100)
    assert not client.connection.closing
    assert ending(client.send(data(1, b"x") * 12)) == CALM


def test_a_trickle_is_no_flood() -> None:
    """Tokens that the budget regains with time may be spent again."""
    client = Client(pings=FEW)
    for _ in range(100):
        client.now += 1.0
        client.send(PING)
    assert not client.connection.closing


def test_rapid_resets_end_the_connection() -> None:
    """Opening and resetting streams in a row is bounded; resetting answered ones is not counted."""
    client = Client(resets=FEW)
    for number in range(1, 101, 2):
        client.send(client.request(number, RECORD))
        client.calls[-1].sink.close()
        client.send(frame(f.RST_STREAM, 0, number, bytes(4)))
    assert not client.connection.closing
    pairs = [
        client.request(number, RECORD) + frame(f.RST_STREAM, 0, number, bytes(4))
        for number in range(101, 131, 2)
    ]
    assert ending(client.send(*pairs)) == CALM


def test_resets_that_a_peer_makes_us_send_are_counted() -> None:
    """Streams we must reset for the client's faults count as resets ("made you reset")."""
    client = Client(resets=FEW)
    pairs = [client.request(number, ECHO) + window_update(number, 0) for number in range(1, 31, 2)]
    assert ending(client.send(*pairs)) == CALM


def test_unread_answers_are_bounded() -> None:
    """A client that asks for answers and reads none is cut off before memory runs out."""
    client = Client(connection_send_bytes=2000)
    client.connection.receive(PING * 200)
    assert client.connection.closing
    assert client.connection.outbox.size < 3000


def test_a_mistake_of_ours_costs_one_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception ends its connection with INTERNAL_ERROR; its text is not logged."""

    class Broken:
        def request(self, block: bytes) -> None:
            raise ValueError(secret)

    secret = "a prompt " * 2
    client = Client()
    client.send(client.request(1, RECORD))
    monkeypatch.setattr(client.connection, "_headers", Broken())
    assert ending(client.send(client.request(3))) == (f.GOAWAY, f.INTERNAL_ERROR)
    assert client.calls[0].events == ["cancelled"]
    assert client.stats.connections_ended["internal"] == 1
    assert "ValueError" in caplog.text
    assert secret not in caplog.text


def test_nothing_is_done_after_the_end() -> None:
    """After GOAWAY for an error further bytes are not even looked at."""
    client = Client()
    client.send(frame(f.PUSH_PROMISE, 0, 1))
    assert client.send(client.request(path=RECORD)) == []
    assert client.calls == []


def test_a_budget_is_a_token_bucket() -> None:
    """The burst at once, then the rate; never more than the burst saved up."""
    now = 0.0
    budget = Budget(Rate(2, 1.0), lambda: now)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    now = 1.0
    assert [budget.spend() for _ in range(2)] == [True, False]
    now = 100.0
    assert [budget.spend() for _ in range(3)] == [True, True, False]
