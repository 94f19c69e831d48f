"""The lines of the log: one canonical line per request, and the records of ``logging`` in the same form.

JSON unless stderr is a terminal. Prompt text is in no line unless ``--debug-text``, and what clients choose
is cut.
"""

import logging
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from kvist_epp.telemetry.log_writer import Writer

MAX_TEXT: Final = 200
"""Characters of a value that a client chose (path, model, session), and of a prompt with ``--debug-text``."""

_COLOURS: Final = {"debug": 2, "info": 36, "warning": 33, "error": 31, "critical": 31}
_ENCODER: Final = msgspec.json.Encoder()


class RequestLine(msgspec.Struct, kw_only=True):
    """One request, from arrival to answer. Every field is in every line."""

    id: str
    """``x-request-id``, or ours."""
    session: str
    path: str
    kind: str
    """chat, completion, responses, messages, other."""
    outcome: str
    """``picked``, or the reason of a PickError."""
    mode: str = ""
    """precise, approximate, load."""
    model: str | None = None
    endpoint: str | None = None
    """``ip:port`` answered first."""
    prompt_bytes: int = 0
    matched_bytes: int = 0
    matched_tokens: int = 0
    predicted_ttft_ms: float | None = None
    candidates: int = 0
    """Endpoints looked at."""
    priority: int = 0
    waited_ms: float = 0.0
    """In the queue, for room or for a first endpoint."""
    us: dict[str, int] = {}
    """Microseconds by stage (``Stages.microseconds``)."""
    text: str | None = None
    """The prompt's beginning, only with ``--debug-text``: set by ``RequestLog`` alone."""


class RequestLog:
    """Writes the canonical lines."""

    def __init__(
        self,
        writer: Writer,
        *,
        json: bool = True,
        enabled: bool = True,
        debug_text: bool = False,
        colour: bool = False,
    ) -> None:
        self.enabled = enabled
        """False: nothing is written, so callers may save making the line."""
        self._writer = writer
        self._json = json
        self._debug_text = debug_text
        self._colour = colour

    def write(self, line: RequestLine, *, prompt: bytes = b"") -> None:
        """Log one request; nothing of ``prompt`` is written without ``--debug-text``."""
        if not self.enabled:
            return
        line.text = prompt[: 4 * MAX_TEXT].decode(errors="replace")[:MAX_TEXT] if self._debug_text else None
        for name in ("id", "session", "path", "model"):
            value = getattr(line, name)
            if value and not (len(value) <= MAX_TEXT and value.isascii()):
                setattr(line, name, _sound(value[:MAX_TEXT]))
        self._writer.write(_json_line(line) if self._json else _text_line(line, self._colour))


def _json_line(line: RequestLine) -> bytes:
    return b'{"ts":"%s","level":"info","event":"request",' % _now() + _ENCODER.encode(line)[1:]


def _text_line(line: RequestLine, colour: bool) -> bytes:
    matched = f"{line.matched_bytes:,}/{line.prompt_bytes:,} B"
    ttft = "" if line.predicted_ttft_ms is None else f"ttft {line.predicted_ttft_ms:.0f} ms"
    parts = [
        f"{line.outcome:<10} {line.kind:<10} {line.endpoint or '-':<21} {line.mode:<11}",
        f"{matched:>19} {line.matched_tokens:>7,} tok {ttft:>14} {sum(line.us.values()):>6} us  {line.id}",
    ]
    if line.waited_ms:
        parts.append(f"waited {line.waited_ms:.0f} ms")
    if line.text is not None:
        parts.append(repr(line.text))
    return _row("info", " ".join(parts), colour)


def _row(level: str, text: str, colour: bool) -> bytes:
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    shown = f"\x1b[{_COLOURS.get(level, 0)}m{level:<7}\x1b[0m" if colour else f"{level:<7}"
    clock = datetime.now().astimezone().strftime("%H:%M:%S.%f")[:-3]
    return f"{clock} {shown} {printable}".encode(errors="replace")


def _now() -> bytes:
    return datetime.now(UTC).isoformat(timespec="milliseconds")[:-6].encode() + b"Z"


def _sound(text: str) -> str:
    """Without the lone surrogates of headers that were no UTF-8."""
    return text.encode(errors="replace").decode()


class Formatter(logging.Formatter):
    """A record as a JSON object, or as a row for people. ``extra={"fields": {...}}`` adds to the object."""

    def __init__(self, *, json: bool, colour: bool = False) -> None:
        super().__init__()
        self._json = json
        self.colour = colour

    def line(self, record: logging.LogRecord) -> bytes:
        """The record as one line (JSON) or a row and its traceback, UTF-8."""
        level, text = record.levelname.lower(), _sound(record.getMessage())
        error = self.formatException(record.exc_info) if record.exc_info else ""
        if not self._json:
            return _row(level, f"{record.name}: {text}" + (f"\n{error}" if error else ""), self.colour)
        document = {"ts": _now().decode(), "level": level, "event": text, "logger": record.name}
        if error:
            document["error"] = _sound(error)
        return _ENCODER.encode(document | getattr(record, "fields", {}))


class Handler(logging.Handler):
    """Hands records to the writer."""

    def __init__(self, writer: Writer, formatter: Formatter) -> None:
        super().__init__()
        self._writer = writer
        self._lines = formatter

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record; a record that cannot be formatted says so."""
        try:
            self._writer.write(self._lines.line(record))
        except (TypeError, ValueError, msgspec.MsgspecError):
            self.handleError(record)


@dataclass(frozen=True, slots=True)
class Logs:
    """The log while the picker runs."""

    writer: Writer
    requests: RequestLog
    _handler: Handler

    def close(self) -> None:
        """Write what is queued and take the handler off."""
        logging.getLogger().removeHandler(self._handler)
        self.writer.close()


def configure(
    *,
    level: str = "info",
    form: str = "auto",
    requests: bool = True,
    debug_text: bool = False,
    fd: int | None = None,
) -> Logs:
    """Send all records of ``logging`` and the request lines to ``fd`` (stderr's own by default).

    ``form``: ``json``, ``text``, or ``auto``: text on a terminal. Colours only there, and not with
    ``NO_COLOR``.
    """
    fd = sys.stderr.fileno() if fd is None else fd
    terminal = os.isatty(fd)
    json = form == "json" or (form == "auto" and not terminal)
    formatter = Formatter(json=json, colour=terminal and not os.environ.get("NO_COLOR"))
    writer = Writer(fd, told=lambda lost: formatter.line(_lost(lost)))
    handler = Handler(writer, formatter)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())
    enabled = requests and root.isEnabledFor(logging.INFO)
    request_log = RequestLog(
        writer, json=json, enabled=enabled, debug_text=debug_text, colour=formatter.colour
    )
    return Logs(writer, request_log, handler)


def _lost(lines: int) -> logging.LogRecord:
    text = f"{lines} log lines were dropped: stderr is slow"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
