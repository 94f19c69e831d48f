"""Messages between replicas are read as they were written; everything else is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.in_flight import Attempt, InFlightRequest
from kvist_epp.replicas.messages import (
    Handshake,
    RemoteRequest,
    decode_ack,
    decode_snapshot_request,
    decode_update,
    encode_ack,
    encode_snapshot_request,
    encode_update,
)
from kvist_epp.replicas.prompt_digests import PromptDigests

NOW = 1e6
texts = st.text(max_size=20)
numbers = st.integers(0, (1 << 64) - 1)
counts = st.integers(0, (1 << 32) - 1)
ages = st.integers(0, 10**8).map(lambda ms: ms / 1000)
handshakes = st.builds(
    Handshake, st.text(min_size=1, max_size=20), st.binary(max_size=40), st.booleans(), counts, counts
)
logged = st.builds(
    AccessLogEntry,
    session=texts.map(lambda text: text or None),
    request_id=texts.map(lambda text: text or None),
    upstream=texts.map(lambda text: text or None),
    status=st.integers(0, 999),
    seconds=st.none() | st.floats(0, 1e6),
)
roots = st.tuples(st.none() | texts, st.none() | texts)
prefixes = st.builds(PromptDigests, roots, st.lists(numbers, max_size=4).map(tuple), numbers)
entries = st.builds(
    RemoteRequest,
    number=numbers,
    session=texts,
    endpoint=texts,
    uncached=counts,
    remaining=counts,
    total=counts,
    age=ages,
    idle=ages,
    progressed=st.booleans(),
    digests=st.none() | prefixes,
)


def local_attempt(entry: RemoteRequest) -> Attempt:
    """Return an attempt of this replica whose update contains this row."""
    request = InFlightRequest(entry.session, entry.total)
    attempt = Attempt(
        request,
        EndpointLoad(entry.endpoint),
        uncached=float(entry.uncached),
        routed_at=NOW - entry.age,
        last_event_at=NOW - entry.idle,
        backlog=float(entry.remaining),
        number=entry.number,
        progressed=entry.progressed,
    )
    request.attempts.append(attempt)
    return attempt


@given(
    seq=numbers,
    handshake=st.none() | handshakes,
    rows=st.lists(entries, max_size=8),
    gone=st.lists(numbers, max_size=8),
    ended=st.lists(logged, max_size=4),
    whole=st.tuples(st.booleans(), st.booleans()),
    leaving=st.booleans(),
)
def test_updates_are_read_as_they_were_written(
    seq: int,
    handshake: Handshake | None,
    rows: list[RemoteRequest],
    gone: list[int],
    ended: list[AccessLogEntry],
    whole: tuple[bool, bool],
    leaving: bool,
) -> None:
    """All fields survive encoding and decoding, for any values."""
    told = list(map(local_attempt, rows))
    known = dict(zip(told, (row.digests for row in rows), strict=True))
    more: dict[str, Any] = {
        "handshake": handshake,
        "full": whole,
        "ended_numbers": gone,
        "log_entries": ended,
        "leaving": leaving,
    }
    update = decode_update(encode_update(seq, NOW, told, digests_of=known.get, **more))

    assert (update.seq, update.handshake, list(update.ended_numbers)) == (seq, handshake, gone)
    assert (update.full_begins, update.full_ends, update.leaving) == (*whole, leaving)
    assert (list(update.requests), list(update.log_entries)) == (rows, ended)


@given(st.none() | handshakes, numbers, st.lists(texts, max_size=5), counts)
def test_acknowledgements_and_snapshot_requests_are_read_as_they_were_written(
    handshake: Handshake | None, seq: int, publishers: list[str], chunks: int
) -> None:
    """Handshakes, acknowledgements and snapshot requests survive encoding and decoding."""
    assert decode_ack(encode_ack(handshake, seq)) == (handshake, seq)
    assert decode_snapshot_request(encode_snapshot_request(chunks, handshake, publishers)) == (
        handshake,
        tuple(publishers),
        chunks,
    )


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    """Bytes of a stranger raise nothing but ProtocolError."""
    for read in (decode_update, decode_ack, decode_snapshot_request):
        try:
            read(data)
        except ProtocolError:
            continue


def test_columns_of_different_lengths_are_refused() -> None:
    """An update with a local_request that lacks its endpoint is refused as a whole."""
    update = encode_update(
        1, NOW, [local_attempt(RemoteRequest(1, "s", "ns/pod", 1, 1, 1, 0.0, 0.0, progressed=False))]
    )

    with pytest.raises(ProtocolError, match="columns"):
        decode_update(update + b"\x2a\x02\x08\x07")  # a second number, and nothing else
