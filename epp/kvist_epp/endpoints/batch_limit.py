"""How many sequences an engine runs at once, found out where no label tells. Pure.

vLLM does not export its ``--max-num-seqs``. A guess that is too low would hold requests back from an engine
with room, so the guess is tried out: as long as an engine that runs this many lets nobody wait, it may have
more.
"""

from typing import Final

_SHARE: Final = 4
"""Steps grow to a quarter of the batch: from 256 to vLLM's 1,024 on a large GPU in seven scrapes."""


class Batch:
    """What scrapes of one engine have shown."""

    __slots__ = ("_step", "limit")

    def __init__(self) -> None:
        self.limit = 0
        """It has run as many without letting anybody wait, or may; 0: nothing seen."""
        self._step = 1

    def observe(self, running: int, waiting: int) -> None:
        """One scrape, with room in the KV cache: requests that wait then do so for a place in the batch.

        (Or for their turn to prefill. That lowers the limit for a few scrapes at most.)
        """
        if waiting:
            self.limit, self._step = running, 1
        elif running >= self.limit:
            self.limit = running + self._step
            self._step = max(1, min(2 * self._step, running // _SHARE))
