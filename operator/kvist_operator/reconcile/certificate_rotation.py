"""The certificate of a pool's pickers, for gateways that verify them and for mutual TLS between replicas.
Pure but for randomness.

**No authority's key is kept.** Each certificate has an authority of its own, whose key is dropped after
signing: no key in the cluster could sign another certificate that pickers trust, and so give access to their
index, which consists of prompts. The price is a new authority at each renewal, which all verifiers have to
know before the certificate is presented. A renewal therefore has two steps, with the state in between kept in
the Secret:

1. *announce*, at two thirds of the life: the next certificate and its key (``next.crt``, ``next.key``) are
made, and ``ca.crt`` has both authorities. The new certificate is not presented yet.
2. *promote*, a day later, when every kubelet has updated ``ca.crt`` in every pod: ``next`` becomes ``tls``.
``ca.crt`` keeps the old authority until it expires, so a pod that still presents the old certificate is
accepted.

At any moment two pods whose files are at most a day apart verify each other. A certificate that cannot be
used (absent, expired, damaged, of another name) is replaced at once; ``ca.crt`` still keeps what is valid in
it.
"""

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from kvist_kube.certificates import BACKDATED, CLIENT, SERVER, CertificateAuthority
from kvist_operator.manifests.object_names import ObjectNames

LIFE: Final = dt.timedelta(days=365)
OVERLAP: Final = dt.timedelta(days=1)
"""Time from announcing to promoting. Kubelets update files within two minutes; a node may be cut off
longer."""
MOST_AUTHORITIES: Final = 4
"""Authorities in ``ca.crt``; more than two only if the Secret is damaged repeatedly."""

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITIES: Final = "ca.crt"
NEXT: Final = "next.crt"
NEXT_KEY: Final = "next.key"

Data = Mapping[str, bytes]
"""Decoded content of a Secret."""


@dataclass(frozen=True, slots=True)
class CertificateBundle:
    """Content to be written."""

    secret: Data
    """Data of the Secret (type ``kubernetes.io/tls``), before base64."""

    @property
    def authorities(self) -> bytes:
        """``ca.crt`` of the ConfigMap, for verifying pickers."""
        return self.secret[AUTHORITIES]

    @property
    def expires(self) -> dt.datetime:
        """Return when the certificate that is presented expires."""
        return x509.load_pem_x509_certificate(self.secret[CERTIFICATE]).not_valid_after_utc

    def __repr__(self) -> str:
        return f"<CertificateBundle of {', '.join(sorted(self.secret))}>"


class _Step(Enum):
    FRESH = auto()
    ANNOUNCE = auto()
    PROMOTE = auto()


@dataclass(frozen=True, slots=True)
class _Pair:
    """A certificate with its key."""

    leaf: x509.Certificate
    pem: bytes
    key: bytes

    @property
    def made(self) -> dt.datetime:
        return self.leaf.not_valid_before_utc + BACKDATED

    def spent(self, now: dt.datetime) -> bool:
        """Return whether two thirds of the lifetime have passed."""
        return now >= self.made + (self.leaf.not_valid_after_utc - self.made) * 2 / 3


def names_of(names: ObjectNames) -> tuple[str, ...]:
    """Return the DNS names of the certificate: the Service for gateways, and the one for other replicas.

    Replicas verify the name by which they looked each other up (``--replicas``), not the pod's address.
    """
    return (names.host(names.picker), names.host(names.peers))


def due(secret: Data | None, names: Sequence[str], now: dt.datetime) -> str:
    """Return why ``issued`` would change the Secret; empty when it would not. ``now`` is timezone-aware, in
    UTC."""
    found = _due(secret, names, now)
    return found[1] if found else ""


