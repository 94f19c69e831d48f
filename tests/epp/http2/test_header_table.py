"""The dynamic table of header blocks: none is announced, and a larger one is refused."""

import pytest

from kvist_epp.errors import ProtocolError
from kvist_epp.http2.header_reader import HeaderReader

GET = b"\x82\x86\x84"
"""``:method: GET``, ``:scheme: http`` and ``:path: /`` of the static table (RFC 7541 appendix A)."""


@pytest.mark.parametrize("update", [b"\x21", b"\x3f\x61", b"\x20\x3f\xe1\x1f"])
def test_an_update_beyond_the_announced_table_is_an_error(update: bytes) -> None:
    """Once a peer has read that there is no table, it must not enlarge its own; before, it may."""
    reader = HeaderReader(1 << 16)
    assert reader.request(update + GET).path == b"/"
    reader.on_settings_acknowledged()
    with pytest.raises(ProtocolError, match="larger than announced"):
        reader.request(b"\x20" + update + GET)


@pytest.mark.parametrize("update", [b"", b"\x20", b"\x20\x20"])
def test_a_table_of_no_bytes_is_accepted(update: bytes) -> None:
    """A peer that gives its table up may say so, even twice."""
    reader = HeaderReader(1 << 16)
    reader.on_settings_acknowledged()
    assert reader.request(update + GET).path == b"/"
