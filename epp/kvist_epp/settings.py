"""The picker's settings: one frozen object, to and from the command line.

Standard library only, because the operator renders the picker's arguments from it:
``Settings.from_args(s.to_args()) == s`` for every ``s``. Each flag can also be given as an environment
variable ``KVIST_EPP_<FLAG>`` (dashes as underscores); the command line wins, an empty one is none.
"""

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from .errors import SettingsError

ENVIRONMENT_PREFIX: Final = "KVIST_EPP_"
TRANSPORTS: Final = ("fast", "grpc")
LOG_FORMATS: Final = ("auto", "json", "text")

EPILOG: Final = """\
examples:
  # two engines from a file, model files from a folder, no TLS
  kvist-epp --endpoints-file endpoints.yaml --model ./qwen3 --secure-serving=false

  # tokenizer files from the hub at a revision, JSON logs on a terminal too
  kvist-epp --endpoints-file endpoints.yaml --model hf://Qwen/Qwen3-32B@main \\
      --secure-serving=false --log-format json

  # where would this request go, and why?
  curl -s localhost:9090/debug/pick -H 'x-kvist-path: /v1/chat/completions' -d @request.json
"""


def _flag(default: Any, text: str, *, choices: tuple[str, ...] | None = None, unit: str = "") -> Any:
    return field(default=default, metadata={"help": text, "choices": choices, "unit": unit})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be chosen. Field ``a_b`` is the flag ``--a-b``."""

    endpoints_file: str = _flag("", "YAML or JSON list of the engines; reread when it changes", unit="FILE")
    model: str = _flag(
        "",
        "folder or hf://repo[@revision] with the tokenizer files; without: approximate mode",
        unit="SOURCE",
    )
    host: str = _flag("", "address to listen on (default: every address, IPv4 and IPv6)", unit="ADDRESS")
    grpc_port: int = _flag(9002, "ext_proc, access log and health", unit="PORT")
    grpc_health_port: int = _flag(9003, "gRPC health alone", unit="PORT")
    metrics_port: int = _flag(9090, "/metrics, /healthz, /debug/…", unit="PORT")
    secure_serving: bool = _flag(True, "serve TLS; not there yet, so --secure-serving=false is required")
    transport: str = _flag(
        "fast", "fast = our own HTTP/2; grpc = grpc.aio, the slower twin and fallback", choices=TRANSPORTS
    )
    observe_responses: bool = _flag(False, "keep the ext_proc stream open and echo responses")
    drain_seconds: float = _flag(30.0, "time that running streams get on SIGTERM", unit="SECONDS")
    max_message_bytes: int = _flag(
        33 << 20, "largest gRPC message taken: a request body of 32 MiB and what is around it", unit="BYTES"
    )
    scrape_interval: float = _flag(2.0, "time between two reads of each engine's /metrics", unit="SECONDS")
    scrape_timeout: float = _flag(2.0, "time one read of an engine's /metrics may take", unit="SECONDS")
    kv_events: bool = _flag(True, "follow the engines' KV events; false = approximate mode for all")
    kv_events_bind: str = _flag(
        "", "ZMQ address to bind for engines that connect, instead of connecting to each", unit="ADDRESS"
    )
    warm_seconds: float = _flag(
        20.0, "longest wait for the index to fill (replay) before the picker says it is ready", unit="SECONDS"
    )
    prefill_tokens_per_second: float = _flag(
        15_928.0, "prefill rate of an engine until its own is learned (Qwen3-32B on an H100)", unit="RATE"
    )
    max_num_seqs: int = _flag(
        256, "sequences an engine runs at once, where no kvist.dev/max-num-seqs label tells", unit="N"
    )
    max_endpoints: int = _flag(3, "endpoints named per answer: the pick, then those for retries", unit="N")
    request_seconds: float = _flag(
        600.0, "a request that shows no sign of life for this long is taken off the books", unit="SECONDS"
    )
    approximate_cache_tokens: int = _flag(
        250_000, "cache of an engine in approximate mode until it reports its own size", unit="TOKENS"
    )
    log_format: str = _flag("auto", "auto = text on a terminal, else JSON", choices=LOG_FORMATS)
    log_level: str = _flag(
        "info", "least severe level that is logged", choices=("debug", "info", "warning", "error")
    )
    log_requests: bool = _flag(True, "one line per request")
    debug_text: bool = _flag(False, "let prompt text into logs and debug pages")

    def __post_init__(self) -> None:
        for port in ("grpc_port", "grpc_health_port", "metrics_port"):
            if not 0 <= getattr(self, port) <= 65_535:
                raise SettingsError(f"--{_dashed(port)}: {getattr(self, port)} is not a port (0 to 65535)")
        for f in dataclasses.fields(self):
            if isinstance(f.default, float) and not math.isfinite(getattr(self, f.name)):
                raise SettingsError(f"--{_dashed(f.name)}: {getattr(self, f.name)} is no time or rate")
        for name in ("scrape_interval", "scrape_timeout", "prefill_tokens_per_second", "request_seconds"):
            if getattr(self, name) <= 0:
                raise SettingsError(f"--{_dashed(name)}: must be above zero")
        for name in ("max_num_seqs", "max_endpoints", "max_message_bytes", "approximate_cache_tokens"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{_dashed(name)}: must be at least 1")
        for name in ("drain_seconds", "warm_seconds"):
            if getattr(self, name) < 0:
                raise SettingsError(f"--{_dashed(name)}: must not be negative")

    def check(self) -> Self:
        """What only matters when the picker is really started. Raises SettingsError."""
        if self.secure_serving:
            raise SettingsError(
                "--secure-serving: TLS is not there yet; start with --secure-serving=false and keep the port "
                "inside the cluster"
            )
        if not self.endpoints_file:
            raise SettingsError("--endpoints-file: name the file that lists the engines")
        return self

    def to_args(self) -> list[str]:
        """The shortest command line that gives these settings."""
        return [
            f"--{_dashed(f.name)}={_written(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]

    @classmethod
    def from_args(cls, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Self:
        """Settings of a command line; argparse exits 2 on what it cannot read. Raises SettingsError."""
        given = {word.partition("=")[0] for word in argv}
        read = {} if given & {"-h", "--help"} else environment or {}
        used = {name: text for name, text in read.items() if text and _flag_of(name) not in given}
        parsed = _parser(cls, used).parse_args(list(argv))
        return cls(**vars(parsed))


def _flag_of(variable: str) -> str:
    return f"--{_dashed(variable.removeprefix(ENVIRONMENT_PREFIX).lower())}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _parser(cls: type[Settings], environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvist-epp",
        description="Endpoint picker: sends each request to the engine that already holds its prefix.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for f in dataclasses.fields(cls):
        _add(parser, f, environment)
    return parser


def _add(parser: argparse.ArgumentParser, f: dataclasses.Field[Any], environment: Mapping[str, str]) -> None:
    convert = _boolean if isinstance(f.default, bool) else type(f.default)
    options: dict[str, Any] = {"type": convert, "default": f.default, "help": _help(f)}
    variable = ENVIRONMENT_PREFIX + f.name.upper()
    if variable in environment:
        options["default"] = _from_environment(convert, variable, environment[variable], f)
    if f.metadata["choices"]:
        options["choices"] = f.metadata["choices"]
    elif isinstance(f.default, bool):
        options |= {"nargs": "?", "const": True, "metavar": "true|false"}
    else:
        options["metavar"] = f.metadata["unit"]
    parser.add_argument(f"--{_dashed(f.name)}", **options)


def _help(f: dataclasses.Field[Any]) -> str:
    shown = f.default != ""
    return str(f.metadata["help"]).replace("%", "%%") + (
        f" (default: {_written(f.default)})" if shown else ""
    )


def _from_environment(convert: Any, variable: str, text: str, f: dataclasses.Field[Any]) -> Any:
    try:
        value = convert(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise SettingsError(f"{variable}: {text!r} is not a {type(f.default).__name__}") from error
    if f.metadata["choices"] and value not in f.metadata["choices"]:
        raise SettingsError(f"{variable}: {text!r} is none of {', '.join(f.metadata['choices'])}")
    return value
