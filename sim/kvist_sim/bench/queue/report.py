"""Results of ``kvist bench queue`` as tables and as JSON."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvist_sim.bench.queue.judge import BOUND_SECONDS, SHARE_BOUND, SLACK_SECONDS, Relieved, Share

MB: Final = 1e6
KB: Final = 1e3
SHED: Final = 429


@dataclass(frozen=True, slots=True)
class Drained:
    """Figures of a run that queued all requests until there was capacity.

    Memory in bytes, times in seconds.
    """

    requests: int
    queued: int
    queued_bytes: int
    """By the picker's own count."""
    resident_before: int
    resident_full: int
    seconds: float
    """From the moment there was room to the last answer."""
    picked: int
    logged: int
    """Picks in the picker's log: their order is what is judged."""
    shares: Sequence[Share]
    out_of_order: int
    left: Sequence[str]

    @property
    def each(self) -> float:
        """Resident bytes per waiting request."""
        return (self.resident_full - self.resident_before) / max(1, self.queued)

    def broken(self) -> list[str]:
        """Bounds that do not hold, in words."""
        found = []
        if self.queued != self.requests:
            found.append(f"{self.queued} of {self.requests} requests waited")
        if self.picked != self.requests or self.logged != self.requests:
            found.append(
                f"{self.picked} of {self.requests} requests were picked, {self.logged} are in the log"
            )
        found += [
            f"tenant {share.tenant} got {share.of_fair:.0%} of its fair share"
            for share in self.shares
            if abs(share.of_fair - 1) > SHARE_BOUND
        ]
        if self.out_of_order:
            found.append(f"{self.out_of_order} requests were picked before one of a higher priority")
        return [*found, *(f"left behind: {what}" for what in self.left)]


@dataclass(frozen=True, slots=True)
class Bounded:
    """Figures of a run with a small queue and a short deadline."""

    requests: int
    bound_bytes: int
    bound_seconds: float
    queued: int
    queued_bytes: int
    refused: int
    """Requests refused at once because the queue was full."""
    resident_before: int
    resident_full: int
    statuses: Mapping[int, int]
    longest: float
    """Longest wait in the queue, from the picker's log; infinite when a request got no answer."""
    longest_seen: float
    """From the client's first byte to its answer: what the picker took to read all of them is in it."""
    late: int
    left: Sequence[str]

    def broken(self) -> list[str]:
        """Bounds that do not hold, in words."""
        found = []
        if self.queued_bytes > self.bound_bytes:
            found.append(f"the queue holds {self.queued_bytes} bytes of {self.bound_bytes}")
        if self.late:
            found.append(f"{self.late} requests waited longer than {self.bound_seconds:g} s")
        if wrong := {status: count for status, count in self.statuses.items() if status != SHED}:
            found.append(f"answers other than {SHED}: {wrong}")
        return [*found, *(f"left behind: {what}" for what in self.left)]


@dataclass(frozen=True, slots=True)
class QueueReport:
    """Results of all runs."""

    drained: Drained
    bounded: Bounded
    relieved: Relieved
    setting: Mapping[str, Any]

    def broken(self) -> list[str]:
        """Every bound that does not hold."""
        held = [f"held: {why}" for why in self.drained.broken()]
        bounded = [f"bounded: {why}" for why in self.bounded.broken()]
        return [*held, *bounded, *(f"relieved: {why}" for why in self.relieved.broken())]


def table(report: QueueReport) -> RenderableType:
    """Memory of both runs, the drain, the shares."""
    parts: list[RenderableType] = [Text(_heading(report)), _memory(report), Text(_drain(report))]
    return Group(*parts, _shares(report))


def _heading(report: QueueReport) -> str:
    setting, bounded = report.setting, report.bounded
    proof = "" if setting["full"] else "\nFewer than the full run: no proof."
    return (
        f"{setting['requests']:,} requests with bodies of {setting['body_bytes'] / KB:g} KB in one picker, "
        f"every engine full. held: without bounds that matter, then the engines have room. bounded: "
        f"--queue-bytes of {bounded.bound_bytes >> 20} MiB, --queue-seconds of {bounded.bound_seconds:g}, "
        f"and never any room.{proof}"
    )


def _memory(report: QueueReport) -> RenderableType:
    shown = _table(
        "run", "sent", "waiting", "refused\nat once", "queue's own\nMB", "resident\n+MB", "each\n+KB"
    )
    held, bounded = report.drained, report.bounded
    _row(shown, "held", held.requests, held.requests - held.queued, held)
    _row(shown, "bounded", bounded.requests, bounded.refused, bounded)
    return shown


def _row(shown: Table, name: str, sent: int, refused: int, run: Drained | Bounded) -> None:
    more = run.resident_full - run.resident_before
    shown.add_row(
        name,
        *(f"{count:,}" for count in (sent, run.queued, refused)),
        f"{run.queued_bytes / MB:.1f}",
        f"{more / MB:.1f}",
        f"{more / max(1, run.queued) / KB:.1f}",
    )


def _drain(report: QueueReport) -> str:
    held, bounded, soon = report.drained, report.bounded, report.relieved
    return (
        f"held: {held.picked:,} picked within {held.seconds:.1f} s of the first room "
        f"({held.picked / max(held.seconds, 1e-9):,.0f} a second), {held.out_of_order} before a request of "
        f"a higher priority; left behind: {', '.join(held.left) or 'nothing'}.\n"
        f"bounded: answered by {dict(bounded.statuses)}, the longest in the queue for "
        f"{_seconds(bounded.longest)} of {bounded.bound_seconds:g} s, {bounded.late} over "
        f"{bounded.bound_seconds + SLACK_SECONDS:g} s; the client saw {_seconds(bounded.longest_seen)} s; "
        f"left behind: {', '.join(bounded.left) or 'nothing'}.\n"
        f"relieved: {soon.waiting:,} wait, one request ends and the next leaves {len(soon.seconds)} times: "
        f"p50 {soon.p50 * 1e3:.1f}, p99 {soon.p99 * 1e3:.1f} of {BOUND_SECONDS * 1e3:g}, longest "
        f"{max(soon.seconds, default=math.inf) * 1e3:.1f} ms; {soon.absorbed} ends made no room."
    )


def _seconds(value: float) -> str:
    return "without end" if math.isinf(value) else f"{value:.2f}"


def _shares(report: QueueReport) -> RenderableType:
    shown = _table("tenant (priority 0)", "sent", "picked while all waited", "of its fair share")
    for share in report.drained.shares:
        shown.add_row(share.tenant, f"{share.sent:,}", f"{share.picked:,}", f"{share.of_fair:.1%}")
    return shown


def _table(first: str, *heads: str) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column(first, no_wrap=True)
    for head in heads:
        shown.add_column(head, justify="right", no_wrap=True)
    return shown


def document(report: QueueReport) -> dict[str, Any]:
    """Return the report as plain JSON values; times in seconds, memory in bytes."""
    bounded = dataclasses.asdict(report.bounded)
    for name in ("longest", "longest_seen"):
        if math.isinf(bounded[name]):
            bounded[name] = None
    return {
        "setting": dict(report.setting),
        "held": dataclasses.asdict(report.drained) | {"resident_each": round(report.drained.each)},
        "bounded": bounded,
        "relieved": dataclasses.asdict(report.relieved),
    }
