"""Certificates: made, read, replaced while connections go on, refused when they are no good."""

import asyncio
import datetime as dt
import logging
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from tests.epp.http2.certificates import DAY, HOST, NO_ALPN, NOW, Mounted, Pki, self_made, verifying
from tests.epp.http2.h2 import ECHO, Echo

from kvist_epp.errors import CertificateError
from kvist_epp.http2 import frames as f
from kvist_epp.http2.call import Server
from kvist_epp.http2.server import serve_http2
from kvist_epp.http2.tls import Certificates, own_names

REFUSED = (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)


class Clock:
    """A time that is set."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> dt.datetime:
        return self.now


class Client:
    """A connection over TLS that has shown that it works."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @property
    def shown(self) -> bytes:
        """The server's certificate, PEM."""
        der = self.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(der).encode()

    async def works(self) -> bool:
        """Whether it still gets an answer."""
        self.writer.write(f.frame(f.PING, 0, f.CONNECTION, b"12345678"))
        await asyncio.wait_for(self.reader.readuntil(b"12345678"), 10)
        return True

    async def close(self) -> None:
        """Close the connection."""
        self.writer.transport.abort()
        await asyncio.wait((asyncio.ensure_future(self.writer.wait_closed()),))


async def connect(server: Server, context: ssl.SSLContext) -> Client:
    """Raises one of ``REFUSED`` when the server does not want it."""
    reader, writer = await asyncio.open_connection(
        HOST, server.port, ssl=context, server_hostname="localhost"
    )
    client = Client(reader, writer)
    try:
        writer.write(f.PREFACE + f.settings({}))
        await client.works()  # with TLS 1.3 a client learns of a refusal only now
    except BaseException:
        await client.close()
        raise
    return client


async def serve(certificates: Certificates) -> Server:
    """On a free port."""
    return await serve_http2({ECHO: Echo}, HOST, 0, ssl=certificates.context)


def mounted(folder: Path, pki: Pki) -> tuple[Mounted, Certificates]:
    """A mounted Secret with a good pair, and what reads it."""
    files = Mounted(folder / "tls")
    files.write(*pki.pair(), pki.pem)
    return files, Certificates(cert_path=str(files.path))


# -- self-made


def test_a_self_made_certificate() -> None:
    """ECDSA P-256, good for the names asked for, signed by an authority, valid since an hour ago."""
    certificates = Certificates(names=["picker", "10.0.0.7", "fd00::7"], now=Clock())
    leaf = x509.load_pem_x509_certificate(certificates.material.chain)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value

    assert isinstance(leaf.public_key(), ec.EllipticCurvePublicKey)
    assert names.get_values_for_type(x509.DNSName) == ["picker"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "fd00::7"]
    assert (NOW - leaf.not_valid_before_utc) // dt.timedelta(minutes=1) == 60
    assert certificates.problem == ""
    leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(certificates.material.ca))


def test_every_process_has_its_own_authority() -> None:
    """Two pickers' authorities differ in name and key, so that both fit into one bundle."""
    first, second = (Certificates(), Certificates())
    names = {x509.load_pem_x509_certificate(each.material.ca).subject for each in (first, second)}

    assert len(names) == 2
    verifying(first.material.ca + second.material.ca)


async def test_it_is_renewed_in_time() -> None:
    """A month before it expires there is a new one, of the same authority."""
    clock = Clock()
    certificates = Certificates(now=clock)
    before, authority = certificates.material, certificates.material.ca
    seen = []
    for days in (59, 61):
        clock.now = NOW + days * DAY
        await certificates.check()
        seen.append((certificates.material != before, certificates.expires > NOW + 100 * DAY))

    assert seen == [(False, False), (True, True)]
    assert certificates.material.ca == authority


def test_no_key_is_shown() -> None:
    """The printed form of the material does not contain the key."""
    assert "PRIVATE" not in repr(self_made().material)
    load_pem_private_key(self_made().material.key, None)


def test_a_name_that_is_none() -> None:
    """A name that no certificate can have is refused with it."""
    with pytest.raises(CertificateError, match="bücher"):
        Certificates(names=["bücher.example"])


def test_own_names() -> None:
    """Service names get the forms of their namespace; pod addresses, host and loopback are in, each once."""
    names = own_names(
        "picker, other.example, 10.1.1.1",
        {"POD_NAMESPACE": "ai", "POD_IP": "10.0.0.7", "POD_IPS": "10.0.0.7,fd00::7"},
    )

    assert names[:6] == [
        *("picker", "picker.ai", "picker.ai.svc", "picker.ai.svc.cluster.local"),
        *("other.example", "10.1.1.1"),
    ]
    assert {os.uname().nodename, "localhost", "127.0.0.1", "::1", "10.0.0.7", "fd00::7"} <= set(names)
    assert len(names) == len(set(names))
    assert own_names("picker", {})[:2] == ["picker", os.uname().nodename]


# -- from files


