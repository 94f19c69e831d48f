"""Bodies of many full DATA frames, which are taken together: every rule holds as for frames one by one."""

from typing import Any

import pytest
from tests.epp.http2.h2 import ECHO, RECORD, Client, data, frame, kinds, message, messages

from kvist_epp.http2 import frames as f

BODY = bytes(range(256)) * 1_000
FULL = f.DEFAULT_FRAME_BYTES


def opened(stream: int = 1, more: tuple[tuple[str, str], ...] = (), **limits: Any) -> Client:
    """A client whose call records."""
    client = Client(**limits)
    client.send(client.request(stream, RECORD, more=more))
    return client


def test_a_body_is_echoed_in_full_frames() -> None:
    """An answer longer than a frame leaves in frames of the peer's size, and joins to the same message."""
    client = Client()
    client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 1 << 20}), f.window_update(f.CONNECTION, 1 << 20))
    answer = client.send(client.request(1, ECHO), data(1, message(BODY)))

    assert messages(answer) == [BODY]
    sizes = [len(found.payload) for found in answer if found.kind == f.DATA]
    assert sizes == [FULL] * (len(message(BODY)) // FULL) + [len(message(BODY)) % FULL]
    assert client.connection.outbox.size == 0


def test_an_answer_of_exactly_so_many_frames_has_no_empty_one() -> None:
    """A message that fills its frames is not followed by an empty frame."""
    client = Client()
    client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 1 << 20}), f.window_update(f.CONNECTION, 1 << 20))
    answer = client.send(client.request(1, ECHO), data(1, message(bytes(3 * FULL - 5))))

    assert [len(found.payload) for found in answer if found.kind == f.DATA] == [FULL] * 3


def test_frames_of_two_streams_between_each_other() -> None:
    """Each message gets its own stream's frames."""
    client = opened()
    client.send(client.request(3, RECORD))
    first, second = message(BODY), message(BODY[::-1])
    client.send(
        data(1, first[: 3 * FULL]),
        data(3, second[: 4 * FULL]),
        data(1, first[3 * FULL :]),
        data(3, second[4 * FULL :]),
    )

    assert [call.events for call in client.calls] == [[BODY], [BODY[::-1]]]


def test_the_next_message_follows_at_once() -> None:
    """The frame that completes a message may begin the next one."""
    client = opened()
    client.send(data(1, message(BODY) + message(b"next") + message(BODY)))

    assert client.calls[0].events == [BODY, b"next", BODY]


def test_received_frames_are_paid_for() -> None:
    """Windows are refilled for the frames of a body, on the stream and on the connection."""
    client = opened(stream_window=1 << 18, connection_window=1 << 18)
    answer = client.send(data(1, message(BODY)[: 9 * FULL]))

    assert {found.stream for found in answer if found.kind == f.WINDOW_UPDATE} == {0, 1}


@pytest.mark.parametrize("window", ["stream_window", "connection_window"])
def test_a_body_beyond_the_window_ends_the_connection(window: str) -> None:
    """A body that no WINDOW_UPDATE allowed is an error, however many frames it takes."""
    limits: dict[str, Any] = {window: 1 << 17}
    client = opened(**limits)
    answer = client.send(data(1, message(BODY)))

    assert (answer[-1].kind, client.connection.closing) == (f.GOAWAY, True)


def test_a_body_beyond_its_content_length_is_reset() -> None:
    """The announced length counts for frames taken together too."""
    client = opened(more=(("content-length", str(5 * FULL)),))
    answer = client.send(data(1, message(BODY)[: 6 * FULL]))

    assert kinds(answer) == [f.RST_STREAM]
    assert client.calls[0].events == ["cancelled"]


def test_a_body_beyond_the_memory_is_reset() -> None:
    """The part of a body that is kept counts as held, and is released with its stream."""
    client = opened(held_bytes=6 * FULL)
    client.send(data(1, message(BODY)[: 4 * FULL]))
    assert client.held >= 4 * FULL - 5
    answer = client.send(data(1, message(BODY)[4 * FULL : 8 * FULL]))

    assert kinds(answer) == [f.RST_STREAM]
    assert client.held == 0


def test_a_body_that_ends_too_early() -> None:
    """END_STREAM within a message ends the call with an error."""
    client = opened()
    answer = client.send(data(1, message(BODY)[: 6 * FULL], ends=True))

    assert kinds(answer) == [f.HEADERS]
    assert ("grpc-status", str(f.INTERNAL)) in client.fields(answer[0])
    assert client.calls[0].events == ["cancelled"]


def test_a_frame_above_the_limit_among_others() -> None:
    """A frame larger than was announced ends the connection, wherever it comes."""
    client = opened()
    sent = message(BODY)
    answer = client.send(data(1, sent[: 3 * FULL]), frame(f.DATA, 0, 1, sent[3 * FULL : 5 * FULL]))

    assert answer[-1].code == f.FRAME_SIZE_ERROR


@pytest.mark.parametrize("window", [f.DEFAULT_WINDOW, 1 << 20])
@pytest.mark.parametrize("size", [1, 100, FULL - 15, FULL - 14, 3 * FULL, 100_000])
def test_an_answer_in_two_parts_is_one_message(size: int, window: int) -> None:
    """Head and content of a split answer leave as one message, at once or as the windows allow."""
    client = opened()
    client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: window}))
    content = BODY[:size]
    client.calls[0].sink.send(b"the head", memoryview(content))
    client.calls[0].sink.close()
    first = client.answer()
    rest = client.send(f.window_update(b"\0\0\0\1", 1 << 18), f.window_update(f.CONNECTION, 1 << 18))

    assert messages(first + rest) == [b"the head" + content]


def test_what_is_kept_of_a_read_is_no_more_than_twice_what_is_counted() -> None:
    """One frame of a body does not keep the large read in which it came."""
    client = opened()
    client.send(client.request(3, RECORD))
    begun = frame(f.DATA, 0, 1, message(BODY)[:FULL])
    small = frame(f.DATA, 0, 1, message(BODY)[FULL : FULL + 5_000])
    other = data(3, message(BODY))
    client.send(begun)
    client.send(small, other)

    kept = [
        bytes(part.obj) for part in client.connection.stream_table.open[1]._parts if type(part) is memoryview
    ]
    assert sum(map(len, kept)) <= 2 * client.held
    assert client.calls[1].events == [BODY]
