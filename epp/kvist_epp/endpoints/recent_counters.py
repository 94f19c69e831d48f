"""What an engine's counters have counted in the last ten minutes. Pure."""

from typing import Final, NamedTuple

from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.prefix_stats.window import Window

COUNTERS: Final = ("prefills", "preemptions", "queries", "hits")


class Counted(NamedTuple):
    """Between the oldest sample that counts and the newest."""

    seconds: float = 0.0
    """How long that is."""
    requests: float = 0.0
    """Requests that ended."""
    preemptions: float = 0.0
    queries: float = 0.0
    """Prompt tokens looked up in the prefix cache."""
    hits: float = 0.0
    """Those that were found there."""


class _Piece:
    """The first sample of half a minute."""

    __slots__ = ("at", "sample")

    def __init__(self) -> None:
        self.sample: EngineSample | None = None
        self.at = 0.0


class Recent:
    """Samples of one engine; one that restarts begins anew."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._window = Window(_Piece)
        self._last: tuple[float, EngineSample] | None = None

    def observe(self, sample: EngineSample, now: float) -> None:
        """One more sample, at ``now`` seconds of a monotonic clock."""
        if self._last is not None and sample.prompt_tokens < self._last[1].prompt_tokens:
            self._begin()
        piece = self._window.at(now)
        if piece.sample is None:
            piece.sample, piece.at = sample, now
        self._last = now, sample

    def counted(self) -> Counted:
        """As of the newest sample."""
        if self._last is None:
            return Counted()
        now, last = self._last
        first = self._window.live(now)[0]
        assert first.sample is not None, "pieces are made with their first sample"
        steps = (getattr(last, name) - getattr(first.sample, name) for name in COUNTERS)
        return Counted(now - first.at, *(max(0.0, step) for step in steps))
