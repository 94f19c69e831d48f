"""The engine as a process: how it starts, fails and ends."""

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kvist_sim.engine.__main__ import main
from kvist_sim.ports import free_ports

COMMAND = (sys.executable, "-m", "kvist_sim.engine")


def started(*argv: str) -> tuple[subprocess.Popen[str], str]:
    """A process that serves, and the line in which it said so."""
    child = subprocess.Popen([*COMMAND, *argv], stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if "serving" in line:
            return child, line
    raise AssertionError(f"ended with {child.wait()}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_stopped(number: signal.Signals) -> None:
    """The engine answers, and exits with code 0 on SIGTERM and Ctrl-C."""
    (port,) = free_ports(1)
    child, line = started("serve", "org/model", "--host", "127.0.0.1", "--port", str(port))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:  # the test's own server
            page = answer.read()
    finally:
        child.send_signal(number)
        _, rest = child.communicate(timeout=60)

    assert (child.returncode, rest) == (0, "")
    assert b'"id":"org/model"' in page
    assert "org/model" in line


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    """A taken port is named, and the code is 1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        assert main(["m", "--host", "127.0.0.1", "--port", str(port)]) == 1

    assert f"error: cannot listen on 127.0.0.1:{port}: " in capsys.readouterr().err


def test_events_port_in_use() -> None:
    """A KV events endpoint that cannot be bound is named, and the code is 1."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        endpoint = f"tcp://*:{taken.getsockname()[1]}"
        events = ("--kv-events-config", f'{{"enable_kv_cache_events": true, "endpoint": "{endpoint}"}}')
        ran = subprocess.run(
            [*COMMAND, "m", "--host", "127.0.0.1", "--port", "0", *events],
            capture_output=True,
            text=True,
            check=False,
        )

    assert ran.returncode == 1
    assert f"error: --kv-events-config: {endpoint}, rank 0: Address already in use" in ran.stderr


def test_unusable_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken tokenizer files are named, and the code is 1."""
    (tmp_path / "tokenizer.json").write_text("{}")

    assert main([str(tmp_path), "--port", "0"]) == 1
    assert f"cannot read {tmp_path / 'tokenizer.json'}" in capsys.readouterr().err


def test_unknown_flag_ends_with_two() -> None:
    """The exit code of a refused command line is argparse's."""
    ran = subprocess.run([*COMMAND, "m", "--swap-space", "4"], capture_output=True, text=True, check=False)

    assert ran.returncode == 2
    assert ran.stderr == "kvist sim engine: error: unrecognized arguments: --swap-space 4\n"


def test_works_without_uvloop() -> None:
    """The standard event loop serves as well."""
    hidden = (
        "import sys; sys.modules['uvloop'] = None\n"
        "from kvist_sim.engine.__main__ import _loop\n"
        "loop = _loop(); print(type(loop).__module__); loop.close()"
    )
    ran = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=True)

    assert ran.stdout == "asyncio.unix_events\n"