def issued(names: Sequence[str], now: dt.datetime, before: Data | None = None) -> CertificateBundle:
    """Return the Secret's next content: after the step that is due, else unchanged."""
    found = _due(before, names, now)
    if found is None:
        return CertificateBundle(dict(before or {}))
    old = before or {}
    alive = [each for each in _loaded(old.get(AUTHORITIES, b"")) if now < each.not_valid_after_utc]
    alive.sort(key=lambda each: each.not_valid_before_utc, reverse=True)
    kept = [each.public_bytes(Encoding.PEM) for each in alive]
    if found[0] is _Step.PROMOTE:
        return CertificateBundle({CERTIFICATE: old[NEXT], KEY: old[NEXT_KEY], AUTHORITIES: b"".join(kept)})
    # a new authority, whose key is dropped after signing
    authority = CertificateAuthority("kvist pickers", now, LIFE)
    leaf, key = authority.sign(names, now, LIFE, (SERVER, CLIENT))
    known = b"".join([authority.pem, *kept[: MOST_AUTHORITIES - 1]])
    if found[0] is _Step.FRESH:
        return CertificateBundle({CERTIFICATE: leaf, KEY: key, AUTHORITIES: known})
    current = {CERTIFICATE: old[CERTIFICATE], KEY: old[KEY]}
    return CertificateBundle({**current, NEXT: leaf, NEXT_KEY: key, AUTHORITIES: known})


def _due(secret: Data | None, names: Sequence[str], now: dt.datetime) -> tuple[_Step, str] | None:
    if not secret:
        return _Step.FRESH, "there is no certificate yet"
    current = _pair(secret, CERTIFICATE, KEY, names, now)
    coming = _pair(secret, NEXT, NEXT_KEY, names, now) if NEXT in secret else ""
    ready = isinstance(coming, _Pair)
    if isinstance(current, str):
        return (_Step.PROMOTE if ready else _Step.FRESH), current
    if isinstance(coming, _Pair):
        old = now >= coming.made + OVERLAP
        return (_Step.PROMOTE, f"{NEXT} has been announced for {OVERLAP.days} day") if old else None
    if coming:
        return _Step.ANNOUNCE, coming
    spent = current.spent(now)
    return (_Step.ANNOUNCE, "two thirds of the certificate's lifetime have passed") if spent else None


def _loaded(bundle: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return []


def _pair(secret: Data, leaf: str, key: str, names: Sequence[str], now: dt.datetime) -> _Pair | str:
    """Return a pair that can be used, or the reason why it cannot."""
    try:
        pem, secret_key = secret[leaf], secret[key]
        found = _Pair(x509.load_pem_x509_certificate(pem), pem, secret_key)
        fits = _same_key(found)
    except KeyError as error:
        return f"{error.args[0]} is missing"
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        return f"{leaf} or {key} cannot be read: {error}"
    if not fits:
        return f"{key} is not the key of {leaf}"
    return _unfit(found.leaf, leaf, _loaded(secret.get(AUTHORITIES, b"")), names, now) or found


def _same_key(pair: _Pair) -> bool:
    kind = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    own = load_pem_private_key(pair.key, None).public_key()
    return own.public_bytes(*kind) == pair.leaf.public_key().public_bytes(*kind)


def _unfit(
    leaf: x509.Certificate,
    name: str,
    authorities: Sequence[x509.Certificate],
    names: Sequence[str],
    now: dt.datetime,
) -> str:
    """Return why a certificate cannot be used; empty when it can."""
    if now >= leaf.not_valid_after_utc:
        return f"{name} expired at {leaf.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"
    if now < leaf.not_valid_before_utc:
        return f"{name} is not valid before {leaf.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}"
    lacking = sorted(set(names) - set(_names_in(leaf)))
    if lacking:
        return f"{name} is not valid for {', '.join(lacking)}"
    if not any(_signed_by(leaf, authority) for authority in authorities):
        return f"{AUTHORITIES} has no authority that signed {name}"
    return ""


def _names_in(leaf: x509.Certificate) -> list[str]:
    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return []
    return found.value.get_values_for_type(x509.DNSName)


def _signed_by(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
