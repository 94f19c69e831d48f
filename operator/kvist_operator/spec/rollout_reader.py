"""Reader of ``spec.rollout``: how pods are replaced, and when a new operator may do so. Pure."""

from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from kvist_operator.errors import SpecError

from .fields import Fields, check_unique
from .pool import WEEKDAYS, MaintenanceWindow, Rollout, Upgrade


def read_rollout(f: Fields) -> Rollout:
    """Return the section. Raises SpecError."""
    rollout = Rollout(
        strategy=f.text("strategy", "ReplaceFirst", choices=("ReplaceFirst", "SurgeFirst")),
        max_unavailable=_max_unavailable(f.get("maxUnavailable"), f.at("maxUnavailable")),
        drain_seconds=f.number("drainSeconds", 60, high=3600),
        startup_seconds=f.whole("startupSeconds", low=30, high=86_400),
        upgrade=Upgrade(f.text("upgrade", Upgrade.MANUAL, choices=[str(each) for each in Upgrade])),
        window=_window(f.optional("window")),
    )
    if rollout.upgrade is Upgrade.WINDOW and rollout.window is None:
        raise SpecError(
            f.at("window"),
            'is missing, and upgrade is Window: write when, such as {days: [Sat], start: "02:00"}',
        )
    return f.done(rollout)


def _window(f: Fields | None) -> MaintenanceWindow | None:
    if f is None:
        return None
    start = f.text("start", "00:00", pattern=r"([01][0-9]|2[0-3]):[0-5][0-9]", like="02:30", most=5)
    days = f.texts("days", most=7, each=3, pattern="|".join(WEEKDAYS), like="Sat")
    zone = f.text("timeZone", "UTC", most=64)
    check_unique(days, f.at("days"), "leave one out")
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError) as error:
        problem = f"{zone!r} is not a time zone: write a name of the IANA database such as Europe/Berlin"
        raise SpecError(f.at("timeZone"), problem) from error
    return f.done(
        MaintenanceWindow(
            days=days,
            start_minute=int(start[:2]) * 60 + int(start[3:]),
            minutes=f.number("minutes", 60, low=1, high=1440),
            time_zone=zone,
        )
    )


def _max_unavailable(value: Any, path: str) -> int | str:
    if value is None:
        return 1
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, str) and value.endswith("%"):
        digits = value.removesuffix("%")
        if digits.isdigit() and 1 <= int(digits) <= 100:
            return value
    raise SpecError(path, f"{value!r} is neither a number above 0 nor a percentage like 25%")