async def test_a_swapped_secret_is_taken(tmp_path: Path) -> None:
    """New connections see the new certificate; one that is open goes on with the old."""
    pki = Pki()
    files, certificates = mounted(tmp_path, pki)
    server, first = await serve(certificates), certificates.material.chain
    old = await connect(server, verifying(pki.pem))
    files.write(*pki.pair(), pki.pem)
    await certificates.check()
    new = await connect(server, verifying(pki.pem))

    assert (old.shown, new.shown) == (first, certificates.material.chain)
    assert first != certificates.material.chain
    assert await old.works()
    assert (certificates.taken, certificates.refused, certificates.problem) == (1, 0, "")
    for client in (old, new):
        await client.close()
    await server.close()


async def test_files_replaced_one_by_one(tmp_path: Path) -> None:
    """Between two renames the pair does not fit: the old one stays; after the second the new one is in."""
    pki = Pki()
    folder = tmp_path / "plain"
    folder.mkdir()
    for name, content in zip(("tls.crt", "tls.key"), pki.pair(), strict=True):
        (folder / name).write_bytes(content)
    certificates = Certificates(cert_path=str(folder))
    first, (chain, key) = certificates.material, pki.pair()

    _rename(folder / "tls.crt", chain)
    await certificates.check()
    assert certificates.material == first
    assert "key values mismatch" in certificates.problem
    _rename(folder / "tls.key", key)
    await certificates.check()
    assert (certificates.material.chain, certificates.problem) == (chain, "")
    assert certificates.material.ca == b""


