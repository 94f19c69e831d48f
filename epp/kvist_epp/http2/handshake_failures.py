"""TLS handshakes that failed, by reason: all of them counted, one warning a minute for each reason. Pure."""

from typing import Final

WARN_SECONDS: Final = 60.0
MOST: Final = 32
"""Reasons told apart. They are OpenSSL's words, a few hundred, and peers choose among them."""
OTHER: Final = "other"

HUNG_UP: Final = "the client hung up"

_PLAINTEXT: Final = "it speaks plaintext; give the gateway TLS, or the picker --secure-serving=false"
_DISTRUST: Final = "it does not trust our certificate; give it /ca.crt of the metrics port, or --cert-path"
REMEDIES: Final = {
    "http request": _PLAINTEXT,
    "wrong version number": _PLAINTEXT,
    "packet length too long": _PLAINTEXT,
    "tlsv1 alert unknown ca": _DISTRUST,
    "sslv3 alert bad certificate": _DISTRUST,
    "sslv3 alert certificate unknown": _DISTRUST,
    HUNG_UP: _DISTRUST.replace("it does", "perhaps it does"),
    "peer did not return a certificate": "it shows no certificate, and an authority for clients is set",
    "certificate verify failed": "its certificate is not of the authority for clients, or has expired",
    "unsupported protocol": "its TLS is older than --tls-min-version",
    "the client did not offer h2 by alpn": "HTTP/2 must be agreed: gRPC clients and Envoy's http2 do so",
}


class HandshakeFailures:
    """Of one port."""

    __slots__ = ("_muted", "_warned_at", "counts")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """By reason."""
        self._warned_at: dict[str, float] = {}
        self._muted: dict[str, int] = {}

    def refused(self, reason: str, who: str, now: float) -> str:
        """One more, of a peer's address; what to warn of, empty when that was done a moment ago."""
        reason = reason if reason in self.counts or len(self.counts) < MOST else OTHER
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if now - self._warned_at.get(reason, -WARN_SECONDS) < WARN_SECONDS:
            self._muted[reason] = self._muted.get(reason, 0) + 1
            return ""
        self._warned_at[reason] = now
        muted = self._muted.pop(reason, 0)
        more = f", as {muted} others before" if muted else ""
        remedy = REMEDIES.get(reason.lower(), "")
        return f"TLS handshake with {who} failed{more}: {reason}" + (f" ({remedy})" if remedy else "")
