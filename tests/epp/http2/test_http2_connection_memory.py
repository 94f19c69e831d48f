"""A port's memory: counted to the byte, bounded, shared fairly, and given back."""

from hypothesis import given
from hypothesis import strategies as st
from tests.epp.http2.h2 import LASTING, RECORD, Client, data, ending, frame, message

from kvist_epp.http2 import frames as f
from kvist_epp.http2.limits import MemoryShare, PortStats
from kvist_epp.http2.stream_table import STREAM_BYTES

STREAM_CALM = (f.RST_STREAM, f.ENHANCE_YOUR_CALM)


def test_unanswered_requests_are_held() -> None:
    """Whole messages count until the call answers, because it may keep them until then."""
    client = Client(held_bytes=5000 + STREAM_BYTES)
    client.send(client.request(1, RECORD), data(1, message(bytes(2000))), data(1, message(bytes(2000))))
    assert client.held == 4000
    client.calls[0].sink.send(b"go on")
    assert client.held == 0
    client.send(data(1, message(bytes(3000))))
    assert ending(client.send(data(1, message(bytes(3000))))) == STREAM_CALM
    assert client.calls[0].events[-1] == "cancelled"
    assert client.stats.streams_ended["held-bytes"] == 1
    assert client.stats.held == 0


def test_an_access_log_may_go_on_for_ever() -> None:
    """Messages of a lasting call are not kept by it, so they do not count."""
    client = Client(held_bytes=5000)
    client.send(client.request(1, LASTING))
    for _ in range(10):
        client.send(data(1, message(bytes(2000))))
    assert client.held == 0
    assert len(client.calls[0].events) == 10


def test_a_connection_that_keeps_to_its_part_loses_nothing() -> None:
    """In a full port the connections above their share lose streams, whichever came last."""
    stats = PortStats(20_000)
    stats.connections = 4
    greedy, modest = Client(stats=stats), Client(stats=stats)
    for number in range(1, 9, 2):
        greedy.send(greedy.request(number, RECORD), data(number, message(bytes(3900))))
    modest.send(modest.request(1, RECORD), data(1, message(bytes(3000))))
    assert stats.held > stats.limit
    assert modest.calls[0].events == [bytes(3000)]
    assert ending(greedy.send(data(1, message(b"one more")))) == STREAM_CALM
    assert greedy.send(greedy.request(9, RECORD)) == []  # there is room again


def test_streams_cost_something_by_themselves() -> None:
    """Calls that are opened and left alone fill a port, too."""
    client = Client(held_bytes=10 * STREAM_BYTES)
    answer = client.send(*(client.request(number, RECORD) for number in range(1, 31, 2)))
    assert client.connection.streams == 10
    assert [found.code for found in answer] == [f.REFUSED_STREAM] * 5
    assert client.stats.streams_ended["held-bytes"] == 5


def test_unread_answers_fill_the_port_too() -> None:
    """Messages behind the peer's windows count; the stream that would pass the limit is reset."""
    client = Client(held_bytes=200_000)
    client.send(client.request(1, RECORD), client.request(3, RECORD))
    client.calls[0].sink.send(bytes(165_530))
    assert client.held == 165_530 + 5 - f.DEFAULT_WINDOW
    client.calls[1].sink.send(bytes(150_000))
    assert client.calls[1].events == ["cancelled"]
    assert client.stats.streams_ended["unread"] == 1
    client.send(frame(f.RST_STREAM, 0, 1, bytes(4)))
    assert client.held == 0


def test_many_small_messages_behind_a_window_become_few_frames() -> None:
    """Messages that wait for the peer's window are sent in order, with less than 2 % of frame heads."""
    client = Client(greet=False)
    client.send(f.PREFACE + f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 0}), client.request(1, RECORD))
    messages = [b"%04d" % number for number in range(5000)]
    for each in messages:
        client.calls[0].sink.send(each)
    waiting = client.connection.outbox.waiting_bytes
    assert waiting == 5000 * 9
    answer = client.send(f.window_update((1).to_bytes(4, "big"), 50_000))
    sent = [found.payload for found in answer if found.kind == f.DATA]
    assert b"".join(sent) == b"".join(map(message, messages))
    assert 9 * len(sent) < 0.02 * waiting


def test_what_a_full_socket_leaves_behind_is_held() -> None:
    """Frames that wait for the socket count from the moment it is full until they are taken."""
    client = Client()
    client.send(client.request(1, RECORD))
    client.calls[0].sink.send(bytes(1000))
    client.connection.outbox.park()
    client.calls[0].sink.send(bytes(500))
    client.connection.outbox.park()
    assert client.held == client.connection.outbox.size + client.connection.outbox.waiting_bytes > 1500
    client.connection.outbox.park(300)
    assert client.held == client.connection.outbox.size + client.connection.outbox.waiting_bytes + 300
    client.answer()
    assert client.held == 0


def test_output_is_taken_in_parts() -> None:
    """A socket is given no more than it asked for and a chunk, and nothing is lost or reordered."""
    client = Client()
    client.send(client.request(1, RECORD))
    for at in range(20):
        client.calls[0].sink.send(bytes((at,)) * 1000)
    parts = [b"".join(client.connection.outbox.take(2500))]
    client.calls[0].sink.send(b"late")
    while part := b"".join(client.connection.outbox.take(2500)):
        parts.append(part)
    assert max(map(len, parts)) < 2500 + 1100
    whole = b"".join(parts)
    assert [whole.index(bytes((at,)) * 1000) for at in range(20)] == sorted(
        whole.index(bytes((at,)) * 1000) for at in range(20)
    )
    assert whole.endswith(message(b"late"))


def test_a_lost_connection_gives_everything_back() -> None:
    """Half a message, an unanswered one, answers behind a window and frames for the socket."""
    client = Client()
    client.send(client.request(1, RECORD), data(1, message(bytes(900))[:500]))
    client.send(client.request(3, RECORD), data(3, message(bytes(900))))
    client.send(client.request(5, RECORD))
    client.calls[2].sink.send(bytes(100_000))
    client.connection.outbox.park()
    assert client.stats.held > 100_000
    client.connection.on_lost()
    assert client.stats.held == 0
    assert (client.connection.memory.receiving, client.connection.memory.unsent) == (0, 0)


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(-400, 400)), max_size=60),
)
def test_at_most_twice_the_limit_is_held(count: int, steps: list[tuple[int, int]]) -> None:
    """Bytes that are refused are given back, and the sum stays under two limits, in any order of requests."""
    stats = PortStats(1000)
    stats.connections = count
    shares = [MemoryShare(stats) for _ in range(count)]
    for at, size in steps:
        share = shares[at % count]
        size = max(size, -share.receiving)
        if not share.receive(size) and size > 0:
            share.receive(-size)
        assert stats.held == sum(one.receiving for one in shares)
        assert stats.held <= 2 * stats.limit
