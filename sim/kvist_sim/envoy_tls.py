"""Envoy's side of TLS to the picker: verification, client certificate, and reload of rotated files.

Type names and fields: Envoy's v3 API (1.40), ``UpstreamTlsContext`` and SDS from files.
"""

import json
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]

_TRANSPORT: Final = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3"
_SERVER: Final = "picker-ca"
_CLIENT: Final = "gateway-certificate"


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerTls:
    """TLS from Envoy to its pickers; every field may be left out, which is what most gateways do today."""

    ca_file: Path | None = None
    """PEM file with the authority of the picker's certificate; ``None`` = any certificate is accepted."""
    name: str | None = None
    """DNS name or IP address the certificate must have, needs ``ca_file``; a DNS name is sent as SNI too."""
    certificate_file: Path | None = None
    """PEM chain that Envoy shows; with ``key_file``, for pickers that ask (mutual TLS)."""
    key_file: Path | None = None
    sds_folder: Path | None = None
    """Existing folder for the secrets `write_secrets` writes: Envoy then follows changes of the files above.

    It notices a file that is *moved* into place (``os.replace``), not one that is written over."""

    def transport_socket(self) -> Json:
        """Return the transport socket of a cluster that speaks HTTP/2."""
        context: Json = {"@type": f"{_TRANSPORT}.UpstreamTlsContext", "common_tls_context": self._common()}
        if self.name is not None and not _is_ip(self.name):
            context["sni"] = self.name
        return {"name": "envoy.transport_sockets.tls", "typed_config": context}

    def write_secrets(self) -> None:
        """Write the files that Envoy reads from ``sds_folder``, before it starts. Raises OSError."""
        if self.sds_folder is None:
            return
        for name, secret in self._secrets().items():
            resource = {"@type": f"{_TRANSPORT}.Secret", "name": name, **secret}
            self._sds_file(name).write_text(json.dumps({"resources": [resource]}))

    def _common(self) -> Json:
        common: Json = {"alpn_protocols": ["h2"]}
        secrets = self._secrets()
        if self.sds_folder is None:
            common |= secrets.get(_SERVER, {})
            if _CLIENT in secrets:
                common["tls_certificates"] = [secrets[_CLIENT]["tls_certificate"]]
            return common
        if _SERVER in secrets:
            common["validation_context_sds_secret_config"] = self._sds(_SERVER)
        if _CLIENT in secrets:
            common["tls_certificate_sds_secret_configs"] = [self._sds(_CLIENT)]
        return common

    def _secrets(self) -> dict[str, Json]:
        """Fields of Envoy's ``Secret`` by the name it is asked for."""
        secrets: dict[str, Json] = {}
        if self.ca_file is not None:
            secrets[_SERVER] = {"validation_context": self._validation(self.ca_file)}
        if self.certificate_file is not None and self.key_file is not None:
            pair = {
                "certificate_chain": {"filename": str(self.certificate_file)},
                "private_key": {"filename": str(self.key_file)},
            }
            secrets[_CLIENT] = {"tls_certificate": pair}
        return secrets

    def _validation(self, ca_file: Path) -> Json:
        validation: Json = {"trusted_ca": {"filename": str(ca_file)}}
        if self.name is not None:
            kind = "IP_ADDRESS" if _is_ip(self.name) else "DNS"
            matcher = {"san_type": kind, "matcher": {"exact": self.name}}
            validation["match_typed_subject_alt_names"] = [matcher]
        return validation

    def _sds(self, name: str) -> Json:
        source = {"path_config_source": {"path": str(self._sds_file(name))}, "resource_api_version": "V3"}
        return {"name": name, "sds_config": source}

    def _sds_file(self, name: str) -> Path:
        assert self.sds_folder is not None
        return self.sds_folder / f"{name}.json"


def _is_ip(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
