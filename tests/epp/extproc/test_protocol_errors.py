"""The log lines of messages that cannot be read."""

import logging

import pytest

from kvist_epp.extproc.protocol_errors import WARN_SECONDS, ProtocolErrors


def test_peer_and_reason_are_logged_once_a_minute_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    """All errors are counted; the first of a kind is logged, then one a minute with the number in between."""
    now = 0.0
    counts: dict[str, int] = {}
    errors = ProtocolErrors(counts, lambda: now)
    for _ in range(3):
        errors("ext-proc-message", 1, "from 192.0.2.7: it cannot be decoded")
    errors("access-log-entry", 2, "from 192.0.2.8: entries cannot be decoded")
    errors("pick-failed", 1, "")
    now = WARN_SECONDS
    errors("ext-proc-message", 1, "from 192.0.2.7: it cannot be decoded")

    assert counts == {"ext-proc-message": 4, "access-log-entry": 2, "pick-failed": 1}
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "from 192.0.2.7: it cannot be decoded (ext-proc-message)",
        "from 192.0.2.8: entries cannot be decoded (access-log-entry)",
        "from 192.0.2.7: it cannot be decoded; 2 others since the last warning (ext-proc-message)",
    ]
