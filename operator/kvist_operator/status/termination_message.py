"""A container's last words: which lines tell, and what they mean. Pure.

Kubelets keep the last 2 KiB (80 lines) of the log, or 4 KiB of what was written to /dev/termination-log:
mostly frames of a traceback. Engines write there what their core processes died of
(``manifests/termination_log.py``): their log ends with a traceback that says only "See root cause above".
"""

import re
from dataclasses import dataclass
from typing import Final

from .known_errors import SAYINGS, remedy

MOST: Final = 400
"""Characters that are shown."""
FALLBACK_LINES: Final = 3

_PREFIX: Final = re.compile(
    r"^(?:\[[\d-]+ [\d:.]+\]\[\d+\]\[\w+\]\[\w+\] \[[^]]*\] )?"
    r"(\([\w-]+( pid=\d+)?\) ?)?"
    r"((INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d \[[^]]*\]\s?)?"
)
"""Envoy's ``[2026-11-21 12:00:00.123][1][critical][main] [source/server/server.cc:430] ``, or vLLM's
``(EngineCore pid=123) ERROR 11-21 12:00:00 [core.py:99] ``."""
_NOISE: Final = re.compile(
    r"^\s*(File \"|[\^~]+\s*$|Traceback \(most recent call last\)|During handling of|The above exception was"
    r"|usage:|warnings\.warn|nanobind:|\[rank\d+\]:\s*$)|leaked (shared_memory|semaphore)"
)
_RAISED: Final = re.compile(
    r"^[A-Za-z_][\w.]*(Error|Exception|Refused|Exit|Timeout|Interrupt)\b(:|$)|\berror: "
)
_LOGGED: Final = re.compile(
    r"\(<class '(?P<kind>[\w.]+)'>, (?P<shown>.*), <traceback object at 0x[0-9a-f]+>\)\s*$"
)
"""An exception as ``manifests/termination_log.py`` has it written."""
_ADVICE: Final = re.compile(
    r"\s*\b(Try (increasing|lowering|setting)|See https?:|For further information|Decrease GPU memory"
    r"|Check your internet|If this is a private|Please update your)(?:(?!\.(\s|$)).)*\.?(?=\s|$)"
)
"""Sentences that name vLLM's flags and others' pages: ours name the field."""
_ELSEWHERE: Final = re.compile(
    r"See root cause above|See stack trace for (the )?root cause|WorkerProc initialization failed"
    r"|EngineDeadError|EngineCore encountered an issue|CancelledError|SystemExit|KeyboardInterrupt"
)
"""Said by those who only noticed."""

_SECRETS: Final = (
    (re.compile(r"\bhf_[A-Za-z0-9]{6,}"), "hf_…"),
    (re.compile(r"\b(sk|nvapi|ghp|gho|github_pat|glpat|xox[abp])[-_][A-Za-z0-9_-]{8,}"), r"\1-…"),
    (re.compile(r"\bAKIA[0-9A-Z]{12,}"), "AKIA…"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}(\.[A-Za-z0-9_-]*){0,2}"), "eyJ…"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), r"\1 …"),
    (re.compile(r"(://)[^/\s:@]*:[^/\s@]+@"), r"\1…@"),
    (
        re.compile(
            r"(?i)((?:token|password|passwd|secret|api[-_]?key|access[-_]?key|credential)s?[\"']?\s*[=:]\s*)"
            r"[\"']?(?!None|True|False|\s|\d{1,9}(?:[\s,;.)]|$))[^\s\"',;)]{4,}[\"']?"
        ),
        r"\1…",
    ),
)


@dataclass(frozen=True, slots=True)
class LastWords:
    """Last error of a container."""

    words: str
    """The telling lines as one, without secrets; empty when it said nothing."""
    reason: str = ""
    """Of the condition, where the words are known."""
    remedy: str = ""


def last_words(text: str) -> LastWords:
    """The lines that tell, and what they mean where they are known."""
    lines = _lines(masked(text))
    whole = "\n".join(line.text for line in lines)
    for saying in SAYINGS:
        found = saying.pattern.search(whole)
        if found:
            said = saying.words or _around(lines, whole.count("\n", 0, found.start()))
            return LastWords(_told(said), saying.reason, remedy(saying, found))
    return LastWords(_told(_telling(lines)))


def _told(words: str) -> str:
    return shortened(_ADVICE.sub("", shortened(words, len(words) + 1)))


def masked(text: str) -> str:
    """Without what looks like a token or a password."""
    for pattern, put in _SECRETS:
        text = pattern.sub(put, text)
    return text


def shortened(text: str, most: int = MOST) -> str:
    """On one line, without a full stop, and not too long: the beginning, which says what it is."""
    found = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return found.rstrip(".") if len(found) <= most else f"{found[: most - 1].rstrip('.… ')}…"


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    whole: bool = False
    """A record that was logged on one line: no other line goes on with it."""

    @property
    def raised(self) -> bool:
        return self.whole or bool(_RAISED.search(self.text))


def _lines(text: str) -> list[_Line]:
    """Without prefixes, frames of tracebacks and the code they quote."""
    kept: list[_Line] = []
    quoted = False
    for raw in text.splitlines():
        line = _PREFIX.sub("", raw).rstrip()
        noise = _NOISE.search(line)
        if not noise and line and not (quoted and line.startswith("    ")):
            kept.append(_plain(line))
        quoted = line.lstrip().startswith('File "') or (quoted and line.startswith("    "))
    return kept


def _plain(line: str) -> _Line:
    """An exception that was logged as a tuple, as Python would have printed it."""
    found = _LOGGED.search(line)
    if not found:
        return _Line(line.removesuffix(" None"), line.endswith(" None"))
    kind = found["kind"].rpartition(".")[2]
    shown = found["shown"].removeprefix(f"{kind}(").removesuffix(")").strip("\"'").replace("\\n", " ")
    return _Line(f"{kind}: {shown}", whole=True)


def _around(lines: list[_Line], index: int) -> str:
    """The sentence that a line belongs to: back to where it was raised, and on to the next one."""
    before = range(index, max(-1, index - FALLBACK_LINES - 1), -1)
    return _message(lines, next((i for i in before if lines[i].raised), index))


def _message(lines: list[_Line], begin: int) -> str:
    """A line and those that go on with it."""
    if lines[begin].whole:
        return lines[begin].text
    after = range(begin + 1, len(lines))
    end = next((i for i in after if lines[i].raised), len(lines))
    return " ".join(line.text for line in lines[begin : min(end, begin + 6)])


def _telling(lines: list[_Line]) -> str:
    """The first exception that is not about another one, else the last lines."""
    raised = [i for i, line in enumerate(lines) if line.raised]
    own = [i for i in raised if not _ELSEWHERE.search(lines[i].text)]
    chosen = own[:1] or raised[-1:]
    return _message(lines, chosen[0]) if chosen else " ".join(line.text for line in lines[-FALLBACK_LINES:])
