"""The log: one canonical line per request, and the records of ``logging`` in the same form.

Lines are JSON unless stderr is a terminal. Prompt text is in no line without ``--debug-text``, and values
that clients choose are truncated.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from typing import Final

import msgspec

MAX_TEXT: Final = 200
"""Length limit of values that a client chooses (path, model, session), and of a prompt with
``--debug-text``."""

_COLOURS: Final = {"debug": 2, "info": 36, "warning": 33, "error": 31, "critical": 31}
_ENCODER: Final = msgspec.json.Encoder()


class LogWriter:
    """Writes lines to a file descriptor through a bounded queue and a thread.

    The event loop never waits for the reader. Lines beyond ``limit`` are dropped and counted.
    """

    GATHER_SECONDS: Final = 0.05
    """Time for which lines are collected before a write: each wake-up of the thread takes the interpreter
    lock from the event loop."""

    def __init__(
        self, fd: int = 2, *, limit: int = 10_000, dropped_line: Callable[[int], bytes] | None = None
    ) -> None:
        """``dropped_line`` returns the line that says how many lines were dropped."""
        self.dropped = 0
        """Lines dropped since the start."""
        self._fd = fd
        self._limit = limit
        self._dropped_line = dropped_line
        self._lines: deque[bytes] = deque()
        self._wakeup = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvist-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue one line, without its newline. Never blocks, and may be called by any thread."""
        if len(self._lines) >= self._limit:
            self.dropped += 1
            return
        self._lines.append(line)
        if not self._wakeup.is_set():
            self._wakeup.set()

    def close(self, timeout: float = 1.0) -> None:
        """Write what is queued, for at most ``timeout`` seconds; later lines are lost."""
        self._closing.set()
        self._wakeup.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        reported = 0
        while not (self._closing.is_set() and not self._lines):
            self._wakeup.wait()
            self._closing.wait(self.GATHER_SECONDS)
            self._wakeup.clear()
            # Taken by loops in C: while this thread has the interpreter lock, no request is served.
            lines = list(islice(iter(self._lines.popleft, None), len(self._lines)))
            lost, reported = self.dropped - reported, self.dropped
            if lost and self._dropped_line:
                lines.append(self._dropped_line(lost))
            self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        view = memoryview(b"\n".join([*lines, b""]))
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # another process made the pipe non-blocking, and the reader is slow
                if self._closing.wait(self.GATHER_SECONDS):
                    return
            except OSError:  # stderr is closed
                self.dropped += len(lines)
                return


class RequestLine(msgspec.Struct, kw_only=True):
    """Fields of the log line of one request; each line has all of them but those of a trace."""

    id: str
    """``x-request-id``, or an id that the picker made."""
    session: str
    path: str
    kind: str
    """One of chat, completion, responses, messages, pooling, other."""
    outcome: str
    """``picked``, or the reason of a PickError."""
    mode: str = ""
    """One of precise, approximate, load."""
    model: str | None = None
    endpoint: str | None = None
    """First endpoint of the answer, as ``ip:port``."""
    prompt_bytes: int = 0
    matched_bytes: int = 0
    matched_tokens: int = 0
    predicted_ttft_ms: float | None = None
    cost: Mapping[str, float] = {}
    """Seconds by term of the cost of the endpoint answered first; empty without one."""
    candidates: int = 0
    """Number of endpoints considered."""
    priority: int = 0
    waited_ms: float = 0.0
    """Time in the queue, for capacity or for a first endpoint."""
    us: dict[str, int] = {}
    """Microseconds by stage (``Stages.microseconds``)."""
    text: str | None = None
    """First characters of the prompt, only with ``--debug-text``; set by ``RequestLog``."""
    trace_id: str | msgspec.UnsetType = msgspec.UNSET
    """Trace that the request belongs to, sampled or not; without one the line has no such field."""
    span_id: str | msgspec.UnsetType = msgspec.UNSET
    """Span of the pick in that trace, or the caller's if the pick has none."""


class RequestLog:
    """Writes the lines of requests."""

    def __init__(
        self,
        writer: LogWriter,
        *,
        json: bool = True,
        enabled: bool = True,
        debug_text: bool = False,
        colour: bool = False,
    ) -> None:
        self.enabled = enabled
        """Whether lines are written; if not, callers need not make them."""
        self._writer = writer
        self._json = json
        self._debug_text = debug_text
        self._colour = colour

    def write(self, line: RequestLine, *, prompt: bytes = b"") -> None:
        """Log one request; no part of ``prompt`` is written without ``--debug-text``."""
        if not self.enabled:
            return
        line.text = prompt[: 4 * MAX_TEXT].decode(errors="replace")[:MAX_TEXT] if self._debug_text else None
        chosen = f"{line.id}{line.session}{line.path}{line.model}"
        if len(chosen) > MAX_TEXT or not chosen.isascii():  # rarely
            _truncate(line)
        if self._json:
            self._writer.write(
                b'{"ts":"%s","level":"info","event":"request",%s' % (_now(), _ENCODER.encode(line)[1:])
            )
        else:
            self._writer.write(_text_line(line, self._colour))


