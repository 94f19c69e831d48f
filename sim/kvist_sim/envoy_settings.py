"""Settings of one Envoy, from which ``envoy`` makes its configuration, and its TLS to the picker.

TLS: verification, client certificate, and reload of rotated files. Type names and fields: Envoy's v3 API
(1.40), ``UpstreamTlsContext`` and SDS from files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Literal

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


Mode = Literal["buffered", "buffered_partial", "streamed", "duplex", "none"]
Responses = Literal["skip", "none", "streamed", "buffered", "duplex"]
"""``none``: headers and trailers only."""
Selection = Literal["override_host", "original_dst"]

BODY_LIMIT_BYTES: Final = 32 * 1024 * 1024
"""Largest body Envoy holds for the picker; a longer one gets 413 in mode "buffered"."""

_BODIES: Final[Mapping[str, str]] = {
    "buffered": "BUFFERED",
    "buffered_partial": "BUFFERED_PARTIAL",
    "streamed": "STREAMED",
    "duplex": "FULL_DUPLEX_STREAMED",
    "none": "NONE",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Settings of one Envoy."""

    endpoints: Sequence[str]
    """Endpoints of the pool: "ip:port" or "[v6]:port" each."""
    picker: str | None = None
    """Address "ip:port" of the only picker; shorthand for ``pickers``."""
    pickers: tuple[str, ...] = ()
    """Replicas of the picker; with none there is no filter and no access log, only ``fallback``."""
    picker_tls: PickerTls | None = None
    """TLS to the pickers; ``None`` = plaintext."""
    mode: Mode = "buffered"
    """Mode in which the picker gets request bodies.

    "streamed" does not wait for the answer to the headers: Envoy's other way shows the picker no body.
    It never reports that trailers end a body, so such a request waits for ``message_timeout_seconds``."""
    responses: Responses | None = None
    """Parts of responses sent to the picker; ``None`` = all of them in mode "duplex", nothing in the others.

    More than "skip" also reports which endpoint served, and is only of use to ``--observe-responses``."""
    filter: bool = True
    """Call the picker for requests; without it Envoy balances by ``fallback`` alone (a base line)."""
    access_log: bool = True
    """Send the access log to the picker, so that it learns how requests end."""
    log_seconds: float = 0.1
    """Time between two messages of the access log."""
    failure_mode_allow: bool = True
    """Use ``fallback`` for a dead picker; otherwise requests fail.

    In mode "duplex" a request whose body has begun fails all the same, until ``health_check`` has noticed."""
    health_check: bool = True
    """Ask the picker's health service every second: it must serve there, and say that it is ready."""
    fallback: Literal["round_robin", "least_request"] = "round_robin"
    selection: Selection = "override_host"
    """Way in which the named endpoint is found: among ``endpoints``, with ``fallback`` for what is not
    there; or "original_dst": whatever address it is. Then ``endpoints`` is of no use, the picker must name
    one endpoint alone (``--max-endpoints=1``), and without a pick there is no answer but 503."""
    trusts_clients: bool = True
    """Leave clients' requests the headers that only pickers and gateways may use. Never with "original_dst",
    which goes wherever such a header says."""
    message_timeout_seconds: float = 1000
    """Longest time for one answer of the picker; requests may wait in its queue."""
    body_limit_bytes: int = BODY_LIMIT_BYTES
    retries: int = 2
    """Number of retries with the next endpoint of the picker's list, when an endpoint dies before it
    answered.

    With a retry policy Envoy 1.40 doubles a body that is followed by trailers in mode "duplex".
    """
    port: int = 0
    """Port on 127.0.0.1; 0 = the system chooses."""

    @property
    def all_pickers(self) -> tuple[str, ...]:
        """Addresses of all pickers: ``pickers``, or the only ``picker``."""
        return self.pickers or (() if self.picker is None else (self.picker,))

    @property
    def asks(self) -> bool:
        """True if requests wait for a picker's answer."""
        return self.filter and bool(self.all_pickers)

    @property
    def cleans(self) -> bool:
        """True if headers of pickers and gateways are removed from clients' requests."""
        return not self.trusts_clients or self.selection == "original_dst"

    @property
    def tells_served(self) -> bool:
        """True if the picker learns from the response which endpoint served."""
        return self.responses not in (None, "skip")

    def processing_mode(self) -> Json:
        """Return the parts of requests and responses that the filter sends to the picker.

        Trailers are sent where a pick can be answered to them, or where Envoy demands them."""
        shown = self.responses or ("duplex" if self.mode == "duplex" else "skip")
        return {
            "request_header_mode": "SEND",
            "request_body_mode": _BODIES[self.mode],
            "request_trailer_mode": "SKIP" if self.mode in ("none", "streamed") else "SEND",
            "response_header_mode": "SKIP" if shown == "skip" else "SEND",
            "response_body_mode": _BODIES["none" if shown == "skip" else shown],
            "response_trailer_mode": "SEND" if shown in ("none", "duplex") else "SKIP",
        }
