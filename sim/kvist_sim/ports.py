"""Free ports for child processes, which bind them a moment later.

Several test workers and benchmarks choose at the same time, so each process takes a slice of its own and
gives its ports out in turn: no other process gets the same port between choice and use.
"""

import fcntl
import os
import random
import socket
import tempfile
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Final

PORTS: Final = range(15_000, 32_000)
"""Below the kernel's ephemeral range, so that no outgoing connection takes a port between choice and use."""
SLICE: Final = 500
APART: Final = 8
"""Ports given out in a row are so far apart: an engine publishes the events of rank n at the n-th port after
its own."""


class _Slice:
    """Ports that belong to this process until it ends."""

    def __init__(self) -> None:
        self._lock, self.ports = _taken()
        self._next = cycle(port for first in range(APART) for port in self.ports[first::APART])

    def free(self, count: int) -> list[int]:
        found: list[int] = []
        for _ in self.ports:
            if len(found) == count:
                break
            port = next(self._next)
            if _is_free(port):
                found.append(port)
        if len(found) < count:
            raise OSError(f"only {len(found)} of {count} ports are free in {self.ports}")
        return found


def free_ports(count: int) -> list[int]:
    """Return distinct TCP ports of the loopback that are unused and not given to another process.

    Raises OSError when there are none.
    """
    return _own().free(count)


@cache
def _own() -> _Slice:
    return _Slice()


def _taken() -> tuple[int, range]:
    """Return a lock that lives as long as this process, and the slice it stands for."""
    folder = Path(tempfile.gettempdir()) / f"kvist-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    starts = range(PORTS.start, PORTS.stop, SLICE)
    for start in random.sample(starts, len(starts)):
        lock = os.open(folder / str(start), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
        else:
            return lock, range(start, start + SLICE)
    raise OSError(f"every slice of the ports {PORTS.start}-{PORTS.stop} is taken: {folder}")


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