def _rename(path: Path, content: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.replace(path)


async def test_a_file_in_the_middle_of_being_written_waits(tmp_path: Path) -> None:
    """A chain that is still growing is not taken, though its beginning is a good certificate."""
    pki = Pki()
    files, certificates = mounted(tmp_path, pki)
    first, (chain, key) = certificates.material, pki.pair()
    files.write(chain, key, pki.pem)
    look = asyncio.ensure_future(certificates.check())
    await asyncio.sleep(0)
    while not look.done():
        with (files.path / "tls.crt").open("ab") as file:
            file.write(b"\n")
        await asyncio.sleep(0.02)
    assert certificates.material == first
    await certificates.check()
    assert certificates.material.chain.startswith(chain)


def _locked(pki: Pki) -> tuple[bytes, bytes]:
    chain, key = pki.pair()
    plain = load_pem_private_key(key, None)
    return chain, plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


BAD: dict[str, tuple[Callable[[Pki], tuple[bytes, bytes]], str]] = {
    "mismatched": (lambda pki: (pki.pair()[0], pki.pair()[1]), "key values mismatch"),
    "truncated": (lambda pki: (pki.pair()[0][:200], pki.pair()[1]), "cannot be used"),
    "garbage": (lambda _: (b"\x00garbage", b"\xff"), "cannot be used"),
    "empty": (lambda _: (b"", b""), "tls.crt: empty"),
    "huge": (lambda _: (bytes(1 << 21), b""), "larger than 1 MiB"),
    "encrypted": (_locked, "the key is encrypted"),
    "expired": (lambda pki: pki.pair(expires=NOW - DAY), "expired"),
}


@pytest.mark.parametrize("bad", BAD)
async def test_bad_files_keep_the_old_pair(
    tmp_path: Path, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Unusable files are reported once, with the reason, until good files or the old ones are found."""
    pki = Pki()
    files, certificates = mounted(tmp_path, pki)
    first = certificates.material
    make, why = BAD[bad]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            files.write(*make(pki), pki.pem)
            await certificates.check()
            await certificates.check()
    assert why in certificates.problem
    assert certificates.material == first
    assert certificates.refused == len(caplog.records) == 1
    assert "PRIVATE" not in caplog.text

    files.write(first.chain, first.key, first.ca)
    await certificates.check()
    assert (certificates.problem, certificates.taken) == ("", 0)
    files.write(*pki.pair(), pki.pem)
    await certificates.check()
    assert (certificates.problem, certificates.taken) == ("", 1)


async def test_vanished_files_keep_the_old_pair(tmp_path: Path) -> None:
    """A folder that vanished is reported by its path; the served certificate stays."""
    files, certificates = mounted(tmp_path, Pki())
    files.path.rename(tmp_path / "gone")
    await certificates.check()

    assert certificates.problem == f"{files.path}/tls.crt: No such file or directory"


@pytest.mark.parametrize("bad", [name for name in BAD if name != "expired"])
def test_bad_files_at_the_start_are_an_error(tmp_path: Path, bad: str) -> None:
    """Without anything to keep, they are refused."""
    files = Mounted(tmp_path / "tls")
    make, why = BAD[bad]
    files.write(*make(Pki()))
    with pytest.raises(CertificateError, match=why):
        Certificates(cert_path=str(files.path))


async def test_an_expired_certificate_is_better_than_none(tmp_path: Path) -> None:
    """At the start, and when the one before has expired too, it is served; but it is a problem."""
    files, pki = Mounted(tmp_path / "tls"), Pki()
    files.write(*pki.pair(expires=NOW - 2 * DAY), pki.pem)
    certificates = Certificates(cert_path=str(files.path))
    assert "expired" in certificates.problem
    files.write(*pki.pair(expires=NOW - DAY), pki.pem)
    await certificates.check()

    assert certificates.taken == 1
    assert "expired" in certificates.problem


async def test_the_watch_takes_changes_by_itself(tmp_path: Path) -> None:
    """``run`` looks for ever, until it is cancelled."""
    pki = Pki()
    files, certificates = mounted(tmp_path, pki)
    watch = asyncio.ensure_future(certificates.run())
    files.write(*pki.pair(), pki.pem)
    async with asyncio.timeout(20):
        while not certificates.taken:
            await asyncio.sleep(0.02)
    watch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watch


# -- clients


async def test_mutual_tls(tmp_path: Path) -> None:
    """With an authority for clients only its own get in; when it is replaced, only those of the new one."""
    old, new = Pki("old"), Pki("new")
    bundle = tmp_path / "clients.pem"
    bundle.write_bytes(old.pem)
    certificates = Certificates(client_ca_path=str(bundle))
    server = await serve(certificates)
    contexts = [verifying(certificates.material.ca) for _ in range(3)]
    for context, pki in zip(contexts[1:], (old, new), strict=True):
        _show(context, pki, tmp_path)

    first = [await _admitted(server, context) for context in contexts]
    lasting = await connect(server, contexts[1])
    _rename(bundle, new.pem)
    await certificates.check()
    second = [await _admitted(server, context) for context in contexts]

    assert (first, second) == ([False, True, False], [False, False, True])
    assert await lasting.works()
    await lasting.close()
    await server.close()


def _show(context: ssl.SSLContext, pki: Pki, folder: Path) -> None:
    file = folder / "client.pem"
    file.write_bytes(b"".join(pki.pair()))
    context.load_cert_chain(file)


async def _admitted(server: Server, context: ssl.SSLContext) -> bool:
    try:
        client = await connect(server, context)
    except REFUSED:
        return False
    await client.close()
    return True


def test_client_authorities_that_are_none(tmp_path: Path) -> None:
    """A file without a certificate is an error that names it; a folder means its ``ca.crt``."""
    (tmp_path / "ca.crt").write_text("not PEM")
    for path in (tmp_path, tmp_path / "ca.crt"):
        with pytest.raises(CertificateError, match="no PEM certificates of client authorities"):
            Certificates(client_ca_path=str(path))
    (tmp_path / "ca.crt").write_bytes(Pki().pem)
    assert Certificates(client_ca_path=str(tmp_path)).material.clients


# -- what is agreed


async def test_clients_without_h2_are_refused() -> None:
    """A client that offers another protocol alone is disconnected without a byte of an answer."""
    server = await serve(self_made())
    assert await _told(server, "http/1.1") == b""
    await server.close()


async def test_clients_without_alpn_must_speak_h2() -> None:
    """A client without ALPN, as Envoy Gateway's health checks are, is served; one that then speaks HTTP/1.1
    gets no answer to it, but HTTP/2's own farewell."""
    server = await serve(self_made())
    client = await connect(server, verifying(self_made().material.ca, NO_ALPN))
    assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() is None
    assert await client.works()
    await client.close()
    assert b"HTTP/1.1" not in await _told(server, NO_ALPN)
    await server.close()


async def _told(server: Server, alpn: str) -> bytes:
    """Return all bytes that a client of HTTP/1.1 receives."""
    context = verifying(self_made().material.ca, alpn)
    reader, writer = await asyncio.open_connection(
        HOST, server.port, ssl=context, server_hostname="localhost"
    )
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    found = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await asyncio.wait((asyncio.ensure_future(writer.wait_closed()),))
    return found


@pytest.mark.parametrize("minimum", ["1.2", "1.3"])
async def test_the_oldest_version(minimum: str) -> None:
    """TLS 1.2 is taken unless 1.3 is asked for, with ciphers that HTTP/2 allows; nothing older ever is."""
    certificates = Certificates(minimum=minimum)
    server = await serve(certificates)
    context = verifying(certificates.material.ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert await _admitted(server, context) == (minimum == "1.2")
    context.set_ciphers("AES128-SHA")
    assert not await _admitted(server, context)
    await server.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_does_not_outlive_a_change(tmp_path: Path, version: ssl.TLSVersion) -> None:
    """A client that is no longer trusted cannot come back by resuming a session of before."""
    old, new = Pki("old"), Pki("new")
    bundle = tmp_path / "clients.pem"
    bundle.write_bytes(old.pem)
    certificates = Certificates(client_ca_path=str(bundle))
    server = await serve(certificates)
    context = verifying(certificates.material.ca)
    context.minimum_version = context.maximum_version = version
    _show(context, old, tmp_path)

    session = await asyncio.to_thread(_session, server.port, context, None)
    assert not session.has_ticket
    _rename(bundle, new.pem)
    await certificates.check()
    with pytest.raises(REFUSED):
        await asyncio.to_thread(_session, server.port, context, session)
    await server.close()


def _session(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSession:
    """The session of a connection that was admitted."""
    with (
        socket.create_connection((HOST, port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as tls,
    ):
        if not tls.recv(9):
            raise ConnectionResetError
        assert tls.session is not None
        return tls.session
