"""One connection's TLS without a socket: cut anywhere, closed, refused, fed with nonsense."""

import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.http2.certificates import NO_ALPN, self_made, verifying

from kvist_epp.errors import ProtocolError
from kvist_epp.http2.tls_session import ClientHello, TlsSession


class Peer:
    """The client's side, by Python's own ``SSLObject``."""

    def __init__(
        self, *alpn: str, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3, ciphers: str = ""
    ) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = verifying(self_made().material.ca, *alpn)
        context.maximum_version = newest
        if ciphers:
            context.set_ciphers(ciphers)
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")

    def step(self, data: bytes, do: Callable[[], object]) -> bytes:
        """Take what the server sent, do something as far as it goes, return what is for the server."""
        self._incoming.write(data)
        with suppress(ssl.SSLWantReadError):
            do()
        return self._outgoing.read()

    def read(self, data: bytes) -> bytes:
        """The plaintext in what the server sent."""
        pieces: list[bytes] = []
        self.step(data, lambda: pieces.extend(iter(lambda: self.tls.read(1 << 14), b"")))
        return b"".join(pieces)


def agreed(peer: Peer | None = None) -> tuple[Peer, TlsSession]:
    """Both sides after their handshake."""
    peer, server = peer or Peer(), TlsSession(self_made().context)
    data = b""
    while not server.established:
        server.receive(peer.step(data, peer.tls.do_handshake))
        data = server.take()
    peer.step(data, peer.tls.do_handshake)
    return peer, server


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    """``data`` cut at these places."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return (data[start:stop] for start, stop in pairwise(edges))


CUTS = st.lists(st.integers(0, 1 << 20), max_size=12)
MESSAGES = st.lists(st.binary(max_size=40_000), max_size=4)


@settings(max_examples=60)
@given(MESSAGES, CUTS)
def test_what_is_sent_arrives_however_it_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    """Both ways, whatever pieces the network makes of it."""
    peer, server = agreed()
    sealed = b"".join([peer.step(b"", lambda m=m: peer.tls.write(m)) for m in messages])  # type: ignore[misc]
    assert b"".join(server.receive(piece) for piece in pieces(sealed, cuts)) == b"".join(messages)

    for message in messages:
        server.encrypt(message)
    answer = server.take()
    assert b"".join(peer.read(piece) for piece in pieces(answer, cuts)) == b"".join(messages)


@given(CUTS)
def test_a_handshake_however_it_is_cut(cuts: list[int]) -> None:
    """A hello may come in any pieces, and the first request right behind the handshake's end."""
    peer, server = Peer(), TlsSession(self_made().context)
    for piece in pieces(peer.step(b"", peer.tls.do_handshake), cuts):
        assert not server.established
        server.receive(piece)
    finished = peer.step(server.take(), peer.tls.do_handshake)
    request = peer.step(b"", lambda: peer.tls.write(b"at once"))
    got = b"".join(server.receive(piece) for piece in pieces(finished + request, cuts))

    assert (server.established, got) == (True, b"at once")


@given(st.binary(max_size=2000))
def test_nonsense_instead_of_a_hello(data: bytes) -> None:
    """Any bytes are refused or waited for, never anything else."""
    server = TlsSession(self_made().context)
    with suppress(ProtocolError):
        assert server.receive(data) == b""
    assert not server.established


@given(st.binary(min_size=1, max_size=300), st.integers(0, 1 << 20))
def test_nonsense_in_the_middle(data: bytes, place: int) -> None:
    """A record that was tampered with gives no plaintext, and an alert."""
    peer, server = agreed()
    sealed = bytearray(peer.step(b"", lambda: peer.tls.write(bytes(100))))
    body = range(5, len(sealed))  # behind the record's head
    sealed[body[place % len(body)]] ^= data[0] or 1
    with pytest.raises(ProtocolError, match="TLS: "):
        server.receive(bytes(sealed) + data)
    assert server.take()


