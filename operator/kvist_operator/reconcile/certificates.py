"""The certificate of a pool's pickers: for gateways that verify them, and for each other (mutual TLS). Pure
but for randomness.

**No authority's key is kept.** Each certificate has an authority of its own, which signs it and is forgotten:
there is no key in the cluster by which anybody could make another certificate that pickers trust, and so read
their index, which is prompts. The price is a new authority at each renewal, which everybody has to know
before the certificate is shown. So a renewal has two steps, and what waits in between waits in the Secret:

1. *announce*, at two thirds of the life: the next certificate and its key (``next.crt``, ``next.key``) are
   made, and ``ca.crt`` has both authorities. Nobody shows the new certificate yet.
2. *promote*, a day later, when every kubelet has brought the new ``ca.crt`` to every pod: ``next`` becomes
   ``tls``. ``ca.crt`` keeps the old authority until that expires, so a pod that still shows the old
   certificate is let in.

At any moment two pods whose files are not more than a day apart verify each other. What cannot be used at all
(absent, expired, damaged, another name) is replaced at once; ``ca.crt`` still keeps what is valid in it.
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
from kvist_operator.manifests.names import Names

LIFE: Final = dt.timedelta(days=365)
OVERLAP: Final = dt.timedelta(days=1)
"""From announcing to promoting. Kubelets bring new files within two minutes; a node may be cut off longer."""
MOST_AUTHORITIES: Final = 4
"""In ``ca.crt``; beyond two only where somebody keeps damaging the Secret."""

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITIES: Final = "ca.crt"
NEXT: Final = "next.crt"
NEXT_KEY: Final = "next.key"

Data = Mapping[str, bytes]
"""Content of a Secret, decoded."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is to be written."""

    secret: Data
    """Data of the Secret (type ``kubernetes.io/tls``), not yet in base64."""

    @property
    def authorities(self) -> bytes:
        """``ca.crt`` of the ConfigMap: for those who verify pickers."""
        return self.secret[AUTHORITIES]

    def __repr__(self) -> str:
        return f"<Bundle of {', '.join(sorted(self.secret))}>"


class _Step(Enum):
    FRESH = auto()
    ANNOUNCE = auto()
    PROMOTE = auto()


@dataclass(frozen=True, slots=True)
class _Pair:
    """A certificate with its key, both in PEM too."""

    leaf: x509.Certificate
    pem: bytes
    key: bytes

    @property
    def made(self) -> dt.datetime:
        return self.leaf.not_valid_before_utc + BACKDATED

    def spent(self, now: dt.datetime) -> bool:
        """Whether two thirds of its life are over."""
        return now >= self.made + (self.leaf.not_valid_after_utc - self.made) * 2 / 3


def names_of(names: Names) -> tuple[str, ...]:
    """What the certificate is good for: the Service that gateways ask, and the one where peers meet.

    Peers check the name by which they looked each other up (``--peers``), not the pod's address.
    """
    return (names.host(names.picker), names.host(names.peers))


def due(secret: Data | None, names: Sequence[str], now: dt.datetime) -> str:
    """Why ``issued`` has something to do; empty when all is well. ``now`` is aware, UTC."""
    found = _due(secret, names, now)
    return found[1] if found else ""


def issued(names: Sequence[str], now: dt.datetime, before: Data | None = None) -> Bundle:
    """The Secret's next content: one step further where one is due, else as it is."""
    found = _due(before, names, now)
    if found is None:
        return Bundle(dict(before or {}))
    kept = _authorities((before or {}).get(AUTHORITIES, b""), now)
    match found[0]:
        case _Step.FRESH:
            return _fresh(names, now, kept)
        case _Step.ANNOUNCE:
            return _announced(names, now, before or {}, kept)
        case _Step.PROMOTE:
            return _promoted(before or {}, kept)


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
    return (_Step.ANNOUNCE, "two thirds of the certificate's life are over") if spent else None


def _fresh(names: Sequence[str], now: dt.datetime, kept: Sequence[bytes]) -> Bundle:
    authority, leaf, key = _made(names, now)
    return Bundle({CERTIFICATE: leaf, KEY: key, AUTHORITIES: _joined(authority, kept)})


def _announced(names: Sequence[str], now: dt.datetime, before: Data, kept: Sequence[bytes]) -> Bundle:
    authority, leaf, key = _made(names, now)
    joined = _joined(authority, kept)
    return Bundle({**_current(before), NEXT: leaf, NEXT_KEY: key, AUTHORITIES: joined})


def _promoted(before: Data, kept: Sequence[bytes]) -> Bundle:
    return Bundle({CERTIFICATE: before[NEXT], KEY: before[NEXT_KEY], AUTHORITIES: b"".join(kept)})


def _current(before: Data) -> dict[str, bytes]:
    return {CERTIFICATE: before[CERTIFICATE], KEY: before[KEY]}


def _made(names: Sequence[str], now: dt.datetime) -> tuple[bytes, bytes, bytes]:
    """An authority's certificate, what it signed, and the key of that. The authority's key ends here."""
    authority = CertificateAuthority("kvist pickers", now, LIFE)
    return (authority.pem, *authority.sign(names, now, LIFE, (SERVER, CLIENT)))


def _joined(new: bytes, kept: Sequence[bytes]) -> bytes:
    return b"".join([new, *kept[: MOST_AUTHORITIES - 1]])


def _authorities(bundle: bytes, now: dt.datetime) -> list[bytes]:
    """Those that are still valid, in PEM, the newest first."""
    alive = [each for each in _loaded(bundle) if now < each.not_valid_after_utc]
    alive.sort(key=lambda each: each.not_valid_before_utc, reverse=True)
    return [each.public_bytes(Encoding.PEM) for each in alive]


def _loaded(bundle: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return []


def _pair(secret: Data, leaf: str, key: str, names: Sequence[str], now: dt.datetime) -> _Pair | str:
    """A pair that can be used, or why not."""
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
    """Why a certificate is of no use; empty when it is."""
    if now >= leaf.not_valid_after_utc:
        return f"{name} expired at {leaf.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"
    if now < leaf.not_valid_before_utc:
        return f"{name} is not valid before {leaf.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}"
    lacking = sorted(set(names) - set(_good_for(leaf)))
    if lacking:
        return f"{name} is not good for {', '.join(lacking)}"
    if not any(_signed_by(leaf, authority) for authority in authorities):
        return f"{AUTHORITIES} has no authority that signed {name}"
    return ""


def _good_for(leaf: x509.Certificate) -> list[str]:
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
