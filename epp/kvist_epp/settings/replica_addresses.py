"""Which replicas there are and whether they may speak plaintext, by the flags. Standard library only."""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final

from kvist_epp.errors import SettingsError

MOST_PEERS: Final = 256
"""Names in ``--peers``; each may stand for several addresses."""

HostPort = tuple[str, int]
"""A name or address without brackets, and its port."""


def peers_of(text: str) -> tuple[HostPort, ...]:
    """``--peers`` taken apart: a comma list of ``name:port``, ``1.2.3.4:port`` and ``[::1]:port``.

    Raises SettingsError.
    """
    words = [word.strip() for word in text.split(",")] if text else []
    if len(words) > MOST_PEERS:
        raise SettingsError(f"--peers: at most {MOST_PEERS} names; a headless Service's stands for all")
    return tuple(map(_host_port, words))


def _host_port(word: str) -> HostPort:
    host, _, port = word.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    digits = port.isascii() and port.isdigit() and len(port) < 6
    if not bare or (":" in bare and bare == host) or not digits or not 1 <= int(port) <= 65_535:
        raise SettingsError(f"--peers: {word!r} is no name:port, such as kvist-epp-peers.ns.svc:9004")
    return bare, int(port)


def check_peers(
    peers: str, cert_path: str, environment: Mapping[str, str], *, insecure: bool, host: str
) -> None:
    """Plaintext between replicas must be asked for, but on the loopback. Raises SettingsError."""
    if not peers:
        if cert_path or insecure:
            raise SettingsError("--peer-cert-path, --peer-insecure: of no use without --peers")
        return
    if cert_path and insecure:
        raise SettingsError("--peer-cert-path and --peer-insecure: only one of them")
    if not (cert_path or insecure or only_here(peers, host, environment)):
        raise SettingsError(
            "--peer-cert-path: replicas tell each other prompts; name a folder with tls.crt, tls.key and "
            "ca.crt, or say --peer-insecure where nobody else is on the network"
        )


def only_here(peers: str, host: str, environment: Mapping[str, str]) -> bool:
    """Whether the replicas are processes of one machine that nobody else reaches."""
    in_cluster = "KUBERNETES_SERVICE_HOST" in environment
    hosts = [name for name, _ in peers_of(peers)] + ([host] if host else [])
    return not in_cluster and all(map(_is_loopback, hosts))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