@pytest.mark.parametrize("first", ["ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384"])
def test_the_client_chooses_the_cipher(first: str) -> None:
    """The cipher that the client names first is used: gateways begin with the cheapest."""
    ciphers = f"{first}:ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-ECDSA-AES128-GCM-SHA256"
    peer, _ = agreed(Peer(newest=ssl.TLSVersion.TLSv1_2, ciphers=ciphers))

    assert (peer.tls.cipher() or ("",))[0] == first


def test_the_peers_farewell() -> None:
    """Bytes before ``close_notify`` are read, and the end is noticed."""
    peer, server = agreed()
    sealed = peer.step(b"", lambda: peer.tls.write(b"last words"))
    sealed += peer.step(b"", peer.tls.unwrap)

    assert (server.receive(sealed), server.ended) == (b"last words", True)


def test_our_farewell() -> None:
    """The peer reads all that was sealed before it, then the end."""
    peer, server = agreed()
    server.encrypt(b"answer")
    server.finish()
    ends: list[bytes] = []
    peer.step(server.take(), lambda: ends.extend((peer.tls.read(100), peer.tls.read(100))))

    assert ends == [b"answer", b""]


def test_a_farewell_without_a_handshake() -> None:
    """Nothing to say to a peer that has said nothing."""
    server = TlsSession(self_made().context)
    server.finish()
    assert server.take() == b""


def test_another_protocol_is_refused() -> None:
    """A client that agrees on nothing with us is refused once its handshake is over."""
    with pytest.raises(ProtocolError, match="did not offer h2"):
        agreed(Peer("http/1.1"))


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@given(CUTS)
def test_clients_without_alpn_are_accepted(newest: ssl.TLSVersion, cuts: list[int]) -> None:
    """A client without ALPN goes on, whatever pieces its hello comes in."""
    peer, server = Peer(NO_ALPN, newest=newest), TlsSession(self_made().context)
    for piece in pieces(peer.step(b"", peer.tls.do_handshake), cuts):
        server.receive(piece)
    while not server.established:
        server.receive(peer.step(server.take(), peer.tls.do_handshake))
    peer.step(server.take(), peer.tls.do_handshake)

    assert peer.tls.selected_alpn_protocol() is None
    assert server.receive(peer.step(b"", lambda: peer.tls.write(b"PRI"))) == b"PRI"


OFFERS = st.lists(st.sampled_from(("h2", "http/1.1", "x" * 200)), unique=True)


def hello_of(*alpn: str) -> bytes:
    """A client's first message."""
    peer = Peer(*(alpn or (NO_ALPN,)))
    return peer.step(b"", peer.tls.do_handshake)


@settings(max_examples=50)
@given(OFFERS, st.integers(1, 300))
def test_a_hello_in_several_records(offered: list[str], size: int) -> None:
    """An offer of ALPN is found, also where the message is spread over records."""
    body = hello_of(*offered)[5:]
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    hello = ClientHello()
    hello.receive(b"".join(b"\x16\x03\x01" + len(part).to_bytes(2) + part for part in parts))

    assert hello.offers_alpn is bool(offered)


@given(st.integers(0, 1 << 20), st.binary(max_size=300))
def test_a_hello_that_is_broken(cut: int, tail: bytes) -> None:
    """A message that cannot be parsed counts as an offer of ALPN, and nothing is raised."""
    whole = hello_of()
    hello = ClientHello()
    hello.receive(whole[: cut % len(whole)])
    assert hello.offers_alpn
    hello = ClientHello()
    hello.receive(tail)
    assert hello.offers_alpn


def test_a_hello_is_not_kept_for_ever() -> None:
    """A client that says much before its handshake is over does not fill the memory."""
    hello = ClientHello()
    for _ in range(100):
        hello.receive(b"\x16\x03\x01\x03\xe8" + bytes(1000))
    assert len(hello) <= 16 * 1024
