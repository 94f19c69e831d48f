"""The picker's certificate, key and trusted client authorities, renewed while connections stay open.

There are two sources: self-issued (without configuration; the key is in memory only), or files that another
process writes and replaces, such as a mounted Secret. A connection uses the material that is current when it
begins until it ends, so a change closes no connection.
"""

import asyncio
import datetime as dt
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cryptography import x509

from kvist_epp.errors import CertificateError
from kvist_kube.certificates import CertificateAuthority

logger = logging.getLogger(__name__)

ALPN: Final = "h2"
VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Ciphers of TLS 1.2: all others are on HTTP/2's block list (RFC 9113 appendix A). TLS 1.3 has its own."""
MAX_FILE_BYTES: Final = 1 << 20
CHECK_SECONDS: Final = 1.0
"""Interval of the checks of the files: three small reads, which notice symlink swaps and renames where
inotify does not."""
SETTLE_SECONDS: Final = 0.1
"""New files count when two readings this far apart are equal, so that a writer can finish."""

AUTHORITY_LIFETIME: Final = dt.timedelta(days=3650)
"""Longer than any process: the authority ends with the process."""
LEAF_LIFETIME: Final = dt.timedelta(days=90)
RENEW_BEFORE: Final = dt.timedelta(days=30)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Certificates and key of a TLS server, all PEM."""

    chain: bytes
    """The server's certificate and the intermediate ones up to its authority."""
    key: bytes = field(repr=False)
    ca: bytes = b""
    """Authority that verifies the server; empty when ``cert_path`` has no ``ca.crt``."""
    clients: bytes = b""
    """Authorities whose clients are accepted; if empty, every client is, without a certificate."""


class Certificates:
    """TLS of one or more ports: the current material as an ``SSLContext``, replaced when its source changes.

    Unusable new material is ignored; ``problem`` has the reason until usable material is found.
    """

    def __init__(
        self,
        *,
        cert_path: str = "",
        client_ca_path: str = "",
        names: Sequence[str] = ("localhost",),
        minimum: str = "1.2",
        now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        """Without ``cert_path`` the certificate is self-issued, for ``names``. Raises CertificateError.

        ``cert_path`` is a folder with ``tls.crt``, ``tls.key`` and perhaps ``ca.crt``; ``client_ca_path`` a
        PEM file, or a folder with ``ca.crt``: clients must then have a certificate of one of these
        authorities. ``minimum`` is the oldest TLS version, "1.2" or "1.3".
        """
        self._minimum = VERSIONS[minimum]
        self._now = now
        self._source: _Folder | _SelfIssued = (
            _Folder(Path(cert_path)) if cert_path else _SelfIssued(names, now)
        )
        self._clients = Path(client_ca_path) if client_ca_path else None
        self._refused: TlsMaterial | None = None
        self._refusal = ""
        self.taken = 0
        """Number of times that new material was put to use, without the first."""
        self.refused = 0
        """Number of times that new material was found unusable."""
        self.material = self._read()
        self.context = _CurrentContext(self._make_context(self.material))
        """Context of servers, whose handshakes use the material current at their time. ALPN offers only
        ``h2``, but OpenSSL completes the handshake of a client that does not offer it; the server has to
        check ``selected_alpn_protocol()``, as ``TlsSession`` does."""
        self.expires = _expiry(self.material.chain)
        """Expiry of the certificate in use; aware, UTC."""

    def __repr__(self) -> str:
        return f"<Certificates {self._source!r} until {self.expires:%Y-%m-%d}>"

    @property
    def problem(self) -> str:
        """Return why the source's content is not used, or that the certificate expired; else empty."""
        if self._refusal:
            return self._refusal
        return f"the certificate expired at {self.expires}" if self.expires <= self._now() else ""

    def counters(self) -> Mapping[str, float]:
        """Return metrics: the expiry in Unix seconds, and the changes that were taken and refused."""
        return {"expires": self.expires.timestamp(), "taken": self.taken, "refused": self.refused}

    async def run(self) -> None:
        """Check the source for ever."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Check the source once, and use its material if it is new, valid and complete."""
        try:
            found = await asyncio.to_thread(self._read)
            if found == self.material:
                self._refused, self._refusal = None, ""
            elif found != self._refused and await self._is_stable(found):
                self._use(found)
        except CertificateError as error:
            self._refuse(None, str(error))

    def _read(self) -> TlsMaterial:
        chain, key, ca = self._source.read()
        bundle = self._clients
        if bundle is not None and bundle.is_dir():
            bundle /= "ca.crt"
        return TlsMaterial(chain, key, ca, _content(bundle) if bundle else b"")

    async def _is_stable(self, found: TlsMaterial) -> bool:
        await asyncio.sleep(SETTLE_SECONDS)
        return await asyncio.to_thread(self._read) == found

    def _use(self, found: TlsMaterial) -> None:
        try:
            context, expires = self._make_context(found), _expiry(found.chain)
        except CertificateError as error:
            self._refuse(found, str(error))
            return
        if expires <= self._now() < self.expires:
            self._refuse(found, f"{self._source!r}: the new certificate expired at {expires}")
            return
        self.context.current = context
        self.material, self.expires = found, expires
        self._refused, self._refusal = None, ""
        self.taken += 1
        logger.info("a new certificate is in use: %r, valid until %s", self._source, expires)

    def _refuse(self, found: TlsMaterial | None, reason: str) -> None:
        self._refused = found
        if reason == self._refusal:
            return
        self._refusal = reason
        self.refused += 1
        logger.warning(
            "the new certificate is invalid; the old one stays in use, which is valid until %s: %s",
            self.expires,
            reason,
        )

    def _make_context(self, material: TlsMaterial) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = self._minimum
        context.set_ciphers(CIPHERS)
        context.set_alpn_protocols([ALPN])
        # Every cipher is a good one, so the client's order counts: Envoy names AES-128-GCM first, which takes
        # up to an eighth less CPU than AES-256-GCM, which OpenSSL prefers.
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
        # gRPC connections last, so that resumption gains nothing, and a client that is no longer trusted
        # could resume. Renegotiation is forbidden by HTTP/2 (RFC 9113 section 9.2.1).
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        context.num_tickets = 0
        _load(context, material, f"{self._source!r}")
        if material.clients:
            _require_clients(context, material.clients, f"{self._clients}")
        return context


class _CurrentContext(ssl.SSLContext):
    """Passes each new connection to the current context.

    Calling ``load_cert_chain`` again on one context would suffice for certificates; but a context's trusted
    authorities can only grow, and its session cache would accept clients that are no longer trusted.
    """

    current: ssl.SSLContext

    def __new__(cls, current: ssl.SSLContext) -> "_CurrentContext":  # noqa: ARG004 - SSLContext's takes a protocol
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, current: ssl.SSLContext) -> None:
        self.current = current

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self.current.wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        return self.current.wrap_socket(*args, **kwargs)


