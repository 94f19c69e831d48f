"""The limits that flags set, and what they are called on the command line."""

import dataclasses

import pytest

from kvist_epp.errors import SettingsError
from kvist_epp.http2.limits import Limits
from kvist_epp.settings.settings import Settings


def test_the_flags_defaults_are_the_limits_defaults() -> None:
    """A server without settings is bounded as one with them, but for the size of messages."""
    default, flags = Limits(), Limits.of(Settings())
    differ = {
        f.name for f in dataclasses.fields(Limits) if getattr(default, f.name) != getattr(flags, f.name)
    }
    assert differ <= {"message_bytes", "stream_send_bytes", "connection_send_bytes"}


def test_a_flag_reaches_its_limit() -> None:
    """The connection applies the values of the command line; bursts are ten seconds' frames."""
    argv = ["--max-streams=7", "--stall-timeout=1m", "--max-pings-per-second=3", "--max-held-bytes=99999999"]
    limits = Limits.of(Settings.from_args(argv))
    assert (limits.streams, limits.stall_seconds, limits.held_bytes) == (7, 60.0, 99_999_999)
    assert (limits.pings.burst, limits.pings.per_second) == (30, 3.0)


@pytest.mark.parametrize(
    "flag",
    [
        "--max-streams=0",
        "--max-streams=2147483648",
        "--max-connections=0",
        "--max-header-bytes=100",
        "--max-held-bytes=1000",
        "--handshake-timeout=0",
        "--stall-timeout=-1",
        "--stream-idle-timeout=0",
        "--idle-timeout=0",
        "--keepalive-time=0",
        "--keepalive-timeout=0",
        "--max-resets-per-second=0",
        "--max-control-frames-per-second=nan",
    ],
)
def test_a_limit_that_limits_nothing_is_refused(flag: str) -> None:
    """A bound of nothing, or of everything, is refused with the name of its flag."""
    with pytest.raises(SettingsError, match=flag.partition("=")[0]):
        Settings.from_args([flag])
