"""The picker's own certificates: a small authority that lives in memory, and what it signs. No I/O.

An authority and a certificate signed by it, not one self-signed certificate: gateways that verify are given
the authority once, and it stays the same while certificates are renewed under it.
"""

import datetime as dt
from collections.abc import Sequence
from typing import Final

from kvist_kube.certificates import CertificateAuthority

AUTHORITY_LIFE: Final = dt.timedelta(days=3650)
"""Longer than any process: it dies with the process."""
LEAF_LIFE: Final = dt.timedelta(days=90)
RENEW_BEFORE: Final = dt.timedelta(days=30)


class Authority(CertificateAuthority):
    """Signs certificates for one process."""

    def __init__(self, now: dt.datetime) -> None:
        """``now`` is aware, UTC."""
        super().__init__("kvist-epp", now, AUTHORITY_LIFE)

    def issue(self, names: Sequence[str], now: dt.datetime) -> tuple[bytes, bytes]:
        """A fresh server certificate and its key, both PEM, good for DNS names and addresses.

        Raises ValueError when a name is neither.
        """
        return self.sign(names, now, LEAF_LIFE)
