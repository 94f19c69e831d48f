"""The flags ``--peers``, ``--peer-cert-path`` and ``--peer-insecure``: parsed and checked. Standard library
only."""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final

from kvist_epp.errors import SettingsError

MAX_NAMES: Final = 256
"""Maximum number of names in ``--peers``; each may resolve to several addresses."""

HostPort = tuple[str, int]
"""A name or address without brackets, and its port."""


def parse_replica_names(text: str) -> tuple[HostPort, ...]:
    """Parse ``--peers``, a comma-separated list of ``name:port``, ``1.2.3.4:port`` and ``[::1]:port``.

    Raises SettingsError.
    """
    words = [word.strip() for word in text.split(",")] if text else []
    if len(words) > MAX_NAMES:
        raise SettingsError(
            f"--peers: at most {MAX_NAMES} names; the name of a headless Service is enough for all replicas"
        )
    return tuple(map(_parse_host_port, words))


def _parse_host_port(word: str) -> HostPort:
    host, _, port = word.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    digits = port.isascii() and port.isdigit() and len(port) < 6
    if not bare or (":" in bare and bare == host) or not digits or not 1 <= int(port) <= 65_535:
        raise SettingsError(f"--peers: {word!r} is not name:port, such as kvist-epp-peers.ns.svc:9004")
    return bare, int(port)


def check_replica_flags(
    peers: str, cert_path: str, environment: Mapping[str, str], *, insecure: bool, host: str
) -> None:
    """Check that plaintext between replicas is requested explicitly, except on the loopback interface.

    Raises SettingsError.
    """
    if not peers:
        if cert_path or insecure:
            raise SettingsError("--peer-cert-path, --peer-insecure: of no use without --peers")
        return
    if cert_path and insecure:
        raise SettingsError("--peer-cert-path and --peer-insecure: only one of them may be set")
    if not (cert_path or insecure or is_loopback_only(peers, host, environment)):
        raise SettingsError(
            "--peer-cert-path: replicas exchange prompts; set it to a folder with tls.crt, tls.key and "
            "ca.crt, or set --peer-insecure if the network between replicas is private"
        )


def is_loopback_only(peers: str, host: str, environment: Mapping[str, str]) -> bool:
    """Return whether all replicas are processes of this machine, reached over the loopback interface."""
    in_cluster = "KUBERNETES_SERVICE_HOST" in environment
    hosts = [name for name, _ in parse_replica_names(peers)] + ([host] if host else [])
    return not in_cluster and all(map(_is_loopback, hosts))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
