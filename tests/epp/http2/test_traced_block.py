"""Header blocks with a trace context: read by what is remembered of them as they are read anew."""

import pytest
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.http2.h2 import grpc_fields

from kvist_epp.http2 import traced_block
from kvist_epp.http2.header_reader import HeaderReader

PARENTS = st.builds(
    "{:02x}-{:032x}-{:016x}-{:02x}".format,
    st.integers(0, 255),
    st.integers(0, 2**128 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 255),
)
OTHER = st.sampled_from(["", "x", "00-" + "4" * 52, "not hexadecimal at all", "A" * 55, "-" * 55, "0" * 56])
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def block(*more: tuple[str, str], huffman: bool = True) -> bytes:
    """A header block of a client without a dynamic table that opens a gRPC call."""
    encoder = Encoder()
    encoder.header_table_size = 0
    encoder.encode([])
    found: bytes = encoder.encode([*grpc_fields(), *more], huffman=huffman)
    return found


class Counted(HeaderReader):
    """A reader that counts the blocks that are decoded; its client has just given up its dynamic table."""

    __slots__ = ("decoded",)

    def __init__(self) -> None:
        super().__init__(16_384)
        self.decoded = 0
        self.request(b"\x20" + block())
        self.decoded = 0

    def decode(self, block: bytes) -> tuple[list[tuple[bytes, bytes]], bool]:
        """Count and decode."""
        self.decoded += 1
        return super().decode(block)


@settings(deadline=None)
@given(st.lists(st.tuples(PARENTS | OTHER, st.booleans(), st.sampled_from(["", "a=b"])), max_size=12))
def test_what_is_remembered_means_the_same(calls: list[tuple[str, bool, str]]) -> None:
    """A reader that has seen other trace contexts reads each block as one does that has seen nothing."""
    reader = Counted()
    for parent, huffman, state in calls:
        found = block(("traceparent", parent), ("tracestate", state), huffman=huffman)
        assert reader.request(found) == Counted().request(found)


@pytest.mark.parametrize("huffman", [True, False])
def test_a_new_context_needs_no_new_decoding(huffman: bool) -> None:
    """A thousand blocks that differ in their trace context are decoded once."""
    reader = Counted()
    for number in range(1000):
        parent = f"00-{number + 1:032x}-{number + 1:016x}-0{number % 2}"
        head = reader.request(block(("traceparent", parent), ("x-more", "1"), huffman=huffman))
        assert head.trace_headers == {"traceparent": parent}
    assert reader.decoded == 1


def test_a_block_that_changes_the_table_is_decoded_each_time() -> None:
    """A client that uses its dynamic table all the same is read right, without memory."""
    encoder, reader = Encoder(), Counted()
    reader.request(b"\x3f\xe1\x1f" + block())  # the table has 4,096 bytes again
    reader.decoded = 0
    for number in range(100):
        parent = f"00-{number + 1:032x}-{number + 1:016x}-01"
        head = reader.request(encoder.encode([*grpc_fields(), ("traceparent", parent)]))
        assert head.trace_headers == {"traceparent": parent}
    assert reader.decoded == 100


def test_a_name_inside_a_value_is_none() -> None:
    """A block is remembered only if what looks like the header's name begins a header."""
    inside = "\x0btraceparent\x37" + PARENT
    found = block(("x-more", inside), ("traceparent", PARENT), huffman=False)
    traced = traced_block.cut(found)
    assert traced is not None
    assert not traced_block.begins_field(found, traced.at - 1)

    reader = Counted()
    for number in range(3):
        again = block(("x-more", inside), ("traceparent", PARENT[:-1] + str(number)), huffman=False)
        assert reader.request(again).trace_headers == {"traceparent": PARENT[:-1] + str(number)}
    assert reader.decoded == 3


@given(st.binary(max_size=80), st.integers(0, 80))
def test_garbage_is_cut_without_an_error(garbage: bytes, at: int) -> None:
    """Whatever stands around the name of the header, cutting it raises nothing."""
    for name in (b"\x88\x4d\x83\x21\x6b\x1d\x85\xa9\x3f", b"\x0btraceparent"):
        traced_block.cut(garbage[:at] + name + garbage[at:])
