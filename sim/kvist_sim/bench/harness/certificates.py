"""Certificates of a stack: one authority, a folder for each picker as Kubernetes mounts a Secret.

``folder/..data`` is a symbolic link to a folder with the files, ``tls.crt`` and the others are links through
it; a rotation writes a new folder and swaps the one link (``AtomicWriter`` in Kubernetes' volume code).
"""

import datetime as dt
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvist_epp.http2.tls import AUTHORITY_LIFETIME, LEAF_LIFETIME
from kvist_kube.certificates import CertificateAuthority
from kvist_sim.envoy_tls import PickerTls
from kvist_sim.launch import HOST

_FILES: Final = ("tls.crt", "tls.key", "ca.crt")
NAME: Final = "kvist-epp.local"


class Secrets:
    """Certificates for servers on the loopback, verified by Envoy."""

    def __init__(self, folder: Path, owners: Sequence[str]) -> None:
        """Makes and writes a first certificate for each of ``owners``."""
        self._folder = folder
        self._authority = CertificateAuthority("kvist-chaos", dt.datetime.now(dt.UTC), AUTHORITY_LIFETIME)
        self._issued = 0
        self._ca = folder / "ca.pem"
        self._ca.write_bytes(self._authority.pem)
        for owner in owners:
            self.folder(owner).mkdir(parents=True)
            self.rotate(owner)
            for name in _FILES:
                (self.folder(owner) / name).symlink_to(Path("..data") / name)

    def folder(self, owner: str) -> Path:
        """Return the folder for the owner's ``--cert-path``."""
        return self._folder / "secrets" / owner

    def gateway(self) -> PickerTls:
        """TLS settings of Envoy, which verifies authority and name."""
        return PickerTls(ca_file=self._ca, name=NAME)

    def rotate(self, owner: str) -> bytes:
        """Replace the owner's certificate and key, as a mounted Secret changes; the new certificate, DER."""
        self._issued += 1
        chain, key = self._authority.sign([NAME, "localhost", HOST], dt.datetime.now(dt.UTC), LEAF_LIFETIME)
        version = self.folder(owner) / f"..{self._issued}"
        version.mkdir()
        for name, content in zip(_FILES, (chain, key, self._authority.pem), strict=True):
            (version / name).write_bytes(content)
        fresh = self.folder(owner) / "..fresh"
        fresh.symlink_to(version.name)
        fresh.replace(self.folder(owner) / "..data")
        return ssl.PEM_cert_to_DER_cert(chain.decode())
