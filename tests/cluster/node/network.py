"""Addresses and network namespaces. Each pod has one of its own: a pair of interfaces, an address of /32, and
the box as its router.

Everything is made inside the box's own namespaces (see ``box``), so nothing of it outlives the box.
"""

import asyncio
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

ROUTER: Final = "10.244.0.1"
"""The box itself: the API server's address, and every pod's router."""
DNS: Final = "10.244.0.10"
"""CoreDNS, at an address of its own: kube-proxy would drop questions to a bare address of the Services'."""
SERVICES: Final = "10.96.0.0/16"
PODS: Final = "10.244.0.0/16"
DOMAIN: Final = "cluster.local"

_FORWARD: Final = Path("/proc/sys/net/ipv4/ip_forward")
_NUMBERS: Final = itertools.count(1)


async def ip(*commands: str, namespace: str = "") -> None:
    """Some ``ip`` commands in one process. Raises OSError with what it said."""
    inside = ("-n", namespace) if namespace else ()
    await _run("ip", *inside, "-batch", "-", text="\n".join(commands))


async def _run(*words: str, text: str) -> None:
    """A command that reads this text. Raises OSError with what it said."""
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate(text.encode())
    if process.returncode:
        raise OSError(f"{shlex.join(words)}: {text}: {said.decode().strip()}")


async def own_network(addresses: Sequence[str]) -> None:
    """Turn the new, empty network namespace of this process into a router with these addresses."""
    _FORWARD.write_text("1")
    await ip(
        "link set lo up",
        *(f"addr add {address}/32 dev lo" for address in (ROUTER, DNS, *addresses)),
        f"route add {SERVICES} dev lo src {ROUTER}",  # else there is no route, and kube-proxy is never asked
    )


@dataclass
class Addresses:
    """Addresses of the pods of one node; a released address is not used again soon."""

    network: IPv4Network
    _used: set[str] = field(default_factory=set)
    _turn: Iterator[str] = field(init=False)

    def __post_init__(self) -> None:
        """Begins at the first host."""
        self._turn = itertools.cycle([str(host) for host in self.network.hosts()])

    def take(self) -> str:
        """A free one."""
        found = next(address for address in self._turn if address not in self._used)
        self._used.add(found)
        return found

    def give_back(self, address: str) -> None:
        """Release an address."""
        self._used.discard(address)


class PodNetwork:
    """The namespace of one pod."""

    def __init__(self, address: str) -> None:
        number = next(_NUMBERS)
        self.address = address
        self.name = f"pod{number}"
        """Of the namespace, below /run/netns."""
        self._outside = f"veth{number}"

    async def up(self, sysctls: Iterable[Mapping[str, str]] = ()) -> None:
        """Make it, with the ``net.`` settings of the pod's security context. Raises OSError."""
        await ip(
            f"netns add {self.name}",
            f"link add {self._outside} type veth peer name eth0 netns {self.name}",
            f"link set {self._outside} up",
            f"route replace {self.address}/32 dev {self._outside}",
        )
        await ip(
            "link set lo up",
            f"addr add {self.address}/32 dev eth0",
            "link set eth0 up",
            f"route add {ROUTER} dev eth0 scope link",
            f"route add default via {ROUTER}",
            namespace=self.name,
        )
        for one in sysctls:
            file = "/proc/sys/" + one["name"].replace(".", "/")
            await _run("nsenter", f"--net=/run/netns/{self.name}", "tee", file, text=one["value"])

    async def down(self) -> None:
        """Take it away; connections through it end."""
        await ip(f"link del {self._outside}", f"netns del {self.name}")


def resolver(namespace: str) -> str:
    """``/etc/resolv.conf`` of a pod."""
    search = f"{namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
    return f"search {search}\nnameserver {DNS}\noptions ndots:5\n"


def hosts(name: str, address: str) -> str:
    """``/etc/hosts`` of a pod."""
    return f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n{address}\t{name}\n"
