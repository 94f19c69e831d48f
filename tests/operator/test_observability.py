"""Log lines have the keys of the picker's log."""

import json
import logging
from collections.abc import Iterator

import pytest

from kvist_operator.process import observability as logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restore the root logger."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_is_json_with_the_keys_of_the_picker() -> None:
    """An error is logged with its traceback in one line."""
    told = (ValueError, ValueError("of what"), None)
    record = logging.LogRecord("a.b", logging.ERROR, "", 0, "said %s", ("so",), told)
    found = json.loads(logs.JsonFormatter().format(record))

    assert {key: found[key] for key in ("level", "event", "logger")} == {
        "level": "error",
        "event": "said so",
        "logger": "a.b",
    }
    assert found["ts"].endswith("Z")
    assert "ValueError: of what" in found["error"]


def test_a_level_hides_what_is_below_it() -> None:
    """Libraries log only warnings."""
    logs.configure_logging("warning", "json")

    assert not logging.getLogger("kvist_operator").isEnabledFor(logging.INFO)
    assert not logging.getLogger("aiohttp").isEnabledFor(logging.INFO)
    assert not logging.getLogger("kopf").isEnabledFor(logging.ERROR)
