"""The header blocks that a client sends: HPACK, and the rules for requests.

Sources: RFC 9113 section 8; RFC 7541 (by the ``hpack`` library). A gateway opens thousands of streams a
second whose header blocks are the same bytes. A block that did not change the dynamic table means the same
until something else does, so its result is remembered until then; ``traced_block`` has those that differ in
their trace context alone. Peers are asked for blocks without a dynamic table, which each trace context would
change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError

from kvist_epp.errors import ProtocolError
from kvist_epp.http2 import traced_block
from kvist_epp.http2.call import ENVOY_HEADER, NO_TRACE_HEADERS
from kvist_epp.http2.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM

_NAME_BYTES = bytes(byte for byte in range(0x21, 0x7F) if not 0x41 <= byte <= 0x5A and byte != 0x3A)
"""Bytes allowed in a field name (RFC 9113 section 8.2.1): visible ASCII, no capitals, no colon."""
_CONNECTION_SPECIFIC = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_TRACE_HEADERS = (traced_block.NAME, b"tracestate")
_PARENT = traced_block.NAME.decode()
_MAX_TRACE_BYTES = 512
_REMEMBERED_BLOCKS = 32
_REMEMBERED_BYTES = 1024

Fields = list[tuple[bytes, bytes]]
K = TypeVar("K", bytes, tuple[bytes, bytes])


class Malformed(Exception):
    """A header list that HPACK can read and HTTP/2 forbids; an error of its stream only."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The parts of a request's header section that this server uses."""

    path: bytes
    """``:path`` as sent; empty for CONNECT."""
    grpc: bool
    """True for a POST with gRPC's content type."""
    bodyless: bool
    """True for a HEAD request, whose response has no content."""
    content_length: int | None
    """Bytes of content announced; ``None`` if not announced."""
    trace_headers: Mapping[str, str]
    """Headers of W3C Trace Context, as latin-1."""
    from_envoy: bool
    """True for a call that an Envoy made itself; see ``call.Sink``."""


