"""Ports for children."""

import socket
import subprocess
import sys
from itertools import pairwise

import pytest

from kvist_sim.ports import SLICE, free_ports

ANOTHER = "from kvist_sim.ports import free_ports; print(*free_ports(5)); input()"


def test_ports_are_distinct_and_free() -> None:
    """Ports given out in a row never collide, although none is bound yet."""
    ports = free_ports(30) + free_ports(30)
    assert len(set(ports)) == 60


def test_ports_given_out_together_are_not_neighbours() -> None:
    """A process that also binds the next port, for a second rank, meets no conflict."""
    ports = sorted(free_ports(20))
    assert min(second - first for first, second in pairwise(ports)) > 1


def test_another_process_is_given_others() -> None:
    """Test workers and benchmarks at the same time choose from slices of their own."""
    mine = free_ports(SLICE // 2)
    command = [sys.executable, "-c", ANOTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        other.communicate("")
    assert len(theirs) == 5
    assert not theirs & {port // SLICE * SLICE + i for port in mine for i in range(SLICE)}


def test_a_port_in_use_is_passed_over() -> None:
    """A port on which a process listens is not given out."""
    (taken,) = free_ports(1)
    with socket.create_server(("127.0.0.1", taken)):
        assert taken not in [port for _ in range(SLICE) for port in free_ports(1)]


def test_asking_for_more_than_there_are_is_an_error() -> None:
    """No port is given twice in one answer."""
    with pytest.raises(OSError, match=f"of {SLICE + 1} ports are free"):
        free_ports(SLICE + 1)