class _SelfIssued:
    """A certificate of our own authority, renewed before it expires.

    An authority and a certificate signed by it, not one self-signed certificate: gateways that verify get the
    authority once, and it stays the same while certificates are renewed under it.
    """

    def __init__(self, names: Sequence[str], now: Callable[[], dt.datetime]) -> None:
        self._names = names
        self._now = now
        self._authority = CertificateAuthority("kvist-epp", now(), AUTHORITY_LIFETIME)
        self._pair = self._issue()

    def __repr__(self) -> str:
        return "self-issued certificate"

    def read(self) -> tuple[bytes, bytes, bytes]:
        if self._now() >= self._due:
            self._pair = self._issue()
        return (*self._pair, self._authority.pem)

    def _issue(self) -> tuple[bytes, bytes]:
        try:
            pair = self._authority.sign(self._names, self._now(), LEAF_LIFETIME)
        except ValueError as error:
            raise CertificateError(f"no certificate for {', '.join(self._names)}: {error}") from error
        self._due = _expiry(pair[0]) - RENEW_BEFORE
        return pair


class _Folder:
    """Files as a Secret of type ``kubernetes.io/tls`` is mounted; cert-manager adds ``ca.crt``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return str(self._path)

    def read(self) -> tuple[bytes, bytes, bytes]:
        folder = self._path
        ca = _content(folder / "ca.crt", absent=b"")
        return _content(folder / "tls.crt"), _content(folder / "tls.key"), ca


def own_names(more: str, environment: Mapping[str, str]) -> list[str]:
    """Return the names for a self-issued certificate: this host's names and addresses, and ``more``.

    ``more`` is a comma list of DNS names and addresses. For a name without a dot, a Service's, the forms with
    the namespace are added if ``POD_NAMESPACE`` is set. ``POD_IP`` and ``POD_IPS`` (comma list) count too.
    """
    given = [name.strip() for name in more.split(",")]
    space = environment.get("POD_NAMESPACE", "")
    services = [form for name in given if name for form in _service_forms(name, space)]
    pod = [*environment.get("POD_IPS", "").split(","), environment.get("POD_IP", "")]
    names = [*services, socket.gethostname(), "localhost", "127.0.0.1", "::1", *pod, *_own_addresses()]
    return list(dict.fromkeys(name for name in names if name))


def _service_forms(name: str, space: str) -> list[str]:
    if not space or "." in name or ":" in name:
        return [name]
    scoped = f"{name}.{space}"
    return [name, scoped, f"{scoped}.svc", f"{scoped}.svc.cluster.local"]


def _own_addresses() -> Iterator[str]:
    """Yield the address this host would send from, IPv4 and IPv6; no packet is sent for it."""
    for family, destination in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((destination, 9))
            yield probe.getsockname()[0]


def _content(path: Path, absent: bytes | None = None) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        if absent is not None and isinstance(error, FileNotFoundError):
            return absent
        raise CertificateError(f"{path}: {error.strerror or type(error).__name__}") from error
    if not 0 < len(content) <= MAX_FILE_BYTES:
        raise CertificateError(f"{path}: {'empty' if not content else 'larger than 1 MiB'}")
    return content


def _load(context: ssl.SSLContext, material: TlsMaterial, where: str) -> None:
    def locked() -> str:
        raise CertificateError(f"{where}: the key is encrypted; give one without a password")

    try:
        with _in_memory(material.key + b"\n" + material.chain) as path:
            context.load_cert_chain(path, password=locked)
    except ssl.SSLError as error:
        reason = (error.reason or "no PEM").replace("_", " ").lower()
        raise CertificateError(f"{where}: certificate and key cannot be used: {reason}") from error


def _require_clients(context: ssl.SSLContext, bundle: bytes, where: str) -> None:
    try:
        context.load_verify_locations(cadata=bundle.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise CertificateError(f"{where}: no PEM certificates of client authorities") from error
    context.verify_mode = ssl.CERT_REQUIRED


def _expiry(chain: bytes) -> dt.datetime:
    try:
        return x509.load_pem_x509_certificate(chain).not_valid_after_utc
    except ValueError as error:
        raise CertificateError(f"the certificate cannot be read: {error}") from error


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield the path of an anonymous memory file: Python's ssl reads keys only from files.

    The bytes are on no disk, and it also works where no directory may be written.
    """
    handle = os.memfd_create("kvist-key", os.MFD_CLOEXEC)
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)
