"""Streams that stand still are ended, on a clock that moves by hand; those that get on are not."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.epp.http2.h2 import ECHO, LASTING, RECORD, Client, Frame, data, ending, frame, message

from kvist_epp.http2 import frames as f
from kvist_epp.http2.limits import CHECKS_PER_STALL

STALL = 40.0
TIMES: dict[str, Any] = {"stall_seconds": STALL, "stream_idle_seconds": 600.0, "bytes_per_second": 100}


def later(client: Client, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> list[Frame]:
    """Let time pass, with a look as often as the server takes one."""
    answer: list[Frame] = []
    step = STALL / CHECKS_PER_STALL
    for _ in range(int(seconds / step)):
        client.now += step
        meanwhile()
        client.connection.check_streams(client.now)
        answer += client.answer()
    return answer


def status(client: Client, answer: list[Frame]) -> str:
    """The grpc-status of the one answer."""
    (headers,) = [found for found in answer if found.kind == f.HEADERS]
    return dict(client.fields(headers))["grpc-status"]


def test_a_message_that_never_ends_is_given_up() -> None:
    """A call whose client stops in the middle of a message ends with DEADLINE_EXCEEDED; others go on."""
    client = Client(**TIMES)
    client.send(client.request(1, RECORD), data(1, message(bytes(9000))[:5000]), client.request(3, RECORD))
    assert later(client, STALL) == []
    assert status(client, later(client, 2 * STALL / CHECKS_PER_STALL)) == "4"
    assert [call.events for call in client.calls] == [["cancelled"], []]
    assert client.stats.streams_ended["stalled-receiving"] == 1
    assert client.held == 0


@pytest.mark.parametrize(("size", "ended"), [(1200, 0), (800, 1)])
def test_a_slow_message_must_keep_to_a_rate(size: int, ended: int) -> None:
    """A body that trickles in is taken at the least rate, and given up below it."""
    client = Client(**TIMES)
    client.send(client.request(1, RECORD), message_head(1 << 20))
    later(client, 3 * STALL, lambda: client.send(data(1, bytes(size))))
    assert client.stats.streams_ended["stalled-receiving"] == ended


def test_a_window_that_never_opens_ends_its_stream() -> None:
    """An answer that waits too long for the client's window is dropped, and what it held with it."""
    client = Client(**TIMES)
    client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 0}), client.request(1, RECORD))
    client.calls[0].sink.send(bytes(1000))
    client.calls[0].sink.close()
    client.answer()
    assert later(client, STALL) == []
    assert ending(later(client, 2 * STALL / CHECKS_PER_STALL)) == (f.RST_STREAM, f.CANCEL)
    assert client.stats.streams_ended["stalled-sending"] == 1
    assert client.stats.held == client.connection.streams == 0


def test_a_window_that_opens_by_drops_ends_its_stream() -> None:
    """A client that reads slower than the least rate is no better than one that does not read."""
    client = Client(**TIMES)
    client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 0}), client.request(1, RECORD))
    client.calls[0].sink.send(bytes(100_000))
    drop = frame(f.WINDOW_UPDATE, 0, 1, (500).to_bytes(4, "big"))
    assert ending(later(client, 2 * STALL, lambda: client.send(drop))) == (f.RST_STREAM, f.CANCEL)
    assert client.calls[0].events == ["cancelled"]


def test_a_silent_call_is_cancelled() -> None:
    """After long silence on both sides a call ends; each message of either side restarts the time."""
    client = Client(**TIMES)
    client.send(client.request(1, RECORD), client.request(3, RECORD))
    later(client, 500)
    client.send(data(1, message(b"still here")))
    later(client, 500)
    assert [call.events[-1:] for call in client.calls] == [[b"still here"], ["cancelled"]]
    client.calls[0].sink.send(b"so am I")
    client.answer()
    later(client, 500)
    assert client.stats.streams_ended["silent"] == 1
    later(client, 200)
    assert client.stats.streams_ended["silent"] == 2


def test_messages_both_ways_are_progress() -> None:
    """An echo, as many bytes out as in, is progress."""
    client = Client(**TIMES)
    client.send(client.request(1, ECHO))
    later(client, 2000, lambda: client.send(data(1, message(b"tick"))))
    assert client.connection.streams == 1


def test_lasting_calls_may_be_silent() -> None:
    """A health watch may wait for ever; half a message it may not."""
    client = Client(**TIMES)
    client.send(client.request(1, LASTING))
    later(client, 5000)
    assert client.calls[0].events == []
    client.send(data(1, message(bytes(100))[:50]))
    later(client, 2 * STALL)
    assert client.calls[0].events == ["cancelled"]


def test_an_answered_request_must_be_ended() -> None:
    """A client that keeps its side open after the answer is stopped, without an error."""
    client = Client(**TIMES)
    client.send(client.request(1, RECORD))
    client.calls[0].sink.close()
    client.answer()
    assert ending(later(client, 2 * STALL)) == (f.RST_STREAM, f.NO_ERROR)
    assert client.stats.streams_ended["stalled-ending"] == 1
    assert client.connection.streams == 0


def message_head(size: int) -> bytes:
    """The prefix of a long message on stream 1."""
    return data(1, b"\0" + size.to_bytes(4, "big"))
