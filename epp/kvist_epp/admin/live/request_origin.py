"""Which requests the pages answer: names that only their owner can give them, and pages of their own origin.

It holds for the live page, ``/fleet`` and ``/debug``. A foreign web page in the viewer's browser must not
read them or use their form. The browser itself keeps
foreign origins apart, but not if the owner of a domain lets its name point at the picker's address (DNS
rebinding): then the ``Host`` of the request is that domain. Hence only such hosts are accepted as no stranger
can own: addresses, ``localhost``, names of this machine, names of cluster Services, and the names that
``--live-page-hosts`` lists. Pure.
"""

from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

_OWN_SUFFIXES: Final = (".localhost", ".svc", ".svc.cluster.local", ".pod.cluster.local")
"""Ends of names that cannot be registered as domains."""
_FOREIGN_SITES: Final = frozenset(("cross-site", "same-site"))


class RequestOrigin:
    """Decides by the headers of a request."""

    def __init__(self, hosts: Iterable[str] = (), own_names: Iterable[str] = ()) -> None:
        """``hosts``: further names, by which proxies may reach the page. ``own_names``: of this machine."""
        self._hosts = frozenset(hosts)
        self._names = self._hosts | {name.lower() for name in own_names if name}

    def refusal(self, headers: Mapping[str, str], *, changes: bool = False) -> tuple[int, str] | None:
        """Return the status and the reason with which a request is refused; None if it is answered.

        A link on a foreign page may lead here; ``changes``: not even that, since the request has a body.
        """
        host = headers.get("Host", "")
        if not self._is_ours(host):
            return 421, (
                f"this page is not served as {_shown(host)}: use kubectl port-forward or an address, or add "
                "the name to --live-page-hosts"
            )
        linked = headers.get("Sec-Fetch-Mode") == "navigate" and not changes
        if headers.get("Sec-Fetch-Site", "") in _FOREIGN_SITES and not linked:
            return 403, "pages of other sites may not read this page"
        origin = headers.get("Origin")
        if origin is not None and not self._same(origin, host):
            return 403, f"pages of {_shown(origin)} may not use this page as {_shown(host)}"
        return None

    def _is_ours(self, host: str) -> bool:
        name = _name(host)
        if not name:
            return False
        try:
            ip_address(name)
        except ValueError:
            return name == "localhost" or name in self._names or name.endswith(_OWN_SUFFIXES)
        return True

    def _same(self, origin: str, host: str) -> bool:
        """Return whether a page of ``origin`` is this page. Behind a proxy that changes ``Host`` the origin
        is one of the listed names."""
        try:
            netloc = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        return bool(netloc) and (netloc == host.lower() or _name(netloc) in self._hosts)


def _name(host: str) -> str:
    """Return the name or address of a ``Host`` header, without its port and brackets; empty if it has
    none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _shown(text: str) -> str:
    """Return a header's value for an error text."""
    printable = "".join(letter for letter in text if letter.isprintable())
    return printable[:100] or "a name that is missing"
