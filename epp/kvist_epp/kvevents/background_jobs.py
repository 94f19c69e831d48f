"""Work that belongs to no publisher: checking blocks born in decode, and freeing what was forgotten."""

import asyncio
from time import perf_counter

from kvist_epp.kvevents.cooperative_scheduler import Pump
from kvist_epp.kvevents.ingestion import Ingestor


class Chores:
    """A job of the pump; made inside a running event loop."""

    SLICE = 0.0005
    PAUSE = 4
    """Rests this many times as long as it worked: blocks gather meanwhile, and are cheaper together."""

    def __init__(self, ingestor: Ingestor, pump: Pump) -> None:
        self._ingestor = ingestor
        self._pump = pump
        self._rest: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """Something may have to be done."""
        if self._ingestor.unswept or (len(self._ingestor.checker) and self._rest is None):
            self._pump.ready(self)

    def work(self, deadline: float) -> bool:
        """A slice of checks, then a slice of sweeping."""
        began = perf_counter()
        deadline = min(deadline, began + self.SLICE)
        if self._rest is None:
            while self._ingestor.checker.step() and perf_counter() < deadline:
                pass
            if len(self._ingestor.checker):
                pause = self.PAUSE * (perf_counter() - began)
                self._rest = asyncio.get_running_loop().call_later(pause, self._rested)
        return self._ingestor.unswept and self._ingestor.sweep() > 0

    def close(self) -> None:
        """No timer is left."""
        if self._rest is not None:
            self._rest.cancel()

    def _rested(self) -> None:
        self._rest = None
        self.look()
