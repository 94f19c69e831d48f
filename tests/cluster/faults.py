"""Faults in single pods of a cluster: signals to their processes, filters and cuts in their networks."""

import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.cluster.nftables import folder_of_nft

_TABLE = "inet fault"
_LOCAL = "/32 host LOCAL"


def processes(cluster: Cluster, word: str, address: str = "") -> list[int]:
    """Return the processes of a cluster with this word in their command line, all or those of the pod with
    this address."""
    found = [pid for pid in _below(cluster.first) if word in _text(pid, "cmdline").replace("\0", " ")]
    return [pid for pid in found if not address or _has(pid, address)]


def _below(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield child
            yield from _below(child)


def _has(pid: int, address: str) -> bool:
    lines = _text(pid, "net/fib_trie").splitlines()
    return any(a.endswith(f"-- {address}") and b.strip() == _LOCAL for a, b in itertools.pairwise(lines))


def _text(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return ""  # it has ended


def send(number: signal.Signals, pids: list[int]) -> int:
    """Send a signal to processes; return how many got it."""
    for pid in pids:
        os.kill(pid, number)
    return len(pids)


@contextmanager
def filtered(pid: int, *, arriving: str = "accept", leaving: str = "accept") -> Iterator[None]:
    """Apply rules of nftables to what arrives at and leaves the pod of a process, until the context ends or
    the pod does. They stand for network policies, which no part of the cluster enforces."""
    chains = {"input": arriving, "output": leaving}
    text = "".join(
        f"chain {hook}_ {{ type filter hook {hook} priority 0; {rule}; }}\n" for hook, rule in chains.items()
    )
    _nft(pid, f"table {_TABLE} {{\n{text}}}\n").check_returncode()
    try:
        yield
    finally:
        _nft(pid, f"delete table {_TABLE}\n")


def _nft(pid: int, text: str) -> "subprocess.CompletedProcess[str]":
    command = _inside(pid, str(folder_of_nft() / "nft"), "-f", "-")
    return subprocess.run(command, input=text, text=True, check=False, capture_output=True)


def cut(pid: int, port: int) -> None:
    """End all connections of the pod of a process to this port, as a proxy between them does."""
    command = _inside(pid, "ss", "--kill", "--tcp", "--numeric", "dport", "=", str(port))
    subprocess.run(command, check=True, capture_output=True)


def _inside(pid: int, *command: str) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", *command]
