"""Certificates for tests: clients that verify, folders as Kubernetes mounts them, other authorities."""

import datetime as dt
import functools
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvist_epp.http2.tls import Certificates

HOST = "127.0.0.1"
NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)
NO_ALPN = ""
"""In place of protocols: none is offered."""


@functools.cache
def self_made() -> Certificates:
    """One for many tests: they only look."""
    return Certificates(names=["localhost", HOST])


def client_context(server: Certificates | None, *alpn: str) -> ssl.SSLContext | None:
    """Return the TLS context of a client that verifies the server and speaks h2 by default; None for None."""
    return verifying(server.material.ca, *alpn) if server is not None else None


def verifying(ca: bytes, *alpn: str) -> ssl.SSLContext:
    """A client that trusts one authority."""
    context = ssl.create_default_context(cadata=ca.decode())
    if alpn != (NO_ALPN,):
        context.set_alpn_protocols(alpn or ("h2",))
    return context


CA_KEY_USAGE = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


class Pki:
    """An authority that is not the picker's: makes pairs for servers and clients."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.pem = self._sign(self._name, self._key.public_key(), NOW + DAY, ca=True)

    def pair(self, *names: str, expires: dt.datetime = NOW + DAY) -> tuple[bytes, bytes]:
        """Certificate and key, PEM, for a server of these DNS names, or for a client."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
        pem = self._sign(subject, key.public_key(), expires, names=names or ("localhost",))
        return pem, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        expires: dt.datetime,
        *,
        ca: bool = False,
        names: tuple[str, ...] = (),
    ) -> bytes:
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(NOW, expires) - DAY)
            .not_valid_after(expires)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
        )
        if ca:  # Python 3.13 verifies strictly: RFC 5280 requires key usage and both identifiers
            builder = builder.add_extension(CA_KEY_USAGE, True)
        else:
            identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
            builder = builder.add_extension(identifier, False)
        if names:
            alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(alternatives, False).add_extension(purposes, False)
        return builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)


class Mounted:
    """A folder as the kubelet mounts a Secret: files are links into ``..data``, swapped as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._version = 0
        path.mkdir(parents=True)

    def write(self, chain: bytes, key: bytes, ca: bytes = b"") -> None:
        """Swap in a new version of all files."""
        self._version += 1
        version = self.path / f"..{self._version}"
        version.mkdir()
        files = {"tls.crt": chain, "tls.key": key} | ({"ca.crt": ca} if ca else {})
        for name, content in files.items():
            (version / name).write_bytes(content)
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(Path("..data") / name)
        fresh = self.path / "..fresh"
        fresh.symlink_to(version.name)
        fresh.replace(self.path / "..data")