def _text_line(line: RequestLine, colour: bool) -> bytes:
    matched = f"{line.matched_bytes:,}/{line.prompt_bytes:,} B"
    ttft = "" if line.predicted_ttft_ms is None else f"ttft {line.predicted_ttft_ms:.0f} ms"
    parts = [
        f"{line.outcome:<10} {line.kind:<10} {line.endpoint or '-':<21} {line.mode:<11}",
        f"{matched:>19} {line.matched_tokens:>7,} tok {ttft:>14} {sum(line.us.values()):>6} us  {line.id}",
    ]
    if line.waited_ms:
        parts.append(f"waited {line.waited_ms:.0f} ms")
    if line.trace_id:
        parts.append(f"trace {line.trace_id}")
    if line.text is not None:
        parts.append(repr(line.text))
    return _row("info", " ".join(parts), colour)


def _row(level: str, text: str, colour: bool) -> bytes:
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    shown = f"\x1b[{_COLOURS.get(level, 0)}m{level:<7}\x1b[0m" if colour else f"{level:<7}"
    clock = datetime.now().astimezone().strftime("%H:%M:%S.%f")[:-3]
    return f"{clock} {shown} {printable}".encode(errors="replace")


def _now() -> bytes:
    """Return the time as ``2026-11-23T20:43:23.120Z``."""
    seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    return b"%s.%03dZ" % (_second(seconds), nanoseconds // 1_000_000)


@lru_cache(maxsize=2)
def _second(seconds: int) -> bytes:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode()


def _truncate(line: RequestLine) -> None:
    """Shorten the values that the client chose, and make them encodable."""
    for name in ("id", "session", "path", "model"):
        if value := getattr(line, name):
            setattr(line, name, _replace_surrogates(value[:MAX_TEXT]))


def _replace_surrogates(text: str) -> str:
    """Replace the lone surrogates that headers have where they are not UTF-8."""
    return text.encode(errors="replace").decode()


class LogFormatter(logging.Formatter):
    """Formats a record as a JSON object, or as a row of text.

    ``extra={"fields": {...}}`` adds keys to the object.
    """

    def __init__(self, *, json: bool, colour: bool = False) -> None:
        super().__init__()
        self._json = json
        self.colour = colour

    def line(self, record: logging.LogRecord) -> bytes:
        """Return the record as one line of JSON, or as a row and its traceback, in UTF-8."""
        level, text = record.levelname.lower(), _replace_surrogates(record.getMessage())
        error = self.formatException(record.exc_info) if record.exc_info else ""
        if not self._json:
            return _row(level, f"{record.name}: {text}" + (f"\n{error}" if error else ""), self.colour)
        document = {"ts": _now().decode(), "level": level, "event": text, "logger": record.name}
        if error:
            document["error"] = _replace_surrogates(error)
        return _ENCODER.encode(document | getattr(record, "fields", {}))


class LogHandler(logging.Handler):
    """Passes records to the writer."""

    def __init__(self, writer: LogWriter, formatter: LogFormatter) -> None:
        super().__init__()
        self._writer = writer
        self._lines = formatter

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record; report one that cannot be formatted as ``logging`` does."""
        try:
            self._writer.write(self._lines.line(record))
        except (TypeError, ValueError, msgspec.MsgspecError):
            self.handleError(record)


@dataclass(frozen=True, slots=True)
class Logs:
    """Open log of a running picker."""

    writer: LogWriter
    requests: RequestLog
    _handler: LogHandler

    def close(self) -> None:
        """Write what is queued and remove the handler."""
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
    """Send all records of ``logging`` and the request lines to ``fd``, by default that of stderr.

    ``form`` is ``json``, ``text``, or ``auto``: text on a terminal, else JSON. Only a terminal gets colours,
    and not if ``NO_COLOR`` is set.
    """
    fd = sys.stderr.fileno() if fd is None else fd
    terminal = os.isatty(fd)
    json = form == "json" or (form == "auto" and not terminal)
    formatter = LogFormatter(json=json, colour=terminal and not os.environ.get("NO_COLOR"))
    writer = LogWriter(fd, dropped_line=lambda lost: formatter.line(_dropped_record(lost)))
    handler = LogHandler(writer, formatter)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())
    enabled = requests and root.isEnabledFor(logging.INFO)
    request_log = RequestLog(
        writer, json=json, enabled=enabled, debug_text=debug_text, colour=formatter.colour
    )
    return Logs(writer, request_log, handler)


def _dropped_record(lines: int) -> logging.LogRecord:
    text = f"{lines} log lines were dropped because stderr is slow"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
