"""The picker's live page during a demo: its address, a browser that shows it, and the wait at the end."""

import asyncio
import os
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

from kvist_sim.launch import HOST, PickerPorts, picker_ports


@dataclass(slots=True)
class LivePage:
    """The page, at the same address for every picker of the demo."""

    ports: PickerPorts = field(default_factory=picker_ports)
    _shown: bool = False

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.ports.metrics}/"

    def show(self, say: Callable[[str], None]) -> None:
        """Print the address, and open it in a browser if there is a display; the first time only."""
        if self._shown:
            return
        self._shown = True
        opened = has_display(os.environ)
        say(f"  live page: {self.url}" + ("" if opened else " (no display here: open it in your browser)"))
        if opened:
            # a browser of $BROWSER may stay in the foreground
            threading.Thread(target=webbrowser.open, args=(self.url,), daemon=True).start()


def has_display(environment: Mapping[str, str]) -> bool:
    """Return whether a browser can open a window, or BROWSER names one. Text browsers are not started of
    their own accord, because they would take the terminal."""
    named = any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    return named or sys.platform in ("darwin", "win32")


async def wait_for_enter(stdin: TextIO) -> None:
    """Return when a line can be read from the terminal."""
    loop, pressed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(stdin.fileno(), pressed.set)
    try:
        await pressed.wait()
    finally:
        loop.remove_reader(stdin.fileno())
    stdin.readline()
