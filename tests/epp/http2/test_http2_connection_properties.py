"""The HTTP/2 connection under any split of its input, any answer sizes and any garbage."""

from itertools import pairwise

from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.http2.h2 import ECHO, RECORD, Client, Frame, data, frame, grpc_fields, message

from kvist_epp.errors import ProtocolError
from kvist_epp.http2 import frames as f
from kvist_epp.http2.header_reader import HeaderReader, Malformed

texts = st.binary(max_size=300) | st.integers(0, 40_000).map(bytes)
numbers = st.integers(0, 6).map(lambda at: 2 * at + 1)


@st.composite
def conversations(draw: st.DrawFn) -> bytes:
    """Draw the frames of a correct client: several calls, interleaved, padded, continued."""
    encoder = Encoder()
    calls = []
    for number in range(1, 2 * draw(st.integers(1, 4)), 2):
        path = draw(st.sampled_from([ECHO, RECORD, "/no.Such/Thing", "/metrics"]))
        block = encoder.encode(grpc_fields(path), huffman=draw(st.booleans()))
        content = b"".join(message(text) for text in draw(st.lists(texts, max_size=3)))
        calls.append([_opening(draw, number, block), *_pieces(draw, number, content)])
    # Header blocks change the decoder's state, so they keep their order; the rest of a call keeps its own.
    stream = [call.pop(0) for call in calls]
    while any(calls):
        call = draw(st.sampled_from([call for call in calls if call]))
        stream.append(call.pop(0))
    return f.PREFACE + f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 1 << 20}) + b"".join(stream)


def _opening(draw: st.DrawFn, number: int, block: bytes) -> bytes:
    if draw(st.booleans()):
        return frame(f.HEADERS, f.END_HEADERS, number, block)
    cut = draw(st.integers(0, len(block)))
    return frame(f.HEADERS, 0, number, block[:cut]) + frame(
        f.CONTINUATION, f.END_HEADERS, number, block[cut:]
    )


def _pieces(draw: st.DrawFn, number: int, content: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(content)), max_size=4)))
    parts = [content[start:stop] for start, stop in pairwise([0, *cuts, len(content)])]
    return [data(number, part, ends=part is parts[-1]) for part in parts]


def played(client: Client, pieces: list[bytes]) -> tuple[list[Frame], list[list[object]]]:
    """The whole answer, with DATA of a stream joined, and what each call saw."""
    answer = [found for piece in pieces for found in client.send(piece)]
    return answer, [call.events for call in client.calls]


@settings(deadline=None, max_examples=60)
@given(conversations(), st.data())
def test_any_split_of_the_input_means_the_same(stream: bytes, choice: st.DataObject) -> None:
    """However the bytes are cut on their way, the calls see the same and the answer is the same."""
    cuts = sorted(choice.draw(st.lists(st.integers(0, len(stream)), max_size=30)))
    whole = played(Client(greet=False), [stream])
    pieces = [stream[start:stop] for start, stop in pairwise([0, *cuts, len(stream)])]
    assert played(Client(greet=False), pieces) == whole


@settings(deadline=None, max_examples=10)
@given(conversations())
def test_byte_by_byte_means_the_same(stream: bytes) -> None:
    """The finest split of all, too."""
    stream = stream[:4000]
    whole = played(Client(greet=False), [stream])
    assert played(Client(greet=False), [stream[at : at + 1] for at in range(len(stream))]) == whole


kinds_of_frames = st.integers(0, 10)
any_frames = st.builds(
    frame, kinds_of_frames, st.integers(0, 255), numbers | st.just(0), st.binary(max_size=60)
)
valid = st.sampled_from(
    [
        frame(f.SETTINGS, 0, 0),
        frame(f.PING, 0, 0, bytes(8)),
        data(1, message(b"x")),
        data(3, b"", ends=True),
        frame(f.WINDOW_UPDATE, 0, 0, b"\0\0\x01\0"),
        frame(f.WINDOW_UPDATE, 0, 1, b"\0\0\x01\0"),
        frame(f.RST_STREAM, 0, 1, bytes(4)),
        *(frame(f.HEADERS, f.END_HEADERS, number, Encoder().encode(grpc_fields())) for number in (1, 3, 5)),
    ]
)


@settings(deadline=None, max_examples=400)
@given(st.lists(any_frames | valid | st.binary(max_size=40), max_size=30))
def test_garbage_ends_in_goaway_or_nothing(pieces: list[bytes]) -> None:
    """Whatever comes, nothing is raised; an end is one GOAWAY, and then no call is open and no state kept."""
    client = Client()
    answer, _ = played(client, pieces)
    fatal = [found for found in answer if found.kind == f.GOAWAY]
    assert len(fatal) == client.connection.closing
    if fatal:
        assert answer[-1].kind == f.GOAWAY
        assert client.connection.streams == 0
    client.connection.on_lost()
    assert client.connection.streams == 0
    assert all(call.events[-1:] in (["cancelled"], []) for call in client.calls)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_garbage_before_the_preface_is_refused(start: bytes) -> None:
    """Bytes that are not the beginning of the preface end the connection at once."""
    client = Client(greet=False)
    client.send(start)
    assert client.connection.closing == (not f.PREFACE.startswith(start))


@settings(deadline=None, max_examples=500)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8))
def test_garbage_header_blocks_fail_cleanly(blocks: list[bytes]) -> None:
    """HPACK garbage is a list of fields, malformed, or a compression error; nothing else is raised."""
    reader = HeaderReader(2000)
    codes = set()
    for block in blocks:
        try:
            reader.request(block)
        except Malformed:
            continue
        except ProtocolError as error:
            codes.add(error.code)
            break
    assert codes <= {f.COMPRESSION_ERROR}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(numbers, st.integers(0, 60_000)), max_size=12),
    st.lists(st.tuples(st.just(0) | numbers, st.integers(1, 100_000)), max_size=30),
    st.integers(0, 70_000),
)
def test_flow_control_neither_exceeds_nor_loses(
    sends: list[tuple[int, int]], updates: list[tuple[int, int]], initial: int
) -> None:
    """Whatever windows open when: never more is sent than allowed, and in the end everything, in order."""
    client = Client()
    client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: initial}))
    client.send(*(client.request(number, RECORD) for number in range(1, 14, 2)))
    allowed = {0: f.DEFAULT_WINDOW, **dict.fromkeys(range(1, 14, 2), initial)}
    expected = dict.fromkeys(allowed, b"")
    got = dict.fromkeys(allowed, b"")

    def check(answer: list[Frame]) -> None:
        for found in answer:
            if found.kind == f.DATA:
                got[found.stream] += found.payload
                allowed[found.stream] -= len(found.payload)
                allowed[0] -= len(found.payload)
        assert min(allowed.values()) >= 0

    for at, (number, size) in enumerate(sends):
        text = bytes((at,)) * size
        client.calls[number // 2].sink.send(text)
        expected[number] += message(text)
        check(client.answer())
    for number, increment in updates:
        allowed[number] += increment
        check(client.send(frame(f.WINDOW_UPDATE, 0, number, increment.to_bytes(4, "big"))))
    for number in allowed:
        allowed[number] += 1 << 24
        check(client.send(frame(f.WINDOW_UPDATE, 0, number, (1 << 24).to_bytes(4, "big"))))
    assert got == expected
