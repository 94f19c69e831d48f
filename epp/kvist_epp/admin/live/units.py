"""Figures as people read them: tokens, seconds, shares, rates. Pure; shared by the page and ``kvist top``."""

from collections.abc import Mapping
from typing import Any, Final

from kvist_epp.engines.vllm.kv_events import CPU, LMCACHE, SHARED, STORAGE

UNKNOWN: Final = "–"
_THOUSANDS: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float | None) -> str:
    """Return a number with three digits: ``950``, ``12.3k``, ``4.56M``."""
    if value is None:
        return UNKNOWN
    for factor, unit in _THOUSANDS:
        if abs(value) >= 0.9995 * factor:
            return f"{_three(value / factor)}{unit}"
    return f"{value:.0f}"


def seconds(value: float | None) -> str:
    """Return a duration: ``0 s``, ``45 ms``, ``1.25 s``, ``3.2 min``, ``5 h``."""
    if value is None:
        return UNKNOWN
    if value < 0.0005:
        return "0 s"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{_three(value)} s"
    if value < 7200:
        return f"{_three(value / 60)} min"
    return f"{_three(value / 3600)} h"


def ago(value: float) -> str:
    """Return an age in whole units: ``just now``, ``4 s ago``, ``3 min ago``."""
    if value < 1:
        return "just now"
    return f"{value:.0f} s ago" if value < 120 else f"{value / 60:.0f} min ago"


def share(value: float | None) -> str:
    """Return a share as a percentage: ``78 %``, and ``0.4 %`` where it is small."""
    if value is None:
        return UNKNOWN
    percent = 100 * value
    return f"{percent:.1f} %" if 0 < percent < 1 else f"{percent:.0f} %"


def rate(value: float | None) -> str:
    """Return a rate per second: ``0.25/s``, ``12.3/s``, ``1,250/s``."""
    return UNKNOWN if value is None else f"{_three(value)}/s"


def gpu_time(value: float | None) -> str:
    """Return the time of GPUs: ``42 GPU-s``, ``12.5 GPU-min``, ``3.4 GPU-h``."""
    if value is None:
        return UNKNOWN
    if value < 60:
        return f"{_three(value)} GPU-s"
    return f"{_three(value / 60)} GPU-min" if value < 3600 else f"{_three(value / 3600)} GPU-h"


def money(value: float | None) -> str:
    """Return an amount without a currency: ``0.05``, ``12.34``, ``1,234``."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.2f}"


def tier(medium: str) -> str:
    """Return the usual word for a medium of KV events: ``host``, ``disk``, ``shared``, ``LMCache``."""
    return _TIERS.get(medium, medium)


_TIERS: Final[Mapping[str, str]] = {
    CPU: "host",
    STORAGE: "disk",
    SHARED: "shared",
    LMCACHE: "LMCache",
}


def _three(value: float) -> str:
    """Return about three digits."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


FILTERS: Final[Mapping[str, Any]] = {
    "number": count,
    "seconds": seconds,
    "ago": ago,
    "share": share,
    "rate": rate,
    "gpu_time": gpu_time,
    "money": money,
    "tier": tier,
}
"""For templates."""