class HeaderReader:
    """The receiving side of HPACK for one connection."""

    __slots__ = ("_decoder", "_known", "_no_table", "_traced")

    def __init__(self, header_bytes: int) -> None:
        self._decoder = Decoder(max_header_list_size=header_bytes)
        self._no_table = False
        self._known: dict[bytes, RequestHead] = {}
        self._traced: dict[tuple[bytes, bytes], RequestHead] = {}
        """By the parts of a block around the value of its ``traceparent``."""

    def on_settings_acknowledged(self) -> None:
        """Refuse updates to a larger dynamic table than the announced one of no bytes (RFC 7541 section 6.3).

        A peer that keeps the table which it has had is tolerated, since both sides still agree on it.
        """
        self._no_table = True

    def request(self, block: bytes) -> RequestHead:
        """Read a whole header block that opens a stream.

        :raises Malformed: the stream is to be reset with PROTOCOL_ERROR.
        :raises ProtocolError: the table is out of step, the connection is lost.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        traced = traced_block.cut(block)
        if traced is not None and (known := self._traced.get(traced.rest)) is not None:
            return _with_trace(known, traced.value)
        fields, steady = self.decode(block)
        head = _head(fields)
        if steady and len(block) <= _REMEMBERED_BYTES:
            if traced is None:
                _remember(self._known, block, head)
            elif traced_block.begins_field(block, traced.at - 1):
                _remember(self._traced, traced.rest, head)
        return head

    def trailers(self, block: bytes) -> None:
        """Read a header block that ends a stream; raises as ``request`` does."""
        for name, value in self.decode(block)[0]:
            _check_field(name, value)

    def decode(self, block: bytes) -> tuple[Fields, bool]:
        """Return the fields, and whether the dynamic table is unchanged. Raises ProtocolError.

        Header blocks of streams that are gone must be decoded too, to keep the table in step.
        """
        if self._no_table and _enlarges_table(block):
            raise ProtocolError("dynamic table larger than announced", COMPRESSION_ERROR)
        newest, count, size = self._table()
        try:
            decoded = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError as error:
            # The rest is not decoded, so the table is out of step.
            raise ProtocolError("header list too large", ENHANCE_YOUR_CALM, reason="header-bytes") from error
        except (HPACKError, ValueError, LookupError) as error:
            # The library's own errors, and what its slicing may let through on garbage.
            raise ProtocolError("header block cannot be decoded", COMPRESSION_ERROR) from error
        newest_after, count_after, size_after = self._table()
        steady = newest is newest_after and count == count_after and size == size_after
        if not steady:
            self._known.clear()
            self._traced.clear()
        return [(bytes(name), bytes(value)) for name, value in decoded], steady

    def _table(self) -> tuple[object, int, int]:
        """Return a key that differs after any change of the dynamic table.

        Entries are added in front and removed behind only.
        """
        table = self._decoder.header_table
        entries = table.dynamic_entries
        return entries[0] if entries else None, len(entries), table.maxsize


def _enlarges_table(block: bytes) -> bool:
    """Return whether a block begins with an update of the dynamic table to more than no bytes."""
    first = block.lstrip(b"\x20")[:1]
    return b"\x20" <= first <= b"\x3f"


def _remember(known: dict[K, RequestHead], key: K, head: RequestHead) -> None:
    if len(known) >= _REMEMBERED_BLOCKS:
        known.clear()
    known[key] = head


def _with_trace(head: RequestHead, parent: str) -> RequestHead:
    """Return the same head with another ``traceparent``."""
    headers = {**head.trace_headers, _PARENT: parent}
    return RequestHead(head.path, head.grpc, head.bodyless, head.content_length, headers, head.from_envoy)


def _check_field(name: bytes, value: bytes) -> None:
    if not name or name.translate(None, _NAME_BYTES):
        raise Malformed("field name")
    _check_value(value)
    if name in _CONNECTION_SPECIFIC or (name == b"te" and value != b"trailers"):
        raise Malformed("connection-specific field")


def _check_value(value: bytes) -> None:
    if b"\0" in value or b"\r" in value or b"\n" in value or value.strip(b" \t") != value:
        raise Malformed("field value")


def _head(fields: Fields) -> RequestHead:
    pseudo, regular = _split(fields)
    method, path = pseudo.get(b":method"), pseudo.get(b":path", b"")
    _check_target(method, path, pseudo)
    authority, host = pseudo.get(b":authority"), regular.get(b"host")
    if authority is not None and host is not None and authority.lower() != host.lower():
        raise Malformed("host differs from :authority")
    content_type = regular.get(b"content-type", b"")
    # ``application/grpc`` alone, with ``+format`` or with parameters; grpc-web is another protocol.
    is_grpc = content_type.startswith(b"application/grpc") and content_type[16:17] in (b"", b"+", b";")
    return RequestHead(
        path=path,
        grpc=method == b"POST" and is_grpc,
        bodyless=method == b"HEAD",
        content_length=_content_length(fields),
        trace_headers=_trace_headers(regular),
        from_envoy=ENVOY_HEADER.encode() in regular,
    )


def _trace_headers(regular: Mapping[bytes, bytes]) -> Mapping[str, str]:
    """Return the trace context; longer values than it may have are left out, since streams keep them."""
    if _TRACE_HEADERS[0] not in regular:
        return NO_TRACE_HEADERS
    found = ((name, regular.get(name, b"")) for name in _TRACE_HEADERS)
    return {
        name.decode(): str(value, "latin-1") for name, value in found if 0 < len(value) <= _MAX_TRACE_BYTES
    }


def _split(fields: Fields) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """Split pseudo-header fields, known, once each, and in front (RFC 9113 section 8.3), from the others."""
    pseudo: dict[bytes, bytes] = {}
    regular: dict[bytes, bytes] = {}
    for name, value in fields:
        if not name.startswith(b":"):
            _check_field(name, value)
            regular[name] = value
            continue
        if regular or name not in _PSEUDO or name in pseudo:
            raise Malformed("pseudo-header field")
        _check_value(value)
        pseudo[name] = value
    return pseudo, regular


def _check_target(method: bytes | None, path: bytes, pseudo: dict[bytes, bytes]) -> None:
    # RFC 9113 sections 8.3.1 and 8.5 (CONNECT).
    if not method:
        raise Malformed(":method")
    if method == b"CONNECT":
        if b":path" in pseudo or b":scheme" in pseudo or not pseudo.get(b":authority"):
            raise Malformed("CONNECT")
        return
    if not pseudo.get(b":scheme"):
        raise Malformed(":scheme")
    if not path.startswith(b"/") and not (path == b"*" and method == b"OPTIONS"):
        raise Malformed(":path")


def _content_length(fields: Fields) -> int | None:
    values = {value for name, value in fields if name == b"content-length"}
    if not values:
        return None
    value = values.pop()
    if values or not value.isdigit() or len(value) > 18:
        raise Malformed("content-length")
    return int(value)
