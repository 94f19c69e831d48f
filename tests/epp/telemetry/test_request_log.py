"""The log: request lines, records, what never gets into them, and a stderr that is not read."""

import json
import logging
import os
import pty
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.epp.telemetry.request_lines import line

from kvist_epp.telemetry.request_log import Logs, LogWriter, RequestLog, configure

SECRET = "a secret prompt, long enough"


@pytest.fixture
def root() -> Iterator[None]:
    """Restore the root logger's level after the test."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


class Log:
    """A configured log that writes to a file."""

    def __init__(self, path: Path, **options: object) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self.logs: Logs = configure(fd=self._fd, **options)  # type: ignore[arg-type]

    def lines(self) -> list[str]:
        """Close the log and return its lines."""
        self.logs.close()
        os.close(self._fd)
        return self._path.read_text().splitlines()


@pytest.mark.usefixtures("root")
def test_a_request_is_one_line_with_every_field(tmp_path: Path) -> None:
    """The line of a request has every field, and no prompt text."""
    log = Log(tmp_path / "log")
    log.logs.requests.write(line(), prompt=SECRET.encode())
    (text,) = log.lines()
    document = json.loads(text)
    stamp = document.pop("ts")

    assert (len(stamp), stamp[10], stamp[-1]) == (24, "T", "Z")
    assert document == {
        "level": "info",
        "event": "request",
        "id": "r1",
        "session": "s1",
        "path": "/v1/chat/completions",
        "kind": "chat",
        "outcome": "picked",
        "mode": "precise",
        "model": "m",
        "endpoint": "10.0.0.1:8000",
        "prompt_bytes": 1000,
        "matched_bytes": 640,
        "matched_tokens": 160,
        "predicted_ttft_ms": 35.5,
        "cost": {"wait": 0.25, "work": 0.5, "copy": 0.0},
        "candidates": 4,
        "priority": 0,
        "waited_ms": 0.0,
        "us": {"parse": 12, "match": 30},
        "text": None,
    }


@pytest.mark.usefixtures("root")
def test_debug_text_adds_the_first_characters_of_the_prompt(tmp_path: Path) -> None:
    """With --debug-text the first 200 characters are in the line, and not one more."""
    log = Log(tmp_path / "log", debug_text=True)
    log.logs.requests.write(line(), prompt="é".encode() * 500)

    assert json.loads(log.lines()[0])["text"] == "é" * 200


@pytest.mark.usefixtures("root")
def test_values_of_clients_are_truncated_and_made_valid(tmp_path: Path) -> None:
    """A model name of a megabyte, or a header that is not UTF-8, leaves a short and valid line."""
    log = Log(tmp_path / "log")
    log.logs.requests.write(line(model="x" * 1_000_000, id="a\udcff", session="s\n\x1b[2J"))
    (text,) = log.lines()
    document = json.loads(text)

    assert (len(document["model"]), document["id"], document["session"]) == (200, "a?", "s\n\x1b[2J")


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("options", [{"requests": False}, {"level": "warning"}])
def test_request_lines_can_be_turned_off(tmp_path: Path, options: dict[str, object]) -> None:
    """Without --log-requests, or above level info, there is no line, and callers can know it."""
    log = Log(tmp_path / "log", **options)
    log.logs.requests.write(line())

    assert (log.logs.requests.enabled, log.lines()) == (False, [])


@pytest.mark.usefixtures("root")
def test_records_of_logging_take_the_same_form(tmp_path: Path) -> None:
    """Records are JSON lines with level, logger, extra fields and the traceback in one line."""
    log = Log(tmp_path / "log")
    logger = logging.getLogger("kvist_epp.test")
    logger.info("hello %s", "world", extra={"fields": {"n": 1}})
    logger.debug("not shown")
    try:
        int("broken")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, log.lines())
    del first["ts"]

    assert first == {"level": "info", "event": "hello world", "logger": "kvist_epp.test", "n": 1}
    assert (second["level"], second["error"].splitlines()[-1]) == (
        "error",
        "ValueError: invalid literal for int() with base 10: 'broken'",
    )


@pytest.mark.usefixtures("root")
def test_a_terminal_gets_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal lines are short, coloured, and free of control characters of clients."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    reader, terminal = pty.openpty()
    logs = configure(fd=terminal)
    logs.requests.write(line(id="r1\x1b[2J"))
    logging.getLogger("kvist_epp.test").warning("look")
    logs.close()
    text = os.read(reader, 10_000).decode()
    os.close(terminal)
    os.close(reader)

    assert "10.0.0.1:8000" in text
    assert "640/1,000 B" in text
    assert "r1?[2J" in text
    assert "\x1b[33mwarning\x1b[0m kvist_epp.test: look" in text


def test_rows_contain_prompt_text_only_on_request() -> None:
    """The text form contains no prompt without --debug-text either."""
    reader, end = os.pipe()
    writer = LogWriter(end)
    RequestLog(writer, json=False).write(line(), prompt=SECRET.encode())
    RequestLog(writer, json=False, debug_text=True).write(line(), prompt=SECRET.encode())
    writer.close()
    rows = os.read(reader, 10_000).decode().splitlines()
    os.close(reader)
    os.close(end)

    assert [SECRET in row for row in rows] == [False, True]


def test_a_reader_that_sleeps_costs_lines_not_time() -> None:
    """If stderr is not read, writing continues, lines beyond the bound are counted, and the count is
    logged."""
    reader, end = os.pipe()
    writer = LogWriter(end, limit=50, dropped_line=lambda lost: b"lost %d" % lost)
    text = b"x" * 10_000
    for _ in range(200):
        writer.write(text)
    dropped = writer.dropped
    drained: list[bytes] = []
    thread = threading.Thread(target=lambda: drained.extend(iter(lambda: os.read(reader, 1 << 20), b"")))
    thread.start()
    writer.close(timeout=20)
    os.close(end)
    thread.join()
    os.close(reader)
    lines = b"".join(drained).splitlines()

    assert dropped >= 100
    assert lines.count(text) == 200 - dropped
    assert sum(int(line.split()[1]) for line in lines if line != text) == dropped


def test_a_reader_that_has_gone_is_no_error() -> None:
    """A closed stderr loses lines and counts them, and the picker continues."""
    reader, end = os.pipe()
    os.close(reader)
    writer = LogWriter(end)
    writer.write(b"a")
    writer.close()
    os.close(end)

    assert writer.dropped == 1
