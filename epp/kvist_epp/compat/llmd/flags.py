"""Translate llm-d's flags that kvist-epp does not have under the same name."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist_epp.errors import SettingsError

from .config import byte_amount, read

_TRUE: Final = ("true", "1", "t")
_DEBUG: Final = 4
"""Verbosity from which llm-d logs what kvist logs at the level debug."""
_FORMATS: Final = {"json": "json", "console": "text"}
_TLS: Final = {"VersionTLS10": "1.2", "VersionTLS11": "1.2", "VersionTLS12": "1.2", "VersionTLS13": "1.3"}


@dataclass(frozen=True, slots=True)
class Translated:
    """A command line of kvist-epp."""

    argv: list[str]
    notes: tuple[str, ...]
    """Flags and plugins that are not supported, each with what happens instead."""


@dataclass(frozen=True, slots=True)
class _LlmdFlag:
    """A flag of llm-d's router."""

    note: str = ""
    """Description of what happens instead; empty if nothing is lost."""
    switch: bool = False
    """Whether the value is true or false, and never the next word; false requests nothing."""
    translate: Callable[[str], str] | None = None
    """Returns the flag of kvist-epp for a value. Raises ValueError."""


def _level(text: str) -> str:
    if text in ("debug", "info", "error"):
        return f"--log-level={text}"
    return f"--log-level={'debug' if int(text) >= _DEBUG else 'info'}"


def _switch(note: str = "") -> _LlmdFlag:
    return _LlmdFlag(note, switch=True)


_METRIC_NAMES: Final = _LlmdFlag("ignored: kvist reads the metrics under vLLM's own names")
_PLAIN_METRICS: Final = (
    "the metrics port is plaintext without authentication: restrict it with a NetworkPolicy"
)

FLAGS: Final[dict[str, _LlmdFlag]] = {
    "allow-experimental-plugins": _switch(),
    "cache-info-metric": _METRIC_NAMES,
    "disable-endpoint-subset-filter": _switch("the gateway's endpoint subset is always respected"),
    "emit-endpoint-scores": _switch("/debug/pick shows the cost of each endpoint"),
    "enable-cert-reload": _switch(),
    "enable-grpc-stream-metrics": _switch(),
    "enable-pprof": _switch("ignored: kvist has no profiler"),
    "grpc-max-recv-msg-size": _LlmdFlag(translate=lambda text: f"--max-message-bytes={byte_amount(text)}"),
    "grpc-max-send-msg-size": _LlmdFlag(
        "ignored: answers are about as large as requests, which have a limit"
    ),
    "ha-enable-leader-election": _switch("all replicas serve; --replicas lets them share their load"),
    "health-checking": _switch(),
    "kv-cache-usage-percentage-metric": _METRIC_NAMES,
    "lora-info-metric": _METRIC_NAMES,
    "metrics-cert-dir": _LlmdFlag(_PLAIN_METRICS),
    "metrics-client-ca-file": _LlmdFlag(_PLAIN_METRICS),
    "metrics-endpoint-auth": _switch(_PLAIN_METRICS),
    "metrics-staleness-threshold": _LlmdFlag("an engine whose metrics cannot be read is not picked"),
    "refresh-metrics-interval": _LlmdFlag(
        "load is tracked without scraping; --scrape-interval sets how often it is corrected"
    ),
    "refresh-prometheus-metrics-interval": _LlmdFlag(),
    "tls-cipher-suites": _LlmdFlag("ignored: OpenSSL's default is used"),
    "tls-min-version": _LlmdFlag(translate=lambda text: f"--tls-min-version={_TLS.get(text, text)}"),
    "total-queued-requests-metric": _METRIC_NAMES,
    "total-running-requests-metric": _METRIC_NAMES,
    "tracing": _switch("ignored: traces are on if --trace-endpoint or OTEL_EXPORTER_OTLP_ENDPOINT is set"),
    "v": _LlmdFlag(translate=_level),
    "zap-devel": _switch(),
    "zap-encoder": _LlmdFlag(translate=lambda text: f"--log-format={_FORMATS.get(text, text)}"),
    "zap-log-level": _LlmdFlag(translate=_level),
    "zap-stacktrace-level": _LlmdFlag(),
    "zap-time-encoding": _LlmdFlag(),
}
_FILES: Final = {"config-file": _LlmdFlag(), "config-text": _LlmdFlag()}


def translated(argv: Sequence[str]) -> Translated:
    """Return kvist-epp's command line: the file's values first, so that flags win. Raises SettingsError."""
    words, first, rest, notes = iter(argv), [], [], []
    for word in words:
        name, sign, text = word.lstrip("-").partition("=")
        flag = {**FLAGS, **_FILES}.get(name) if word.startswith("-") else None
        if flag is None:
            rest.append(word)
            continue
        value = text if sign else _following(name, flag, words)
        if name in _FILES:
            found = read(_text(name, value), f"--{name}")
            first += found.argv
            notes += found.notes
        elif flag.translate:
            rest.append(_translate(name, flag.translate, value))
        elif flag.note and not (flag.switch and value.lower() not in _TRUE):
            notes.append(f"--{name}: {flag.note}")
    return Translated([*first, *rest], tuple(notes))


def _following(name: str, flag: _LlmdFlag, words: Iterator[str]) -> str:
    value = "true" if flag.switch else next(words, None)
    if value is None:
        raise SettingsError(f"--{name}: needs a value")
    return value


def _translate(name: str, translate: Callable[[str], str], value: str) -> str:
    try:
        return translate(value)
    except ValueError as error:
        raise SettingsError(f"--{name}: {value!r} cannot be read: {error}") from error


def _text(name: str, value: str) -> str:
    if name == "config-text":
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config-file: cannot be read: {error}") from error
