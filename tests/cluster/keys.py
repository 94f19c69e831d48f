"""Keys, certificates and tokens of a test cluster, made anew for each."""

import base64
import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ISSUER = "https://kubernetes.default.svc"
LEEWAY_SECONDS = 60
"""A token is taken for so long after it has expired; and for ten seconds more by the server's cache."""
LIFE = timedelta(days=2)
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Keys:
    """Files of one folder, and what signs."""

    folder: Path
    authority_key: ec.EllipticCurvePrivateKey
    authority: x509.Certificate
    accounts_key: ec.EllipticCurvePrivateKey
    """Signs service accounts' tokens."""

    @property
    def ca(self) -> Path:
        """The authority's certificate."""
        return self.folder / "ca.crt"

    @property
    def accounts(self) -> Path:
        """The key of the service accounts."""
        return self.folder / "accounts.key"

    def issue(self, name: str, *, names: tuple[str, ...] = (), groups: tuple[str, ...] = ()) -> Path:
        """``<name>.crt`` and ``<name>.key``, for a server at ``names`` and a user in ``groups``; the path
        without its ending."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        subject += [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = _builder(x509.Name(subject), self.authority.subject, key.public_key())
        builder = builder.add_extension(usage, critical=False)
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_name(n) for n in names]), critical=False
            )
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority_key.public_key())
        builder = builder.add_extension(authority, critical=False)
        certificate = builder.sign(self.authority_key, hashes.SHA256())
        path = self.folder / name
        path.with_suffix(".crt").write_bytes(certificate.public_bytes(_PEM))
        path.with_suffix(".key").write_bytes(_private(key))
        return path

    def token(self, namespace: str, account: str, uid: str, seconds: float) -> str:
        """A service account's token as the API server itself would issue it, but for any time: it issues none
        for less than ten minutes."""
        expires = round(time.time() + seconds)
        claims = {
            "iss": ISSUER,
            "aud": [ISSUER],
            "sub": f"system:serviceaccount:{namespace}:{account}",
            "iat": expires - 3600,
            "nbf": expires - 3600,
            "exp": expires,
            "kubernetes.io": {"namespace": namespace, "serviceaccount": {"name": account, "uid": uid}},
        }
        signed = f"{_part({'alg': 'ES256', 'typ': 'JWT'})}.{_part(claims)}"
        signature = self.accounts_key.sign(signed.encode(), ec.ECDSA(hashes.SHA256()))
        r, s = decode_dss_signature(signature)
        return f"{signed}.{_base64(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


def make(folder: Path) -> Keys:
    """New keys in this folder."""
    key, accounts = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvist test cluster")])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(name, name, key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    authority = builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())
    keys = Keys(folder, key, authority, accounts)
    keys.ca.write_bytes(authority.public_bytes(_PEM))
    (folder / "ca.key").write_bytes(_private(key))
    keys.accounts.write_bytes(_private(accounts))
    return keys


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + LIFE)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        _PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _part(claims: dict[str, Any]) -> str:
    return _base64(json.dumps(claims, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
