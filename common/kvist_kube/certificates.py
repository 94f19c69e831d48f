"""X.509 certificates: an authority that lives in memory, and the certificates it signs. ECDSA P-256. Pure.

The picker makes its own certificate with it, and the operator one for all pickers of a pool.
"""

import datetime as dt
import ipaddress
import secrets
from collections.abc import Sequence
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BACKDATED: Final = dt.timedelta(hours=1)
"""Certificates are valid from this long ago, for peers whose clocks are slow."""
LONGEST_COMMON_NAME: Final = 64
"""Characters: the upper bound of RFC 5280. Verifiers read the alternative names."""
SERVER: Final = ExtendedKeyUsageOID.SERVER_AUTH
CLIENT: Final = ExtendedKeyUsageOID.CLIENT_AUTH


class CertificateAuthority:
    """Signs certificates. The authority's key never leaves this object."""

    def __init__(self, name: str, now: dt.datetime, life: dt.timedelta) -> None:
        """Create an authority; ``now`` is timezone-aware, in UTC."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        # The subject is unique, so that a bundle of several authorities is not ambiguous.
        unique = f"{name} {secrets.token_hex(8)}"
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, unique)])
        self.pem = self._self_signed(now, life).public_bytes(Encoding.PEM)
        """The authority's certificate in PEM, for verifying the certificates it signs."""

    def __repr__(self) -> str:
        return f"<CertificateAuthority {self._name.rfc4514_string()}>"

    def sign(
        self,
        names: Sequence[str],
        now: dt.datetime,
        life: dt.timedelta,
        usages: Sequence[x509.ObjectIdentifier] = (SERVER,),
    ) -> tuple[bytes, bytes]:
        """Return a new certificate and its key, both in PEM, for DNS names and IP addresses.

        Raises ValueError when a name is neither.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:LONGEST_COMMON_NAME])])
        builder = _builder(subject, self._name, key.public_key(), now, life)
        certificate = (
            builder.add_extension(
                x509.SubjectAlternativeName([_alternative_name(name) for name in names]), False
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .add_extension(_usage(signs_certificates=False), True)
            .add_extension(x509.ExtendedKeyUsage(usages), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False)
            .sign(self._key, SHA256())
        )
        written = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return certificate.public_bytes(Encoding.PEM), written

    def _self_signed(self, now: dt.datetime, life: dt.timedelta) -> x509.Certificate:
        builder = _builder(self._name, self._name, self._key.public_key(), now, life)
        return (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
            .add_extension(_usage(signs_certificates=True), True)
            .sign(self._key, SHA256())
        )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: dt.datetime,
    life: dt.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
