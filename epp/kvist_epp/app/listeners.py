"""Listening gRPC ports, on the configured transport."""

import os
from collections.abc import Mapping, MutableMapping

from kvist_epp.errors import CertificateError, SettingsError
from kvist_epp.http2.call import Method, Server
from kvist_epp.http2.limits import Limits, PortStats
from kvist_epp.http2.tls import Certificates, own_names
from kvist_epp.names import LASTING_METHODS
from kvist_epp.settings.settings import Settings


def open_certificates(settings: Settings) -> Certificates | None:
    """Return the certificates of the ext_proc port; None for plaintext. Raises SettingsError, which names the
    flag."""
    if not settings.secure_serving:
        return None
    try:
        return Certificates(
            cert_path=settings.cert_path,
            client_ca_path=settings.client_ca_path,
            names=own_names(settings.tls_names, os.environ),
            minimum=settings.tls_min_version,
        )
    except CertificateError as error:
        flags = {
            "--cert-path": settings.cert_path,
            "--client-ca-path": settings.client_ca_path,
            "--tls-names": settings.tls_names,
        }
        given = " or ".join(flag for flag, value in flags.items() if value)
        raise SettingsError(f"{given or '--secure-serving'}: {error}") from error


async def listen(
    settings: Settings,
    served: Mapping[str, Method],
    port: int,
    flag: str,
    tls: Certificates | None = None,
    *,
    port_stats: MutableMapping[str, PortStats] | None = None,
) -> Server:
    """Serve these methods on ``port``, in plaintext without ``tls``.

    ``port_stats`` receives the port's statistics for the metrics, under the flag's name without ``-port``;
    the grpc.aio transport has none.

    Raises:
        SettingsError: the port cannot be opened; the text names ``flag``.
    """
    try:
        if settings.transport == "grpc":
            from kvist_epp.http2.grpc_server import serve_grpc

            host = settings.host or "[::]"
            return await serve_grpc(
                served, host, port, settings.max_message_bytes, tls=tls, lasting=LASTING_METHODS
            )
        from kvist_epp.http2.server import serve_http2

        limits, ssl = Limits.of(settings), tls.context if tls is not None else None
        server = await serve_http2(served, settings.host, port, limits, ssl=ssl, lasting=LASTING_METHODS)
    except OSError as error:
        raise SettingsError(f"{flag}: cannot listen on port {port}: {error}") from error
    if port_stats is not None:
        port_stats[flag.removeprefix("--").removesuffix("-port")] = server.stats
    return server
