"""``kvist top``: the table, its sizes, and how it asks."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from io import StringIO
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console
from tests.epp.admin.live.documents import document

from kvist.errors import PickerClientError
from kvist.picker_client import PickerClient
from kvist.top_command import screen, state
from kvist_epp.admin.live.replica_merge import merged

Json = dict[str, Any]


def shown(doc: Mapping[str, Any], width: int = 80, height: int = 0, problem: str = "") -> list[str]:
    """Return the lines of the screen."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(screen(doc, width, height, problem))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


@asynccontextmanager
async def picker(doc: Json) -> AsyncIterator[str]:
    """Yield the address of a server that has the document."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(doc)

    app = web.Application()
    app.add_routes([web.get("/live/state", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_the_terminal(width: int) -> None:
    """No line is wider than the terminal; a wide one has more figures."""
    doc = merged(document(endpoints=3), {"b": document("b"), "c": None})
    doc["endpoints"][0] |= {"state": "unreachable", "severity": 4, "reason": "connection refused " * 9}
    lines = shown(doc, width)

    assert max(map(len, lines)) <= width
    assert lines[0].startswith("qwen  Qwen/Qwen3-32B  1 of 3 endpoints need attention")
    assert "25/s requests · from cache 78 % (predicted 80 %) · queued 0" in lines[1]
    assert any(line.startswith("serving/qwen-1") and " ready " in line and "13/256" in line for line in lines)
    assert ("PREFILL/S" in "".join(lines)) is (width == 140)
    assert "replica c: does not answer" in lines


def test_a_large_pool_shows_as_many_rows_as_fit() -> None:
    """The worst endpoints are shown and the others counted; the last line says how to end."""
    lines = shown(merged(document(endpoints=100), {}), 100, 24)

    assert len(lines) <= 24
    assert "84 more endpoints, none worse than these" in lines
    assert lines[-1] == "q ends"
    assert shown(merged(document(), {}), 100, 24, "no picker answers")[-1] == "no picker answers"


def test_names_cannot_control_the_terminal() -> None:
    """Escape characters of names and reasons are not printed."""
    doc = merged(document(endpoints=1), {})
    doc["pool"]["name"] = "a\x1b[2Jb"
    doc["endpoints"][0] |= {"name": "x\x07y", "reason": "\x1b]0;t", "severity": 2}
    doc["health"]["warnings"] = ["w\x1b[31m"]

    assert not any("\x1b" in line or "\x07" in line for line in shown(doc))


async def test_a_picker_behind_another_name_is_asked_as_localhost() -> None:
    """The API server passes on its own name, which the page refuses; other errors stay errors."""
    asked: list[Mapping[str, str]] = []

    async def send(_m: str, _p: str, _b: bytes | None, headers: Mapping[str, str]) -> tuple[int, bytes]:
        asked.append(headers)
        return (200, b'{"version": 1}') if headers else (421, b"not served as api.example.com")

    async def refuse(_m: str, _p: str, _b: bytes | None, _h: Mapping[str, str]) -> tuple[int, bytes]:
        return 404, b"Not Found"

    assert await state(PickerClient("x", send)) == {"version": 1}
    assert asked == [{}, {"Host": "localhost"}]
    with pytest.raises(PickerClientError, match="no page /live/state"):
        await state(PickerClient("x", refuse))


async def test_once_and_json_end_by_themselves() -> None:
    """--once prints the table, -o json the document; without a picker there is one line and exit code 1."""
    command = [sys.executable, "-m", "kvist", "top", "--address"]
    async with picker(merged(document(), {})) as address:
        runs = [
            await asyncio.to_thread(
                subprocess.run, [*command, *more], capture_output=True, text=True, check=False
            )
            for more in ([address, "--once"], [address, "-o", "json"], ["http://127.0.0.1:9", "--once"])
        ]

    assert [run.returncode for run in runs] == [0, 0, 1]
    assert "serving/qwen-2" in runs[0].stdout
    assert json.loads(runs[1].stdout)["hit_rate"]["true"] == 0.78
    assert runs[2].stderr.startswith("kvist: --address http://127.0.0.1:9: no picker answers")
    assert len(runs[2].stderr.splitlines()) == 1


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
async def test_the_live_table_ends_cleanly(key: bytes) -> None:
    """On a terminal the table is updated until q or Ctrl-C; the screen and its settings are restored."""
    async with picker(merged(document(), {})) as address:
        status, output = await asyncio.to_thread(_on_terminal, address, key)

    assert status == 0
    assert b"serving/qwen-1" in output
    assert b"\x1b[?1049l" in output, "it leaves the second screen"
    assert b"Traceback" not in output


def _on_terminal(address: str, key: bytes) -> tuple[int, bytes]:
    """Run the command on a pseudo-terminal, press a key once it shows the table; status and output.

    A command that ignores the key is killed: the thread that reads here would keep the tests from ending.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm", COLUMNS="100", LINES="30")
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells have commands in the background ignore it
        argv = [sys.executable, "-m", "kvist", "top", "--address", address, "--interval", "0.2"]
        os.execv(sys.executable, argv)
    watchdog = threading.Timer(90.0, os.kill, (child, signal.SIGKILL))
    watchdog.start()
    output, pressed = b"", False
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not chunk:
            break
        output += chunk
        if not pressed and b"qwen-2" in output:
            pressed = True
            os.write(terminal, key)
    watchdog.cancel()
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), output


@pytest.mark.parametrize(("width", "cell"), [(80, "11M"), (140, "host 2M, shared 9M")])
def test_slower_tiers_have_a_column_where_there_are_any(width: int, cell: str) -> None:
    """Tokens on host memory and storage stand beside the KV cache, in all on a narrow terminal; a pool whose
    engines have none is without the column."""
    doc = merged(document(endpoints=3), {})
    tiered = shown(doc, width)
    for one in doc["endpoints"]:
        one["tiers"] = {}
    plain = shown(doc, width)
    [head], [row] = ([one for one in tiered if word in one] for word in ("TIERS", "qwen-1"))

    assert head.index("KV") < head.index("TIERS") < head.index("CACHE")
    assert cell in row
    assert max(map(len, tiered)) <= width
    assert not any("TIERS" in line for line in plain)
