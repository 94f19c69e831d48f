"""Log lines as the picker's: JSON unless stderr is a terminal, with the same keys."""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Final

QUIET: Final = ("aiohttp", "httpx", "httpcore", "filelock", "huggingface_hub", "urllib3")
"""Libraries whose everyday lines are nobody's concern."""


class JsonFormatter(logging.Formatter):
    """A record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """``ts``, ``level``, ``event``, ``logger``, and ``error`` with a traceback where there is one."""
        document = {
            "ts": datetime.now(UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
        }
        if record.exc_info:
            document["error"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """A row for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")


def configure(level: str, form: str) -> None:
    """Send all records to stderr; ``form``: ``json``, ``text``, or ``auto``: text on a terminal."""
    as_json = form == "json" or (form == "auto" and not os.isatty(sys.stderr.fileno()))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level != "debug":
        logging.getLogger("kopf").setLevel(logging.CRITICAL)  # what ends it, ``handlers`` tells in one line
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING if level != "debug" else logging.INFO)
